"""Text in, Unicode code points out: the same in training and prediction, for any script."""

import unicodedata
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from datamodules.core.batches import PADDING_ID
from datamodules.files.splitting import STATUS_WORDS

_AROUND = ".,;:()[]"
_STATUS = frozenset(word for words in STATUS_WORDS.values() for word in words)


@dataclass(frozen=True)
class TextNormalisation:
    """What is done to a text before a model sees it; every checkpoint keeps it.

    Args:
        unicode_form: `NFKC` also turns ligatures, full-width letters and the like into plain ones.
        lowercase: case carries no meaning in most records.
        strip: drop white space at both ends.
        collapse_whitespace: turn every run of white space, line breaks included, into one blank.
        drop_status_words: leave out words such as "deceased" that say nothing about the work, with
            the punctuation around them; a text of such words alone stays as it is.
    """

    unicode_form: Literal["NFC", "NFKC", "NFD", "NFKD", "none"] = "NFKC"
    lowercase: bool = True
    strip: bool = True
    collapse_whitespace: bool = True
    drop_status_words: bool = False

    def __post_init__(self) -> None:
        if self.unicode_form not in ("NFC", "NFKC", "NFD", "NFKD", "none"):
            raise ValueError(
                f'unicode_form must be NFC, NFKC, NFD, NFKD or none, got "{self.unicode_form}".'
            )

    def __call__(self, text: str) -> str:
        """Return the normalised text; doing it twice changes nothing more."""
        text, before = text.replace("\0", " "), None  # 0 is the padding
        # Lower case can undo the form (İ becomes two characters) and the form can make capitals
        # (™ becomes TM), so both are repeated until nothing changes.
        while text != before:
            before = text
            if self.unicode_form != "none":
                text = unicodedata.normalize(self.unicode_form, text)
            if self.lowercase:
                text = text.lower()
        if self.drop_status_words:
            words = text.split()
            kept = [word for word in words if word.strip(_AROUND).lower() not in _STATUS]
            if len(kept) < len(words):
                text = " ".join(kept).strip(" ,;:-") or text
        if self.collapse_whitespace:
            single = " ".join(text.split())
            lead = "" if self.strip or not text[:1].isspace() else " "
            tail = "" if self.strip or not single or not text[-1:].isspace() else " "
            return lead + single + tail
        return text.strip() if self.strip else text

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain JSON types."""
        return asdict(self)


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
