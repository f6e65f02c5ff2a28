"""Which files a collection is read from, and how."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from datamodules.cache import cache_root, digest_of, file_digest
from datamodules.splitting import MAX_SHARE, TEST, TRAIN, VALIDATION

if TYPE_CHECKING:
    from datamodules.relevance.collection_writer import CollectionReader

COLLECTION_VERSION = 2
Format = Literal["demo", "beir", "msmarco", "esci"]
Files = str | list[str] | None


@dataclass(frozen=True)
class CollectionFiles:
    """Files of a collection, where they are not those that its folder names by their layout.

    Args:
        documents: corpus.jsonl, collection.tsv or parquet; one, or several.
        queries: the same for queries.
        train: judgements of the training queries; named judgements replace all of the folder's.
        validation: of the validation queries.
        test: of the test queries.
        triples: of msmarco: lines of query, relevant and other document, as ids.
    """

    documents: Files = None
    queries: Files = None
    train: Files = None
    validation: Files = None
    test: Files = None
    triples: Files = None

    def judgements(self) -> dict[int, Files]:
        """Return the named files of judgements per part; empty where none is named."""
        named = {TRAIN: self.train, VALIDATION: self.validation, TEST: self.test}
        return {part: files for part, files in named.items() if files}


@dataclass(frozen=True)
class QuerySplit:
    """How training queries are divided where a collection has no such part.

    The lot of a query depends on the seed and its id alone.

    Args:
        validation_share: of the training queries, where nothing names validation, 0 to 0.9.
        test_share: where nothing names a test; both together at most 0.9.
        seed: another seed draws another split.
    """

    validation_share: float = 0.1
    test_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("validation_share", "test_share"):
            if not 0 <= getattr(self, name) <= MAX_SHARE:
                raise ValueError(f"{name} must be 0 to {MAX_SHARE}, got {getattr(self, name)}.")
        if self.validation_share + self.test_share > MAX_SHARE:
            raise ValueError(
                f"validation_share + test_share must be at most {MAX_SHARE}, got "
                f"{self.validation_share + self.test_share:g}: too little is left for training."
            )


@dataclass(frozen=True)
class EsciOptions:
    """What is taken of the shopping queries (ESCI), and what its labels are worth.

    Args:
        locale: us, es or jp; none takes all, with document ids such as us/B07YYXYRMT.
        version: the small one has the harder queries, the large one all.
        exact: grade of label E.
        substitute: of S.
        complement: of C.
        irrelevant: of I.
    """

    locale: str | None = "us"
    version: Literal["small", "large"] = "small"
    exact: float = 1.0
    substitute: float = 0.1
    complement: float = 0.01
    irrelevant: float = 0.0

    def __post_init__(self) -> None:
        if self.version not in ("small", "large"):
            raise ValueError(f'esci.version must be "small" or "large", got "{self.version}".')
        for label, gain in self.gains.items():
            if not 0 <= gain < float("inf"):
                raise ValueError(f"the gain of {label} must be 0 or more, got {gain}.")

    @property
    def gains(self) -> dict[str, float]:
        """The grade of each label."""
        return {
            "E": self.exact,
            "S": self.substitute,
            "C": self.complement,
            "I": self.irrelevant,
        }


@dataclass(frozen=True)
class CollectionRequest:
    """All that a collection depends on.

    Args:
        format: layout of the files; `demo` needs none.
        folder: where they lie.
        files: those that lie elsewhere or have other names.
        split: how training queries are divided where a part is missing.
        esci: options of that format.
    """

    format: Format = "demo"
    folder: str | None = None
    files: CollectionFiles = field(default_factory=CollectionFiles)
    split: QuerySplit = field(default_factory=QuerySplit)
    esci: EsciOptions = field(default_factory=EsciOptions)

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ValueError(
                f'format must be one of {", ".join(get_args(Format))}, got "{self.format}".'
            )
        names_files = any(asdict(self.files).values())
        if self.format == "demo" and (self.folder or names_files):
            raise ValueError(
                'format "demo" reads no files, and some are named; say how they are laid out: '
                "beir, msmarco or esci."
            )
        if self.format != "demo" and not (self.folder or names_files):
            raise ValueError(
                f'format "{self.format}" needs files; name their folder with '
                "data.collection.folder, or each with data.collection.files."
            )
        if self.files.triples and self.format != "msmarco":
            raise ValueError(f'triples belong to format "msmarco", got "{self.format}".')

    def reader(self) -> "CollectionReader":
        """Return what reads these files.

        Raises:
            FileNotFoundError: a file or folder is not there.
            ValueError: a file cannot be assigned to a part.
        """
        if self.format == "msmarco":
            from datamodules.relevance.msmarco import MsMarcoReader

            return MsMarcoReader(self.folder, self.files)
        if self.format == "esci":
            from datamodules.relevance.esci import EsciReader

            return EsciReader(self.folder, self.files, self.esci)
        from datamodules.relevance.beir import BeirReader
        from datamodules.relevance.demo import demo_collection

        folder = self.folder if self.format == "beir" else str(demo_collection(cache_root()))
        return BeirReader(folder, self.files)

    def facts(self, reader: "CollectionReader") -> dict[str, Any]:
        """Return what a collection is made of, as plain JSON; places of files are no part of it."""
        root = cache_root()
        return {
            "version": COLLECTION_VERSION,
            "format": self.format,
            "files": {
                role: [file_digest(path, root) for path in paths]
                for role, paths in reader.files().items()
            },
            "split": asdict(self.split),
            "esci": asdict(self.esci) if self.format == "esci" else None,
        }

    def cache_folder(self, reader: "CollectionReader", fingerprint: str) -> Path:
        """Return the collection's place in the cache."""
        places = [
            [role, *(str(path.resolve()) for path in paths)]
            for role, paths in reader.files().items()
        ]
        return cache_root() / "collections" / digest_of([fingerprint, places])
