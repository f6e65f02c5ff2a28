"""From texts to codes in a Python session, with what a checkpoint keeps: no files, no trainer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.occupations.batches import padded_texts
from datamodules.occupations.languages import language_code
from datamodules.tokenizers.characters import TextNormalisation, encode
from datamodules.tokenizers.codes import CodeBook

TEXTS_AT_ONCE = 256


class CodedText(NamedTuple):
    """Codes of one text, the likeliest first, with their descriptions and probabilities.

    With `k_best`, `next_sets` are the next sets of codes with their probabilities; with
    `probabilities`, that is the flat head's probability of every code.
    """

    text: str
    codes: list[str]
    descriptions: list[str]
    confidences: list[float]
    set_confidence: float
    is_truncated: bool
    next_sets: Sequence[tuple[list[str], float]] = ()
    probabilities: dict[str, float] | None = None


class TextCoder:
    """Codes texts with a LitOccupationCoder outside a trainer.

    Args:
        module: with its network built.
        recipe: of its checkpoint.
        options: fields of the module's DecodingOptions that shall differ.

    Raises:
        RuntimeError: the module has no network yet.
    """

    def __init__(self, module: Any, recipe: dict[str, Any] | None, options: dict[str, Any]) -> None:
        if recipe is None or module.network is None:
            raise RuntimeError(
                "this LitOccupationCoder has not been trained: load one with "
                "LitOccupationCoder.load_from_checkpoint(path), or fit it first."
            )
        self.module, self.recipe = module, recipe
        self.options = replace(module.decoding, **options)
        self.book = CodeBook.from_dict(recipe["code_book"])

    def code(
        self, texts: Sequence[str], language: str | Sequence[str] | None = None
    ) -> list[CodedText]:
        """Return one result per text, in order; arguments as in `LitOccupationCoder.code`.

        Raises:
            ValueError: a single string instead of a list, or not one language per text.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts must be a list of texts, got one string: write [{texts!r}].")
        language_ids = self._language_ids(language, len(texts))
        normalise = TextNormalisation.from_dict(self.recipe["normalisation"])
        encoded = [encode(normalise(text), self.recipe["max_length"]) for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(encoded[i].code_points))
        results: dict[int, CodedText] = {}
        was_training = self.module.training
        self.module.eval()
        for start in range(0, len(order), TEXTS_AT_ONCE):
            rows = order[start : start + TEXTS_AT_ONCE]
            decoded = self._decode([encoded[i].code_points for i in rows], language_ids[rows])
            for place, index in enumerate(rows):
                found = {name: values[place].tolist() for name, values in decoded.items()}
                results[index] = self._result(texts[index], found, encoded[index].is_truncated)
        self.module.train(was_training)
        return [results[i] for i in range(len(texts))]

    def _language_ids(self, language: str | Sequence[str] | None, count: int) -> np.ndarray:
        default = self.recipe.get("default_language") or "unk"
        given = default if language is None else language
        names = [given] * count if isinstance(given, str) else list(given)
        if len(names) != count:
            raise ValueError(
                f"language has {len(names)} names for {count} texts: give one for all, or one each."
            )
        known = {name: index for index, name in enumerate(self.recipe["languages"])}
        return np.array([known.get(language_code(name, "unk"), 0) for name in names], np.int64)

    @torch.inference_mode()
    def _decode(self, texts: list[np.ndarray], language_ids: np.ndarray) -> dict[str, Tensor]:
        module = self.module
        batch = {**padded_texts(texts), "language_id": torch.from_numpy(language_ids)}
        batch = {name: value.to(module.device) for name, value in batch.items()}
        found = module.answers(*module(batch), self.options)
        return {name: values.cpu() for name, values in found.items()}

    def _result(self, text: str, found: dict[str, Any], is_truncated: bool) -> CodedText:
        ids = [code_id for code_id in found["code_ids"] if code_id >= 0]
        following = zip(found.get("next_ids", ()), found.get("next_confidence", ()), strict=True)
        probabilities = found.get("probabilities")
        return CodedText(
            text,
            self._codes(ids),
            [self.book.descriptions[i] for i in ids],
            found["code_confidence"][: len(ids)],
            found["set_confidence"],
            is_truncated,
            [(self._codes(codes), p) for codes, p in following if codes[0] >= 0],
            probabilities and dict(zip(self.book.codes, probabilities, strict=True)),
        )

    def _codes(self, ids: Sequence[int]) -> list[str]:
        return [self.book.codes[i] for i in ids if i >= 0]
