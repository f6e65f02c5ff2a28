"""Language models as a LightningModule. Batch: TextBatch."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from datamodules.batches import ChoiceBatch, PromptBatch, TextBatch
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.generation import GenerationOptions, complete, most_positions
from lit_models.causal_lm.loss import PLAIN, TERM, LossOptions, language_model_loss
from lit_models.causal_lm.presets import named_network
from lit_models.causal_lm.pretrained import network_from_config, own_recipe
from lit_models.training.exact import ExactModule, LossSum
from lit_models.training.metrics import SumCount
from lit_models.training.optim import configured, parameter_groups

RECIPE_KEY = "text_recipe"


class LitCausalLM(ExactModule):
    """Next-token prediction. Logs losses in nats per target token.

    Args:
        optimizer: factory; it has no default, so that a rate is always chosen in the YAML.
        lr_scheduler: factory; none keeps the rate constant.
        network: name of a preset, or the shape of a decoder.
        loss: what is trained on.
        generation: what prediction does with prompts.
        lr_scaling: how the rate follows a global batch that grows with the devices.
        base_global_batch_size: the global batch for which the rate was chosen.
        init_from: checkpoint to take weights from.
    """

    export_keys = (RECIPE_KEY,)

    def __init__(
        self,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        network: str | DecoderConfig = "llama-tiny",
        loss: LossOptions | None = None,
        generation: GenerationOptions | None = None,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        base_global_batch_size: int | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.config = named_network(network) if isinstance(network, str) else network
        self.loss, self.generation = loss or LossOptions(), generation or GenerationOptions()
        self.init_from = init_from
        self.recipe: Any = None  # a dict of plain values, from the data or a checkpoint
        self.network: Any = None  # a Decoder once the vocabulary is known
        self.val_loss, self.test_loss = SumCount(), SumCount()

    def blocks(self) -> list[nn.Module]:
        return list(self.network.layers)

    def setup(self, stage: str) -> None:
        """Take the tokenizer that the data was read with."""
        super().setup(stage)
        if self.recipe is None and stage == "predict":
            self.recipe = self.trainer.datamodule.model_recipe()
        if self.recipe is None:
            tokenizer = self.trainer.datamodule.tokenizer
            size = self.config.vocab_size or tokenizer.vocab_size
            self.config = replace(self.config, vocab_size=size)
            self.recipe = {"tokenizer": tokenizer.to_dict(), "network": own_recipe(self.config)}

    def configure_model(self) -> None:
        if self.network is None and self.recipe is not None:
            self.network = network_from_config(self.recipe["network"])
            if self.trainer.state.fn == "fit":
                self.configure_model_from()

    def forward(self, batch: TextBatch) -> Tensor:
        """Return the hidden states [R, T, D]."""
        return self.network(batch["input_ids"], batch["position_ids"], batch["document_ids"])

    def training_terms(self, batch: TextBatch) -> dict[str, LossSum]:
        return language_model_loss(
            self(batch), self.network.head.weight, batch, self.loss, training=self.training
        )

    def term_weights(self) -> dict[str, float]:
        return {PLAIN: 0.0}

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        self.val_loss.update(*self.training_terms(batch)[TERM])
        self.log("val/loss", self.val_loss)

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        self.test_loss.update(*self.training_terms(batch)[TERM])
        self.log("test/loss", self.test_loss)

    def predict_step(
        self,
        batch: PromptBatch | ChoiceBatch,
        batch_idx: int,
        options: GenerationOptions | None = None,
    ) -> dict[str, Tensor]:
        return complete(self.network, self.tokenizer, batch, options or self.generation)

    def max_positions(self, recipe: dict[str, Any]) -> int | None:
        """Return the most positions that a text may have in prediction; none for no limit."""
        return most_positions(recipe["network"], self.generation.context)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the model was trained with; there after `setup`."""
        return TextTokenizer.from_dict(self.recipe["tokenizer"])

    def configure_optimizers(self) -> Any:
        return configured(self, self.optimizer(parameter_groups(self)), self.lr_scheduler)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[RECIPE_KEY] = self.recipe

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if RECIPE_KEY not in checkpoint:
            raise ValueError(
                "the checkpoint holds no text recipe: it is of another family; give one of "
                "LitCausalLM."
            )
        self.recipe = checkpoint[RECIPE_KEY]
        if self.network is None:
            self.network = network_from_config(self.recipe["network"])
