"""Language models as a LightningModule. Batch: TextBatch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from datamodules.core.batches import ChoiceBatch, PromptBatch, TextBatch
from datamodules.text.prompts import ChoiceDataset, PromptDataset, PromptRequest, completion_text
from datamodules.tokenizers.chat_template import Message
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from datamodules.tokenizers.wanted import TEXT_RECIPE_KEY
from lit_models.causal_lm import building
from lit_models.causal_lm.building import ComputationOptions, NetworkRequest
from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.exported_model import model_layout, restored_weights
from lit_models.causal_lm.generation import GenerationOptions, complete, most_positions
from lit_models.causal_lm.lora import LoraOptions, check_precision, with_adapters
from lit_models.causal_lm.loss import PLAIN, LossOptions, language_model_loss, sample_nats
from lit_models.causal_lm.metrics import TextMetrics, byte_table
from lit_models.causal_lm.presets import named_network
from lit_models.training.callbacks.board_samples import evaluating
from lit_models.training.exact import ExactModule, LossSum
from lit_models.training.export import Layout
from lit_models.training.metrics import SampleResult
from lit_models.training.optim import configured, parameter_groups

PROMPTS_AT_ONCE = 32


class LitCausalLM(ExactModule):
    """Next-token prediction. Logs losses in nats per target token.

    Args:
        optimizer: factory; it has no default, so that a rate is always chosen in the YAML.
        lr_scheduler: factory; none keeps the rate constant.
        network: name of a preset, or the shape of a decoder.
        pretrained: folder of a Hugging Face model to start from, instead of `network`.
        loss: what is trained on.
        lora: adapters on named layers; everything else stands still.
        freeze: parameters that stand still, by patterns of their names.
        generation: what prediction does with prompts.
        computation: compiling, recomputing, and who computes a pretrained model.
        lr_scaling: how the rate follows a global batch that grows with the devices.
        base_global_batch_size: the global batch for which the rate was chosen.
        init_from: checkpoint to take weights from.
    """

    export_keys: ClassVar[tuple[str, ...]] = (TEXT_RECIPE_KEY,)
    settled_options: ClassVar[tuple[str, ...]] = ("network", "pretrained", "lora")

    def __init__(
        self,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        network: DecoderConfig | str = "llama-tiny",
        pretrained: str | None = None,
        loss: LossOptions | None = None,
        lora: LoraOptions | None = None,
        freeze: list[str] | None = None,
        generation: GenerationOptions | None = None,
        computation: ComputationOptions | None = None,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        base_global_batch_size: int | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.loss, self.generation = loss or LossOptions(), generation or GenerationOptions()
        self.request = NetworkRequest(
            named_network(network) if isinstance(network, str) else network,
            pretrained,
            lora,
            computation or ComputationOptions(),
        )
        self.init_from = init_from
        self.recipe: Any = None  # a dict of plain values, from the data or a checkpoint
        self.is_trained = False  # whether a checkpoint's weights are to come
        self.is_ready = False  # whether the network is made ready for training
        self.network: Any = None  # a Decoder or a PretrainedDecoder once the recipe is known

    def blocks(self) -> list[nn.Module]:
        return self.network.blocks()

    def wanted_tokenizer(self) -> str | None:
        """Return the folder of the tokenizer that the data must be read with, if there is one."""
        return self.request.pretrained

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the model was trained with; there after `setup`."""
        return TextTokenizer.from_dict(self.recipe["tokenizer"])

    def setup(self, stage: str) -> None:
        """Take the recipe of the checkpoint, or make one for the data."""
        super().setup(stage)
        data = self.trainer.datamodule
        if self.recipe is None:
            trained = data.model_recipe()
            self.is_trained, facts = trained is not None, (data.tokenizer, data.context_length)
            self.recipe = building.recipe_of_run(self.request, trained, *facts, stage == "fit")
        check_precision(self.recipe["lora"], self.trainer.precision)
        if stage != "predict":
            building.check_data(self.recipe, data.tokenizer, data.context_length)

    def configure_model(self) -> None:
        if self.recipe is None:
            return
        if self.network is None:
            self._build(None if self.is_trained else self.request)
            if not self.is_trained:
                self.configure_model_from()
        if self.trainer.state.fn == "fit" and not self.is_ready:
            building.make_ready(self.network, self.request.computation, self.hparams.freeze or [])
            self.is_ready = True
        if self.request.computation.compile:
            building.compile_once(self.network)

    def forward(self, batch: TextBatch) -> Tensor:
        """Return the hidden states [R, T, D]."""
        return self.network(
            batch["input_ids"],
            batch["position_ids"],
            batch["document_ids"],
            batch["has_single_documents"],
        )

    def training_terms(self, batch: TextBatch) -> dict[str, LossSum]:
        weight = self.network.head.weight
        return language_model_loss(self(batch), weight, batch, self.loss)

    def term_weights(self) -> dict[str, float]:
        return {PLAIN: 0.0}

    def validation_step(self, batch: TextBatch, batch_idx: int) -> SampleResult:
        return self._evaluate("val", batch)

    def test_step(self, batch: TextBatch, batch_idx: int) -> SampleResult:
        return self._evaluate("test", batch)

    def predict_step(
        self,
        batch: PromptBatch | ChoiceBatch,
        batch_idx: int,
        options: GenerationOptions | None = None,
    ) -> dict[str, Tensor]:
        return complete(self.network, self.tokenizer, batch, options or self.generation)

    def generate(self, prompts: Sequence[str | Sequence[Message]], **options: Any) -> list[str]:
        """Return what follows each prompt.

        Args:
            prompts: texts, or chats as lists of messages.
            options: fields of GenerationOptions that shall differ, such as temperature=0.8.

        Raises:
            ValueError: a prompt is longer than the network's positions, or a chat's tokenizer has
                no template.
        """
        rows = [{"prompt" if isinstance(p, str) else "messages": p} for p in prompts]
        chosen = replace(self.generation, mode="generate", **options)
        return [
            completion_text(self.tokenizer, ids, characters)
            for done in self._answers(PromptDataset(self._asked(rows, chosen)), chosen)
            for ids, characters in zip(
                done["completion_ids"].numpy(), done["num_characters"].tolist(), strict=True
            )
        ]

    def score(
        self, prompts: Sequence[str | Sequence[Message]], continuations: Sequence[str]
    ) -> Tensor:
        """Return the natural logarithm of the probability of each continuation after its prompt,
        [n] float64.

        Raises:
            ValueError: not as many continuations as prompts, or as `generate`.
        """
        rows = [
            {"prompt" if isinstance(p, str) else "messages": p, "continuation": c}
            for p, c in zip(prompts, continuations, strict=True)
        ]
        chosen = replace(self.generation, mode="score")
        dataset = ChoiceDataset(self._asked(rows, chosen))
        return torch.cat([done["scores"][:, 0] for done in self._answers(dataset, chosen)])

    def max_positions(self, recipe: dict[str, Any] | None) -> int | None:
        """Return the most positions in prediction, or none; without a recipe of `pretrained`."""
        network = recipe["network"] if recipe else building.pretrained_recipe(self.request)
        return most_positions(network, self.generation.context)

    def configure_optimizers(self) -> Any:
        groups = parameter_groups(self, heads=[self.network.head.weight])
        return configured(self, self.optimizer(groups), self.lr_scheduler)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[TEXT_RECIPE_KEY] = self.recipe

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        trained = building.stored_recipe(checkpoint)
        if self.network is None:
            self.recipe = trained
            self._build(None)
        else:
            building.check_same(trained, self.recipe)

    def adapted_weights(self, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
        """Return the weights that `init_from` takes, and new adapters where it has none.

        Raises:
            ValueError: the checkpoint is of other tokens, or has adapters and this run none.
        """
        building.check_start(str(self.init_from), checkpoint.get(TEXT_RECIPE_KEY), self.recipe)
        return with_adapters(self, checkpoint["state_dict"])

    @classmethod
    def exported_layout(
        cls, content: dict[str, Any], weights: dict[str, Tensor], adapter: bool
    ) -> Layout:
        return model_layout(content, weights, adapter)

    @classmethod
    def restored_weights(
        cls, folder: Path, stored: dict[str, Tensor], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        return restored_weights(folder, stored, extra[TEXT_RECIPE_KEY])

    def _asked(self, rows: list[dict[str, Any]], options: GenerationOptions) -> PromptRequest:
        limit = self.max_positions(self.recipe)
        cuts = options.context == "recent"
        known = (options.mode, limit, options.max_new_tokens, cuts)
        return PromptRequest((), self.tokenizer, None, "", *known, given=rows)

    def _answers(
        self, dataset: PromptDataset, options: GenerationOptions
    ) -> Iterator[dict[str, Tensor]]:
        """Yield what the model makes of rows in memory, some at a time, on the CPU."""
        with evaluating(self), torch.no_grad():
            for ids in torch.arange(len(dataset.lengths)).split(PROMPTS_AT_ONCE):
                examples = [dataset.example(int(i), 0) for i in ids]
                batch: Any = {**dataset.collate(examples), "sample_id": ids}
                batch = self.transfer_batch_to_device(batch, self.device, 0)
                done = self.predict_step(batch, 0, options)
                yield {name: values.cpu() for name, values in done.items()}

    def _build(self, request: NetworkRequest | None) -> None:
        self.network = building.new_network(request, self.recipe)
        table = byte_table(self.tokenizer.byte_lengths(), self.network.head.weight.shape[0])
        self.val_metrics, self.test_metrics = TextMetrics(table), TextMetrics(table)

    def _evaluate(self, split: Literal["val", "test"], batch: TextBatch) -> SampleResult:
        metrics: TextMetrics = getattr(self, f"{split}_metrics")
        nats, of_sample = sample_nats(self(batch), self.network.head.weight, batch, self.loss)
        metrics.add_batch(nats, batch)
        for name, metric in metrics.items():
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
        return SampleResult(of_sample, {})
