"""Base class of the modules around a text encoder: building, recipe, freezing, rates."""

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from datamodules.core.planned import ModelFacts
from datamodules.text.encoding import RECIPE_KEY
from datamodules.tokenizers.text import TextTokenizer
from lit_models.blocks import layer_rates
from lit_models.causal_lm.adapters import LoraOptions, add_lora, lora_recipe, with_adapters
from lit_models.causal_lm.adapters import freeze as freeze_by_name
from lit_models.causal_lm.pretrained import read_config, weight_files
from lit_models.seo.encoders import (
    UNREACHED,
    Pooling,
    PretrainedEncoder,
    TextEncoder,
    TransformerEncoder,
    read_head,
    stored_pooling,
)
from lit_models.training.checkpoints import misfits
from lit_models.training.exact import ExactModule
from lit_models.training.optim import configured, parameter_groups

log = logging.getLogger(__name__)
ENCODER = "network.encoder."
TEXTS_AT_ONCE = 64  # per pass, of texts that a script hands in
EncoderFactory = Callable[[int], TextEncoder]  # tokens of the vocabulary -> encoder


class EncodedTextModule(ExactModule):
    """Base class of modules with a text encoder; subclasses add `make_network` and the steps.

    Args:
        optimizer: factory; it has no default, so that a rate is always chosen in the YAML.
        lr_scheduler: factory; `None` keeps the rate constant.
        encoder: factory of an encoder from scratch; it gets the size of the vocabulary.
        pretrained: folder of a Hugging Face encoder, instead of `encoder`.
        pooling: of token vectors to one vector per row, unless `pretrained` specifies it.
        lora: adapters on layers of the encoder, whose other weights are frozen.
        freeze: name patterns of parameters to freeze.
        layer_decay: factor of the learning rate per encoder layer below the top.
        init_from: checkpoint to take weights from.
    """

    takes_half_weights: ClassVar[bool] = True
    recipe_key: ClassVar[str] = RECIPE_KEY
    settled_options: ClassVar[tuple[str, ...]] = ("pretrained", "lora")
    encoder_class: ClassVar[type[PretrainedEncoder]] = PretrainedEncoder
    network: Any

    def __init__(
        self,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        encoder: EncoderFactory = TransformerEncoder,
        pretrained: str | None = None,
        pooling: Pooling = "mean",
        lora: LoraOptions | None = None,
        freeze: list[str] | None = None,
        layer_decay: float = 1.0,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = type(self).__name__  # before fsdp changes the class
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.encoder_factory, self.pretrained, self.pooling = encoder, pretrained, pooling
        self.lora, self.freeze_patterns = lora, freeze
        self.init_from = init_from
        self.network = None  # from `make_network`, once the recipe is known

    @abstractmethod
    def make_network(self, encoder: TextEncoder) -> nn.Module:
        """Return the network around an encoder; its attribute `encoder` must hold the encoder."""

    def blocks(self) -> list[nn.Module]:
        return self.network.encoder.blocks()

    def model_facts(self) -> ModelFacts:
        return replace(super().model_facts(), tokenizer=self.pretrained)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the model's training; available after `setup`."""
        return TextTokenizer.from_dict(self.recipe["tokenizer"])

    def recipe_of(self, data: Any, trained: dict[str, Any] | None) -> dict[str, Any]:
        """Return the data's recipe: tokenizer, lengths and more."""
        return {**data.recipe}

    def meanings(self, recipe: dict[str, Any]) -> dict[str, Any]:
        return {"tokenizer": recipe["tokenizer"]}

    def build(self, recipe: dict[str, Any], data: Any) -> None:
        known = recipe.get("encoder")
        if known is not None and known["kind"] == "transformers":
            encoder = self.encoder_class(known["config"])
        elif known is not None or self.pretrained is None:
            encoder = self.encoder_factory(self.tokenizer.vocab_size)
        else:
            content = read_config(self.pretrained)
            weight_files(self.pretrained)  # raises if there are only pickles
            encoder = self.encoder_class(content, self.pretrained)
            limit = getattr(encoder.model.config, "max_position_embeddings", None)
            tables = [m for n, m in encoder.named_modules() if n.endswith("position_embeddings")]
            if (padding := getattr(next(iter(tables), None), "padding_idx", None)) is not None:
                limit -= padding + 1  # positions start after padding's index, as in RoBERTa
            longest = recipe["text"]["max_length"]
            if limit is not None and longest > limit:
                raise ValueError(
                    f"data.text.max_length {longest} is longer than the {limit} positions of "
                    f"{self.pretrained}; lower it to {limit} or less."
                )
            stored = stored_pooling(self.pretrained, hasattr(self, "rank"))
            encoder.check_padding()
            recipe["encoder"] = {"kind": "transformers", "config": content, **stored}
        if isinstance(encoder, PretrainedEncoder):
            self.reaches_all_parameters = encoder.model.config.model_type not in UNREACHED
        if known is None:
            if data is not None and hasattr(encoder, "start_from"):
                encoder.start_from(*data.token_counts())
            recipe.setdefault("encoder", {"kind": "own"})
            recipe["lora"] = self.lora and lora_recipe(encoder, self.lora, self.pretrained)
        encoder.pooling = recipe["encoder"].get("pooling", self.pooling)
        recipe["kind"] = self.kind
        if recipe["lora"] is not None:
            add_lora(encoder, recipe["lora"])
        self.network = self.make_network(encoder)
        if known is None and self.pretrained is not None:
            read_head(self.network, self.pretrained)
        if self.freeze_patterns:
            freeze_by_name(self.network, self.freeze_patterns)

    def configure_optimizers(self) -> Any:
        rates = layer_rates(self, self.network.encoder, self.hparams.layer_decay)
        return configured(self, self.optimizer(parameter_groups(self, rates)), self.lr_scheduler)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kind = self.stored_recipe(checkpoint)["kind"]
        if kind != self.kind:
            raise ValueError(
                f"the checkpoint is of a {kind}; give one of {self.kind}, or take the encoder "
                "alone with model.init_from."
            )
        super().on_load_checkpoint(checkpoint)

    def adapted_weights(self, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
        """Return the weights with those of `init_from` for the encoder and for heads with the same
        meaning and shape. Adapters that the checkpoint lacks start as new ones.

        Raises:
            ValueError: the checkpoint is of another family, tokenizer or encoder.
        """
        trained, source = checkpoint.get(RECIPE_KEY), self.init_from
        if trained is None or trained["tokenizer"] != self.recipe["tokenizer"]:
            what = "of another family" if trained is None else "of another tokenizer"
            raise ValueError(
                f"init_from {source} is {what}: its embeddings mean other tokens. Take a "
                "checkpoint of seo that was trained on the same texts and data.tokenizer."
            )
        own, stored = self.state_dict(), checkpoint["state_dict"]
        here = {n: t for n, t in own.items() if n.startswith(ENCODER)}
        there = {n: t for n, t in with_adapters(self, stored).items() if n.startswith(ENCODER)}
        if wrong := misfits(here, there):
            raise ValueError(
                f"init_from {source} has another encoder: {wrong}. All of its weights must fit: "
                "give model.encoder, model.pretrained and model.lora the values of that run, or "
                "leave init_from out."
            )
        is_same_kind = trained["kind"] == self.kind
        weights = {
            name: tensor
            for name, tensor in stored.items()
            if name in own
            and own[name].shape == tensor.shape
            and (name.startswith(ENCODER) or (is_same_kind and self.is_same_head(name, trained)))
        }
        if new := sorted(n for n in own.keys() - weights.keys() if n.startswith("network.")):
            log.info("init_from %s: these begin anew: %s", source, ", ".join(new))
        return {**own, **weights}

    def is_same_head(self, name: str, trained: dict[str, Any]) -> bool:
        """Whether a weight outside the encoder means the same in `trained`, of the same kind."""
        return True
