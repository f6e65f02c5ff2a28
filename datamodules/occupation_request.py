"""What is read and how: the options that decide the arrays, and the name of their cache folder."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from datamodules.cache import cache_root, digest_of, file_digest
from datamodules.languages import language_code
from datamodules.occupation_rows import Columns
from datamodules.sources import check_file
from datamodules.splitting import PART_NAMES, SplitOptions
from datamodules.tokenizers.characters import TextNormalisation
from datamodules.tokenizers.codes import CodeSystem

STORE_VERSION = 1
# What of a recipe decides how a row is encoded; thresholds and the like do not.
ENCODING_KEYS = ("version", "normalisation", "max_length", "languages", "code_book")


@dataclass(frozen=True)
class CodeBookOptions:
    """The list of legal codes.

    Args:
        path: csv, tsv or parquet with the columns code and description; none takes the codes of
            the data.
        descriptions_as_examples: each description is one more training example of its code.
        description_language: of the descriptions.
    """

    path: str | None = None
    descriptions_as_examples: bool = False
    description_language: str = "en"

    def __post_init__(self) -> None:
        language_code(self.description_language)


@dataclass(frozen=True)
class TextOptions(TextNormalisation):
    """What is done to texts, equally in training and prediction: `TextNormalisation`, then the cut.

    Args:
        max_length: characters that are kept of a text, at least 1.
    """

    max_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 1:
            raise ValueError(f"text.max_length must be at least 1, got {self.max_length}.")

    @property
    def normalisation(self) -> TextNormalisation:
        """The normalisation alone, as a checkpoint keeps it."""
        options = asdict(self)
        options.pop("max_length")
        return TextNormalisation(**options)


@dataclass
class StoreRequest:
    """All that the arrays depend on.

    Args:
        files: per part (train, validation, test) the tables with codes.
        columns: which column holds what.
        system: how codes are written.
        book: the legal codes.
        split: how training rows are divided where parts have no files.
        text: normalisation and length.
        on_bad_rows: error or reject.
        recipe: that of a checkpoint, which then decides the encoding; none makes a new one.
    """

    files: dict[int, list[Path]]
    columns: Columns
    system: CodeSystem
    book: CodeBookOptions = CodeBookOptions()
    split: SplitOptions = field(default_factory=SplitOptions)
    text: TextOptions = TextOptions()
    on_bad_rows: Literal["error", "reject"] = "error"
    recipe: dict[str, Any] | None = None

    def folder(self) -> Path:
        """The cache folder of these arrays; reads the files' digests."""
        root = cache_root()
        named = {PART_NAMES[part]: [[str(p), file_digest(p, root)] for p in paths]
                 for part, paths in self.files.items()}  # fmt: skip
        if self.book.path:
            check_file(Path(self.book.path), "data.code_book")
        book = file_digest(Path(self.book.path), root) if self.book.path else None
        parts = {
            "version": STORE_VERSION,
            "files": named,
            "columns": asdict(self.columns),
            "system": self.system.to_dict(),
            "book": [asdict(self.book), book],
            "split": asdict(self.split),
            "text": asdict(self.text),
            "on_bad_rows": self.on_bad_rows,
            "recipe": None if self.recipe is None else encoding_digest(self.recipe),
        }
        return root / "occupations" / digest_of(parts)


def encoding_digest(recipe: dict[str, Any]) -> str:
    """Hex digest of what decides how a row is encoded."""
    return digest_of({key: recipe[key] for key in ENCODING_KEYS})
