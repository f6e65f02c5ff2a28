"""Language models as a LightningModule. Batch: TextBatch."""

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from datamodules.core.batches import TERM, TextBatch
from datamodules.core.plan import check_range
from datamodules.core.planned import ModelFacts
from datamodules.core.store import digest_of
from datamodules.text.prompts import PromptDataset, completion_text, read_prompts, rows_in_memory
from datamodules.tokenizers.text import TEXT_RECIPE_KEY, Message, TextTokenizer
from lit_models.causal_lm.adapters import LoraOptions, add_lora, freeze, lora_recipe, with_adapters
from lit_models.causal_lm.export import model_layout, restored_weights
from lit_models.causal_lm.generation import GenerationOptions, generate, score
from lit_models.causal_lm.loss import TextMetrics, language_model_loss, nats_at, sample_nats
from lit_models.causal_lm.network import DecoderConfig, check_isolation, compile_blocks, preset
from lit_models.causal_lm.pretrained import (
    Recipe,
    check_recipe,
    load_network,
    most_positions,
    network_from_config,
    parameters_on_meta,
    read_recipe,
)
from lit_models.training.exact import ExactModule
from lit_models.training.ledger import ledger_of
from lit_models.training.metrics import LossSum, SampleResult, evaluating, texts_for
from lit_models.training.optim import configured, parameter_groups

PROMPTS_AT_ONCE = 32
# Keys of a config.json that do not affect the computation.
NO_FUNCTION = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
}


@dataclass(frozen=True)
class ComputationOptions:
    """Compilation and activation checkpointing; they change results only by rounding.

    Args:
        compile: compile each block, and the loss of large logits.
        activation_checkpointing: recompute blocks in the backward pass, a third more work;
            `selective` keeps results of products and attention, half of all, for little work.
    """

    compile: bool = False
    activation_checkpointing: bool | Literal["selective"] = False


