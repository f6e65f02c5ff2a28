"""Datasets of `OccupationBatch`: labelled descriptions with spelling noise, or distinct ones.

Shapes: B samples in the micro-batch, S characters, K codes of the richest record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from datamodules.core.batches import padded, padded_texts
from datamodules.core.plan import rng_for, uniforms_for
from datamodules.core.planned import PlannedDataset
from datamodules.files.splitting import STATUS_WORDS
from datamodules.occupations.coded import PredictIndex
from datamodules.occupations.store import UNKNOWN, OccupationStore
from datamodules.tokenizers.characters import decode, encode

DROP_LANGUAGE = 0.25
NUM_STATUS_WORDS = 3
DELETE, INSERT, SUBSTITUTE, SWAP = 0, 1, 2, 4  # places of letter noise among the draws


@dataclass
class Augmentation:
    """How training texts are varied; every field but num_edits is a probability per sample.

    Args:
        delete: letters are left out.
        insert: letters of the sample's script are put in.
        substitute: letters are replaced by others of the script.
        swap_letters: neighbouring letters change places.
        swap_words: two words change places; leave it 0 where word order decides the code.
        status_word: a word such as "deceased" is added in the sample's language.
        drop_language: the language becomes unknown; null = 0.25 once any other field is on.
        num_edits: most letters that one kind of letter noise changes in a text, at least 1.
    """

    delete: float = 0.0
    insert: float = 0.0
    substitute: float = 0.0
    swap_letters: float = 0.0
    swap_words: float = 0.0
    status_word: float = 0.0
    drop_language: float | None = None
    num_edits: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "num_edits"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is a probability, 0 to 1, got {value}.")
        if self.num_edits < 1:
            raise ValueError(
                f"num_edits must be at least 1, got {self.num_edits}; set the probabilities to 0 "
                "to turn augmentation off."
            )

    def probabilities(self) -> tuple[float, ...]:
        """The probability of each of the eight draws, in the order of the fields; the fourth is of
        nothing any more, which keeps the draws of the others."""
        on_text = (
            *(self.delete, self.insert, self.substitute, 0.0, self.swap_letters),
            *(self.swap_words, self.status_word),
        )
        default = DROP_LANGUAGE if any(on_text) else 0.0
        return (*on_text, default if self.drop_language is None else self.drop_language)


def augment(
    text: str,
    language: str,
    shares: np.ndarray,
    rng: np.random.Generator,
    options: Augmentation,
) -> tuple[str, str]:
    """The sample with noise; never empty, and unchanged where all probabilities are 0.

    Args:
        text: normalised text.
        language: ISO name, or unk.
        shares: [8] in [0, 1), drawn for the sample: a kind of noise comes where its share is
            below its probability.
        rng: the sample's own generator, which says where noise falls.
        options: probabilities.
    """
    *letter_noise, swaps_words, adds_status, drops_language = shares < options.probabilities()
    varied = text
    if any(letter_noise):
        varied = _letter_noise(varied, language, letter_noise, rng, options.num_edits)
    draws = iter(rng.random(4).tolist() if swaps_words or adds_status else ())
    if swaps_words:
        first, second = next(draws), next(draws)
        words = varied.split(" ")
        if len(words) > 1:
            i = int(first * len(words))
            j = (i + 1 + int(second * (len(words) - 1))) % len(words)
            words[i], words[j] = words[j], words[i]
            varied = " ".join(words)
    status_words = STATUS_WORDS.get(language, ())[:NUM_STATUS_WORDS]
    if adds_status and status_words:
        word = status_words[int(next(draws) * len(status_words))]
        forms = (f"{varied} ({word})", f"{word} {varied}", f"{varied} {word}")
        varied = forms[int(next(draws) * len(forms))]
    return varied if varied.strip() else text, UNKNOWN if drops_language else language


def _letter_noise(
    text: str, language: str, fires: Sequence[bool], rng: np.random.Generator, num_edits: int
) -> str:
    draws = iter(rng.random(sum(fires) * (1 + 2 * num_edits)).tolist())
    letters = list(text)
    for kind in np.flatnonzero(fires).tolist():
        count = 1 + int(next(draws) * num_edits)  # one to num_edits, whose draws are all used up
        edits = [(next(draws), next(draws)) for _ in range(num_edits)][:count]
        for where, which in edits:
            place = int(where * (len(letters) + {INSERT: 1, SWAP: -1}.get(kind, 0)))
            if kind == DELETE:
                del letters[place : place + (len(letters) > 1)]
            elif kind == SWAP:
                letters[place : place + 2] = letters[place : place + 2][::-1]
            else:
                alphabet = _alphabet(letters, place, language)
                letter = alphabet[int(which * len(alphabet))]
                letters[place : place + (kind == SUBSTITUTE)] = [letter]
    return "".join(letters)


def _alphabet(letters: list[str], place: int, language: str) -> str | list[str]:
    """Letters that may stand here: those of the script, or of the text for a script without one."""
    code_point = ord(letters[place] if place < len(letters) else letters[-1])
    if code_point < _LATIN_END:
        return _LATIN_LETTERS.get(language, _LATIN)
    return next((some for start, end, some in _SCRIPTS if start <= code_point < end), letters)


_LATIN = "abcdefghijklmnopqrstuvwxyz"
_LATIN_END = 0x250
_LATIN_LETTERS = {
    language: _LATIN + extra
    for language, extra in {
        **{"da": "æøå", "no": "æøå", "sv": "åäö", "fi": "åäö", "de": "äöüß", "nl": "ëï"},
        **{"fr": "éèêàçô", "es": "ñáéíóú", "pt": "ãçáéíóõ", "it": "àèéìòù", "ca": "àçèéíòú"},
    }.items()
}
_SCRIPTS = (
    (0x370, 0x400, "αβγδεζηθικλμνξοπρστυφχψω"),
    (0x400, 0x530, "абвгдежзийклмнопрстуфхцчшщъыьэюя"),
    (0x590, 0x600, "אבגדהוזחטיכלמנסעפצקרשת"),
    (0x600, 0x700, "ابتثجحخدذرزسشصضطظعغفقكلمنهوي"),
)


NO_CODE = -100
TERMS = ("seq2seq", "flat")  # both losses are means over records


class OccupationDataset(PlannedDataset):
    """The labelled records of one part.

    Args:
        store: the tokenised tables.
        part: 0 train, 1 validation, 2 test.
        augmentation: noise for training; `None` elsewhere.
        seed: key of the noise, together with epoch and sample id.
    """

    def __init__(
        self,
        store: OccupationStore,
        part: int,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.store = store
        self.row_ids = store.rows(part)
        self.is_evaluated = augmentation is None
        self.augmentation = (
            augmentation if augmentation and any(augmentation.probabilities()) else None
        )
        self.seed = seed
        self.languages: list[str] = store.recipe["languages"]
        self.lengths = store.lengths(self.row_ids)
        self.fingerprint = f"{store.fingerprint}-{part}"
        self.target_counts = dict.fromkeys(TERMS)

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """The padded batch of samples [B], with the same noise for the same (seed, epoch, sample
        id); seen flags in evaluation only."""
        rows, arrays = self.row_ids[sample_ids], self.store.arrays
        code_sets = self.store.code_sets(rows)
        texts, language_id = self.store.texts(rows), arrays["language_id"][rows].astype(np.int64)
        if self.augmentation is not None:
            self._vary(texts, language_id, sample_ids, epoch)
        batch, code_ids = padded_texts(texts), padded(code_sets, NO_CODE)
        batch["language_id"] = torch.from_numpy(language_id)
        batch["code_ids"] = torch.from_numpy(code_ids)  # [B, K]
        batch["num_with_codes"] = np.bincount([len(codes) for codes in code_sets]).tolist()
        if self.is_evaluated:
            batch["is_seen_text"] = torch.from_numpy(arrays["is_seen_text"][rows])
            batch["is_seen_code"] = torch.from_numpy(arrays["is_seen_code"][rows])
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """The text with its noise of this epoch, its language, and its codes."""
        batch = self.batch(np.array([sample_id]), epoch)
        book = self.store.recipe["code_book"]["codes"]
        return {
            "text": decode(batch["input_ids"][0].numpy()),
            "language": self.languages[int(batch["language_id"])],
            "codes": " ".join(book[i] for i in batch["code_ids"][0].tolist()),
        }

    def _vary(
        self, texts: list[np.ndarray], language_id: np.ndarray, numbers: np.ndarray, epoch: int
    ) -> None:
        """Put noise into the texts and the language ids [B] of the samples with these numbers [B],
        in place. Only where noise falls on a text does the sample need its own generator."""
        options = self.augmentation
        assert options is not None
        probabilities = options.probabilities()
        shares = uniforms_for(self.seed, epoch, numbers, len(probabilities))
        fires = shares < probabilities
        for place in np.flatnonzero(fires[:, :-1].any(1)).tolist():
            rng = rng_for(self.seed, epoch, int(numbers[place]))
            language = self.languages[language_id[place]]
            text, _ = augment(decode(texts[place]), language, shares[place], rng, options)
            texts[place] = encode(text, self.store.recipe["max_length"]).code_points
        language_id[fires[:, -1]] = self.languages.index(UNKNOWN)


class DistinctInputs(PlannedDataset):
    """The distinct (text, language) pairs of the tables to code, each once."""

    def __init__(self, index: PredictIndex) -> None:
        self.index = index
        self.lengths = np.diff(index.arrays["text_offsets"])
        self.fingerprint = index.fingerprint
        self.target_counts = {}

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """The padded batch of inputs [B], without codes."""
        batch = padded_texts(self.index.parts("code_points", "text_offsets", sample_ids))
        batch["language_id"] = torch.from_numpy(
            self.index.arrays["language_ids"][sample_ids].astype(np.int64)
        )
        return batch
