"""Texts coded from Python."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from datamodules.core.batches import padded_texts
from datamodules.occupations.store import language_code
from datamodules.tokenizers.codes import TextNormalisation, encode
from lit_models.occupation_coder.answers.coverage import PlausibleSets, code_marginals
from lit_models.occupation_coder.decoding import answers
from lit_models.training.metrics import evaluating, texts_for

TEXTS_AT_ONCE = 256


class CodedText(NamedTuple):
    """Codes of one text, the likeliest first, with their descriptions and probabilities; none where
    it is empty, as in a coded table.

    With `k_best`, `next_sets` are the next sets of codes with their probabilities; with `coverage`,
    `plausible` are the codes of a set that holds the truth in that share of texts, likeliest first.
    """

    text: str
    codes: list[str]
    descriptions: list[str]
    confidences: list[float]
    set_confidence: float
    is_truncated: bool
    next_sets: Sequence[tuple[list[str], float]] = ()
    plausible: Sequence[str] = ()


def plausible(marginals: Sequence[float], limit: float) -> list[int]:
    """The codes of these probabilities [C] that reach a limit, likeliest first."""
    chosen = [code for code, share in enumerate(marginals) if share >= limit]
    return sorted(chosen, key=lambda code: -marginals[code])


def code_texts(
    coder: Any,
    texts: Sequence[str],
    language: str | Sequence[str] | None,
    options: Mapping[str, Any],
) -> list[CodedText]:
    """As `LitOccupationCoder.code`, of a coder and with these options of decoding."""
    texts = texts_for(coder, texts)
    if language is None or isinstance(language, str):
        language = [language or coder.recipe.get("default_language") or "unk"] * len(texts)
    if len(language) != len(texts):
        raise ValueError(
            f"language has {len(language)} names for {len(texts)} texts: give one for all, or "
            "one each."
        )
    language_index = {name: index for index, name in enumerate(coder.recipe["languages"])}
    language_ids = [language_index.get(language_code(name), 0) for name in language]
    normalise = TextNormalisation.from_dict(coder.recipe["normalisation"])
    normalised, most = [normalise(text) for text in texts], coder.recipe["max_length"]
    encoded = [encode(text, most) for text in normalised]
    order = sorted(filter(normalised.__getitem__, range(len(texts))), key=lambda i: len(encoded[i]))
    decoding = replace(coder.decoding, **options)
    sets = None if decoding.coverage is None else PlausibleSets(decoding)
    limit = 0.0 if sets is None else sets.limit(coder.recipe)
    results = {i: CodedText(text, [], [], [], 0.0, False) for i, text in enumerate(texts)}
    book = coder.recipe["code_book"]

    def named(ids: Sequence[int], what: str = "codes") -> list[str]:
        return [book[what][i] for i in ids if i >= 0]

    for start in range(0, len(order), TEXTS_AT_ONCE):
        rows = order[start : start + TEXTS_AT_ONCE]
        batch = padded_texts([encoded[i] for i in rows])
        batch["language_id"] = torch.tensor([language_ids[i] for i in rows])
        batch = {name: value.to(coder.device) for name, value in batch.items()}
        with evaluating(coder), torch.inference_mode():
            memory, flat = coder(batch)
            found = answers(coder.network, memory, flat, decoding, coder.temperature)
            if sets is not None:
                marginals = code_marginals(coder.network, memory, flat, decoding)
                found["marginals"] = marginals
        columns = {name: values.tolist() for name, values in found.items()}
        for place, index in enumerate(rows):
            one = {name: values[place] for name, values in columns.items()}
            codes = named(one["code_ids"])
            others = zip(one.get("next_ids", ()), one.get("next_confidence", ()), strict=True)
            results[index] = CodedText(
                texts[index],
                codes,
                named(one["code_ids"], "descriptions"),
                one["code_confidence"][: len(codes)],
                one["set_confidence"],
                len(normalised[index]) > most,
                [(named(ids), share) for ids, share in others if ids[0] >= 0],
                named(plausible(one.get("marginals", []), limit)),
            )
    return [results[i] for i in range(len(texts))]
