"""Text in, Unicode code points out: the same in training and prediction, for any script."""

import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.batches import PADDING_ID
from datamodules.files.splitting import STATUS_WORDS

_AROUND = ".,;:()[]"
_STATUS = frozenset(word for words in STATUS_WORDS.values() for word in words)


# Options of earlier checkpoints, of which these values alone are left.
GONE = {"unicode_form": "NFKC", "strip": True, "collapse_whitespace": True}


@dataclass(frozen=True)
class TextNormalisation:
    """What is done to a text before a model sees it; every checkpoint keeps it.

    Ligatures, full-width letters and the like become plain ones (NFKC), and every run of white
    space, line breaks included, one blank; none is left at the ends.

    Args:
        lowercase: case carries no meaning in most records.
        drop_status_words: leave out words such as "deceased" that say nothing about the work, with
            the punctuation around them; a text of such words alone stays as it is.
    """

    lowercase: bool = True
    drop_status_words: bool = False

    def __call__(self, text: str) -> str:
        """Return the normalised text; doing it twice changes nothing more."""
        text, before = text.replace("\0", " "), None  # 0 is the padding
        # Lower case can undo the form (İ becomes two characters) and the form can make capitals
        # (™ becomes TM), so both are repeated until nothing changes.
        while text != before:
            before, text = text, unicodedata.normalize("NFKC", text)
            text = text.lower() if self.lowercase else text
        if self.drop_status_words:
            words = text.split()
            kept = [word for word in words if word.strip(_AROUND).lower() not in _STATUS]
            if len(kept) < len(words):
                text = " ".join(kept).strip(" ,;:-") or text
        return " ".join(text.split())

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> "TextNormalisation":
        """Return what `to_dict` described; ValueError for a value that no text gets any more."""
        for name, value in GONE.items():
            if kept.get(name, value) != value:
                raise ValueError(
                    f"the checkpoint was trained on texts of {name} {kept[name]}, and texts have "
                    f"{value} alone now; train anew, or code with an earlier Unisono."
                )
        return cls(kept["lowercase"], kept["drop_status_words"])


class Encoded(NamedTuple):
    """code_points [S] int32, never 0; is_truncated: whether the text was longer than allowed."""

    code_points: np.ndarray
    is_truncated: bool


def encode(text: str, max_length: int) -> Encoded:
    """Return the first `max_length` code points of a normalised text, which holds no NUL."""
    points = np.frombuffer(text[:max_length].encode("utf-32-le"), dtype="<i4").astype(np.int32)
    return Encoded(points, len(text) > max_length)


def decode(code_points: np.ndarray) -> str:
    """Return the text of these code points, padding left out."""
    return code_points[code_points != PADDING_ID].astype("<u4").tobytes().decode("utf-32-le")