def start_weights(module: Any, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of an `init_from` checkpoint, plus new adapters that it lacks.

    Raises:
        ValueError: tokenizer or network differ, or the checkpoint has adapters and this run none.
    """
    trained = checkpoint.get(module.recipe_key)  # `None` in a checkpoint of another family
    source = f"model.init_from {module.init_from}"
    if trained is not None:
        if trained.get("lora") and not module.recipe["lora"]:  # older recipes may lack the key
            raise ValueError(
                f"{source} was trained with LoRA, and this run has none; `unisono export` "
                "merges it: give that folder."
            )
        check_same(trained, module.recipe, source, is_start=True)
    return with_adapters(module, checkpoint["state_dict"])


class LitCausalLM(ExactModule):
    """Next-token prediction. Logs losses in nats per target token.

    Args:
        optimizer: factory; it has no default, so that a rate is always chosen in the YAML.
        lr_scheduler: factory; `None` keeps the rate constant.
        network: name of a preset, such as depth-12, or the shape of a decoder.
        pretrained: folder of a Hugging Face model to start from, instead of `network`.
        lora: adapters on named layers; all other weights are frozen.
        freeze: name patterns of parameters to freeze.
        generation: how prediction completes or scores prompts.
        computation: compilation and activation checkpointing.
        init_from: checkpoint to take weights from.

    Raises:
        ValueError: there is no preset of this name.
    """

    takes_half_weights: ClassVar[bool] = True
    recipe_key: ClassVar[str] = TEXT_RECIPE_KEY
    settled_options: ClassVar[tuple[str, ...]] = ("network", "pretrained", "lora")
    uneven_steps: ClassVar[tuple[str, ...]] = ("predict_step",)
    exported_layout = staticmethod(model_layout)
    restored_weights = staticmethod(restored_weights)
    adapted_weights = start_weights

    def __init__(
        self,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        network: DecoderConfig | str = "llama-tiny",
        pretrained: str | None = None,
        lora: LoraOptions | None = None,
        freeze: list[str] | None = None,
        generation: GenerationOptions | None = None,
        computation: ComputationOptions | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.generation = generation or GenerationOptions()
        self.config = preset(network) if isinstance(network, str) else network
        self.pretrained, self.lora = pretrained, lora
        self.computation = computation or ComputationOptions()
        self.init_from = init_from
        self.network: Any = None  # a Decoder or a PretrainedDecoder once the recipe is known

    def blocks(self) -> list[nn.Module]:
        return self.network.blocks()

    def flops(self, lengths: np.ndarray) -> float:
        """As in ExactModule, plus attention within documents, counted as if not causal: per token
        6 N + 12 L D T for N weights, L layers, and T positions of its document."""
        width = len(self.blocks()) * self.network.embedding.weight.shape[1]
        return super().flops(lengths) + 12 * width * float((lengths**2).sum())

    def model_facts(self) -> ModelFacts:
        facts, pretrained = super().model_facts(), self.pretrained
        compiles = self.computation.compile
        options: dict[str, Any] = {"generation": self.generation, "compiles": compiles}
        if self._trainer is not None and self.trainer.predicting and (facts.recipe or pretrained):
            network = facts.recipe["network"] if facts.recipe else read_recipe(str(pretrained))
            options["max_positions"] = most_positions(network)
        return replace(facts, tokenizer=pretrained, options=options)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the model's training; available after `setup`."""
        return TextTokenizer.from_dict(self.recipe["tokenizer"])

    def recipe_of(self, data: Any, trained: Recipe | None) -> Recipe:
        """Return the checkpoint's recipe; in training, a new one from the data and the options.

        Raises:
            FileNotFoundError: the folder `pretrained` does not exist.
            ValueError: data and network do not fit each other, a LoRA target matches no layer, or
                the checkpoint's weights do not fit the new recipe.
        """
        if trained is not None and not self.is_training_run:
            return trained
        tokenizer, lora = data.tokenizer, None
        if self.pretrained is None:
            size = self.config.vocab_size or tokenizer.vocab_size
            network = replace(self.config, vocab_size=size).recipe
        elif trained is not None and not Path(self.pretrained).expanduser().exists():
            network = trained["network"]  # the folder is gone; the checkpoint suffices
        else:
            network = read_recipe(self.pretrained)
        check_recipe(network, data.context_length, tokenizer.vocab_size)
        if self.lora is not None:
            with torch.device("meta"):
                lora = lora_recipe(network_from_config(network), self.lora, self.pretrained)
        recipe = {"tokenizer": tokenizer.to_dict(), "network": network, "lora": lora}
        if trained is not None:
            check_same(trained, recipe)
        return recipe

    def build(self, recipe: Recipe, data: Any) -> None:
        lora, folder = recipe["lora"], None if data is None else self.pretrained
        is_late = hasattr(getattr(self._trainer, "strategy", None), "fills_late")
        with parameters_on_meta() if is_late else nullcontext():
            if is_late or folder is None:
                self.network = network_from_config(recipe["network"])
            else:
                # A frozen base in bfloat16 is loaded in the dtype of its files: the same values,
                # and for most folders half the memory while loading.
                is_short = lora is not None and lora["base_dtype"] != "float32"
                self.network = load_network(folder, None if is_short else torch.float32)
            if lora:
                add_lora(self.network, lora)
        if is_late and data is not None:
            source = None if folder is None else load_network(folder, None)
            if source is not None and self.is_training_run:
                check_isolation(source)
            self.late_weights.append(_first_weights(recipe, source))
        if self.hparams.freeze:
            freeze(self.network, self.hparams.freeze)
        sizes = (self.tokenizer.byte_lengths(), self.network.head.weight.shape[0])
        self.val_metrics, self.test_metrics = TextMetrics(*sizes), TextMetrics(*sizes)

    def prepare(self, data: Any, is_new: bool) -> None:
        """Check that network and data fit; set up compilation and activation checkpointing."""
        if not self.trainer.predicting:
            check_tokens(self.recipe, data.tokenizer.to_dict(), "the model")
            check_recipe(self.recipe["network"], data.context_length, data.tokenizer.vocab_size)
        completes = self.trainer.predicting and self.generation.mode != "score"  # one text a row
        if (is_new or self.is_training_run) and not (completes or self.network.head.weight.is_meta):
            check_isolation(self.network)
        if self.is_training_run and (recomputes := self.computation.activation_checkpointing):
            self.network.recompute_blocks(keeps_products=recomputes == "selective")
        if self.computation.compile and not self.network.is_compiled:
            compile_blocks(self.network)

    def forward(self, batch: TextBatch) -> Tensor:
        """Return the hidden states [R, T, D]."""
        rows = (batch["input_ids"], batch["position_ids"], batch["document_ids"])
        bounds = batch["document_bounds"], batch["longest_document"]
        return self.network(*rows, batch["has_single_documents"], bounds=bounds)

    def training_terms(self, batch: TextBatch) -> dict[str, LossSum]:
        head, compiles = self.network.head.weight, self.network.is_compiled
        return {TERM: language_model_loss(self(batch), head, batch, compiles)}

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: TextBatch, batch_idx: int) -> SampleResult:
        return self._evaluate("test", batch)

    def predict_step(
        self, batch: Any, batch_idx: int, options: GenerationOptions | None = None, hear: Any = None
    ) -> dict[str, Tensor]:
        """Return completions of a PromptBatch, or scores of a ChoiceBatch if mode is `score`."""
        options = options or self.generation
        if options.mode == "score":
            return score(self(batch), self.network.head.weight, batch)
        prompts = (batch["input_ids"], batch["lengths"], batch["sample_id"])
        return generate(self.network, self.tokenizer, *prompts, options, hear)._asdict()

    def generate(
        self, prompts: Sequence[str | Sequence[Message]], hear: Any = None, **options: Any
    ) -> list[str]:
        """Return the completion of each prompt.

        Args:
            prompts: texts, or chats as lists of messages.
            hear: callback as in `generation.generate`, for up to `PROMPTS_AT_ONCE` prompts a time.
            options: fields of GenerationOptions to override, such as temperature=0.8.

        Raises:
            ValueError: a prompt has more tokens than the network has positions, or the tokenizer
                has no template for a chat.
        """
        chosen = replace(self.generation, mode="generate", **options)
        step = partial(self.predict_step, hear=hear)
        return list(self.completions(self.prompt_dataset(prompts), chosen, step))

    def prompt_dataset(self, prompts: Sequence[str | Sequence[Message]]) -> PromptDataset:
        """Return texts and chats as a dataset; raises as `generate`."""
        prompts = texts_for(self, prompts, are_texts=False)
        rows = [{"prompt" if isinstance(p, str) else "messages": p} for p in prompts]
        limit = most_positions(self.recipe["network"])
        read = read_prompts(rows_in_memory(rows), self.tokenizer, max_positions=limit)
        return PromptDataset(read)

    def completions(
        self, dataset: PromptDataset, options: GenerationOptions, step: Any = None
    ) -> Iterator[str]:
        """Yield each prompt's completion. Args: step: in a run, the strategy's `predict_step`."""
        with evaluating(self), torch.no_grad():
            for ids in torch.arange(len(dataset.lengths)).split(PROMPTS_AT_ONCE):
                batch: Any = {**dataset.batch(ids.numpy(), 0), "sample_id": ids}
                batch = self.transfer_batch_to_device(batch, self.device, 0)
                done = (step or self.predict_step)(batch, 0, options=options)
                all_ids, sizes = done["completion_ids"].cpu().numpy(), done["num_characters"]
                yield from map(partial(completion_text, self.tokenizer), all_ids, sizes.tolist())

    @torch.no_grad()
    def token_nats(
        self, prompt: str | Sequence[Message], answer: Sequence[int] = ()
    ) -> list[tuple[str, float]]:
        """Return (text, nats given the tokens before it) of each token of a prompt and then of an
        answer's token ids; the first token has NaN, or is left out if it has no text."""
        ids = self.prompt_dataset([prompt]).batch(np.arange(1), 0)["input_ids"]
        ids = torch.cat([ids[0], torch.tensor(answer, dtype=ids.dtype)]).to(self.device)  # [T]
        before, after = ids[None, :-1], ids[1:]
        places = torch.arange(len(after), device=self.device)
        with evaluating(self):
            hidden = self.network(before, places[None], torch.zeros_like(before), True)
        _, nats = nats_at(hidden, self.network.head.weight, after, places)
        (first, *others), decode = ids.tolist(), self.tokenizer.decode_continuation
        texts = [decode([first]), *(decode([one], skip_special_tokens=False) for one in others)]
        pairs = list(zip(texts, [torch.nan, *nats.tolist()], strict=True))
        return pairs if texts[0] else pairs[1:]

    def configure_optimizers(self) -> Any:
        groups = parameter_groups(self, heads=[self.network.head.weight])
        return configured(self, self.optimizer(groups), self.lr_scheduler)

    def take_recipe(self, trained: Recipe) -> None:
        check_same(trained, self.recipe)

    def _evaluate(self, split: Literal["val", "test"], batch: TextBatch) -> SampleResult:
        metrics: TextMetrics = getattr(self, f"{split}_metrics")
        nats, of_sample = sample_nats(self(batch), self.network.head.weight, batch)
        metrics.add_batch(nats, batch)
        for name, metric in metrics.items():
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
        return SampleResult(of_sample, {})


