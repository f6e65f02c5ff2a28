"""EncodedTextDataModule: what the data of text encoders shares, a tokenizer and its recipe."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.core.checkpoint_recipe import checkpoint_to_load, read_recipe
from datamodules.core.planned import PlannedDataModule, Stage
from datamodules.core.store import cache_root, digest_of, made_once
from datamodules.text.encoding import TextEncoding
from datamodules.text.framing import TextLimits
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions, make_tokenizer
from datamodules.tokenizers.wanted import model_options

RECIPE_KEY = "text_encoder_recipe"
MODULES = "LitTextScorer, LitRanker or LitRetriever"
TOKENIZER_FILE = "tokenizer.json"


class EncodedTextDataModule(PlannedDataModule):
    """Knows which tokenizer the texts are read with; a family says which texts, and its datasets.

    After `setup`, `recipe` holds what a checkpoint must keep to read a text in the same way.

    Args:
        tokenizer: of the texts; none takes that of a pretrained encoder, else bytes.
        text: how much of a text is seen; a checkpoint's own win over these.
        planned: batch sizes, plan and loader, see `PlannedDataModule`.
    """

    def __init__(
        self,
        tokenizer: TokenizerOptions | None = None,
        text: TextLimits = TextLimits(),  # noqa: B008 - frozen
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.tokenizer_options, self.text = tokenizer, text
        self.recipe: dict[str, Any] | None = None
        self.encoding: TextEncoding | None = None

    @abstractmethod
    def training_texts(self) -> Iterator[str]:
        """Yield the texts that a tokenizer's vocabulary is made of."""

    @abstractmethod
    def texts_digest(self) -> str:
        """Return the hex digest of those texts."""

    def token_counts(self) -> tuple[torch.Tensor, int]:
        """Return how many training texts hold each token [V] int64, special ones aside, and how
        many texts there are."""
        assert self.encoding is not None
        tokenizer = self.encoding.tokenizer
        counts, number = np.zeros(tokenizer.vocab_size, np.int64), 0
        for text in self.training_texts():
            number += 1
            counts[np.unique(self.encoding.ids_once(text))] += 1
        counts[tokenizer.special_ids] = 0
        return torch.from_numpy(counts), number

    def check_stage(self, stage: Stage) -> None:
        """Raise what `build` would, where it needs no tokens: before hours of tokenising."""

    @abstractmethod
    def prepare_tokens(self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]) -> None:
        """Make the tokens of a stage's texts in the cache; a prediction reads each text once, and
        makes them when it does."""

    def recipe_facts(self) -> dict[str, Any]:
        """Return what else a checkpoint must keep, such as the names of classes; none here."""
        return {}

    def prepare_data(self) -> None:
        """Make the tokenizer, and the tokens of all texts, in the cache, once per machine."""
        stages = self.wanted_stages(self._trainer_stage())
        for stage in stages:
            self.check_stage(stage)
        recipe = self._recipe(self._trainer_stage())
        encoding = TextEncoding(recipe)
        for stage in stages:
            self.prepare_tokens(stage, encoding, recipe)

    def setup(self, stage: str) -> None:
        """Take the recipe and build the datasets of the stage."""
        recipe = self._recipe(stage)
        encoding = TextEncoding(recipe)
        if self.encoding is None or self.encoding.digest != encoding.digest:
            self.encoding = encoding
            self.datasets.clear()
        self.recipe = recipe
        if stage == "predict":
            self.datasets.pop("predict", None)
        super().setup(stage)

    def _recipe(self, stage: str) -> dict[str, Any]:
        """Return the recipe of the model that is evaluated, or the one to train with."""
        recipe = self._trained_recipe(stage)
        if recipe is not None:
            return recipe
        limits = {"text": asdict(self.text)}
        return {"tokenizer": self._new_tokenizer().to_dict(), **limits, **self.recipe_facts()}

    def _trained_recipe(self, stage: str) -> dict[str, Any] | None:
        """Return the recipe of the model that is evaluated; none in training.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged or of another family, or a prediction has no trained model.
        """
        if stage == "fit":
            return None
        if path := checkpoint_to_load(self.trainer):
            return read_recipe(Path(path), RECIPE_KEY, "text encoder's", MODULES)
        model = getattr(self.trainer, "lightning_module", None)
        recipe = getattr(model, "recipe", None) or self.recipe
        if recipe is None and stage == "predict":
            raise ValueError(
                "predict needs a trained model: give --ckpt_path, in a script "
                "predict(ckpt_path=…) or load_from_checkpoint(path) of its class."
            )
        return recipe

    def _new_tokenizer(self) -> TextTokenizer:
        options = model_options(self.trainer, self.tokenizer_options)
        if options.kind in ("bytes", "folder"):  # made at once
            return make_tokenizer(options, iter(()))
        kept = {k: v for k, v in asdict(self.text).items() if not k.startswith("max_")}
        facts = [options.facts(), self.texts_digest(), kept]
        folder = made_once(
            cache_root() / "tokenizers" / digest_of(facts), lambda f: self._write(f, options)
        )
        return TextTokenizer.from_dict(json.loads((folder / TOKENIZER_FILE).read_text("utf-8")))

    def _write(self, folder: Path, options: TokenizerOptions) -> None:
        texts = (self.text.normalised(text) for text in self.training_texts())
        values = make_tokenizer(options, texts).to_dict()
        (folder / TOKENIZER_FILE).write_text(json.dumps(values), "utf-8")