def _first_weights(recipe: Recipe, source: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of a new network's weights one by one: those of `source`, or randomly
    drawn ones, then the adapters'."""
    with torch.device("meta"):
        network = network_from_config(recipe["network"])
    short = recipe["lora"] and recipe["lora"]["base_dtype"] != "float32"  # rounded, as elsewhere
    for name, w in network.drawn() if source is None else source.state_dict().items():
        yield f"network.{name}", w.bfloat16() if short and w.is_floating_point() else w
        del w  # before the next one is drawn
    if recipe["lora"]:
        add_lora(network, recipe["lora"])
        added = ((n, w) for n, w in network.named_parameters() if not w.is_meta)
        yield from ((f"network.{n}", w.detach()) for n, w in added)


def check_same(
    trained: Recipe, recipe: Recipe, source: str = "the checkpoint", is_start: bool = False
) -> None:
    """Refuse weights that were trained with another tokenizer or network than this run's.

    Dropout rates may differ, and so may max_positions with rotary positions.

    Args:
        is_start: a new training starts from the weights: it may add adapters, change the precision
            of frozen weights, and untie the head from the embedding.

    Raises:
        ValueError: an option differs; the message lists all that do.
    """
    check_tokens(trained, recipe["tokenizer"], source)
    there, here = _network_facts(trained["network"]), _network_facts(recipe["network"])
    if is_start and there.get("network.tied") and there.keys() == here.keys():
        there["network.tied"] = here["network.tied"]
    if trained.get("lora") or not is_start:
        for facts, lora in ((there, trained["lora"] or {}), (here, recipe["lora"] or {})):
            facts["lora.layers"] = sorted(lora.get("layers", ()))
            facts |= {f"lora.{name}": lora.get(name) for name in ("rank", "alpha", "base_dtype")}
        if is_start:  # more layers may be adapted
            there["lora.base_dtype"] = here["lora.base_dtype"]
            here["lora.layers"] = sorted(set(there["lora.layers"]) & set(here["lora.layers"]))
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    changed = [f"{name} {there.get(name)} there and {here.get(name)} here" for name in names]
    if changed:
        raise ValueError(
            f"{source} was trained with other options, with which its weights mean something "
            f"else: {'; '.join(changed)}. Leave them out to take its own, or begin a new run."
        )


def check_tokens(trained: Recipe, tokenizer: dict[str, Any], source: str) -> None:
    """Raise ValueError if the data's tokenizer differs from the recipe's."""
    if digest_of(trained["tokenizer"]) != digest_of(tokenizer):
        raise ValueError(
            f"{source} was trained with another tokenizer than that of the data; set "
            "data.tokenizer to the one of its training, or `unisono export` it and give the folder "
            "as model.pretrained."
        )


def _network_facts(network: Recipe) -> dict[str, Any]:
    facts = {"kind": network["kind"], **network["config"]}
    if network["kind"] == "own" and "positions" in facts:  # an encoder-decoder has no `positions`
        config = DecoderConfig(**network["config"])
        facts |= {"num_kv_heads": config.kv_heads, "feed_forward": config.inner_size}
        facts.pop("max_positions" if config.positions == "rotary" else "rope_theta")
    names = [n for n in facts if n not in NO_FUNCTION and not re.search("^_|dropout|pdrop$", n)]
    return {f"network.{name}": facts[name] for name in names}


class Samples(Callback):
    """Completes prompts, without any effect on the training: every few optimizer steps for the
    trainer's TensorBoard loggers, if any, and at the end, to print the first prompt's completion.

    Args:
        prompts: texts to complete; an empty one starts a document.
        every_n_steps: optimizer steps between samples.
        generation: options; `None` draws 200 tokens at temperature 0.8.

    Raises:
        ValueError: an interval below 1, no prompt, or one that the model cannot read.
    """

    def __init__(
        self,
        prompts: list[str],
        every_n_steps: int = 500,
        generation: GenerationOptions | None = None,
    ) -> None:
        check_range("Samples", 1, every_n_steps=every_n_steps)
        self.prompts, self.every_n_steps = prompts, every_n_steps
        self.options = generation or GenerationOptions(max_new_tokens=200, temperature=0.8)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step = trainer.global_step
        self.dataset = pl_module.prompt_dataset(self.prompts)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, before = trainer.global_step, self._seen_step
        self._seen_step = step  # does not change between accumulated micro-batches
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if step == before or step % self.every_n_steps or not boards:
            return
        step_of = trainer.strategy.predict_step
        texts = list(pl_module.completions(self.dataset, self.options, step_of))
        for board in boards if trainer.is_global_zero else []:
            for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
                block = f"```\n{prompt}{text}\n```"  # a code block keeps line breaks
                board.experiment.add_text(f"samples/{number}", block, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(ledger_of(trainer), "is_stopping", False):
            return
        text, *_ = pl_module.completions(self.dataset, self.options, trainer.strategy.predict_step)
        if trainer.is_global_zero:
            shown = Text.assemble("a sample: ", (self.prompts[0], "bold"), text)
            Console(highlight=False).print(shown, soft_wrap=True)
