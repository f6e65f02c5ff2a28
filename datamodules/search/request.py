"""Which files a collection is read from, and how."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from datamodules.core.store import cache_root, digest_of, file_digest
from datamodules.files.splitting import MAX_SHARE, TEST, TRAIN, VALIDATION

if TYPE_CHECKING:
    from datamodules.search.collection_writer import CollectionReader

COLLECTION_VERSION = 3
PAGE_SUFFIXES = (".html", ".htm", ".xhtml", ".md", ".txt")
Format = Literal["demo", "beir", "msmarco", "esci", "pages"]
Files = str | list[str] | None
LAYOUTS: dict[Format, tuple[str, ...]] = {
    "beir": ("corpus.jsonl*", "corpus/*.parquet"),
    "msmarco": ("collection.tsv*", "qrels*.tsv", "queries*.tsv"),
    "esci": ("*examples*.parquet",),
    "pages": tuple(f"**/*{suffix}" for suffix in PAGE_SUFFIXES),
}


@dataclass(frozen=True)
class CollectionFiles:
    """Files of a collection, where they are not those that its folder names by their layout.

    Args:
        documents: corpus.jsonl, collection.tsv or parquet; one, or several.
        queries: the same for queries; of pages a table or jsonl with query, page and maybe grade.
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
        format: layout of the files; None finds it from the folder, and without files it is `demo`.
        folder: where they lie.
        files: those that lie elsewhere or have other names.
        split: how training queries are divided where a part is missing.
        esci: options of that format.
    """

    format: Format | None = None
    folder: str | None = None
    files: CollectionFiles = field(default_factory=CollectionFiles)
    split: QuerySplit = field(default_factory=QuerySplit)
    esci: EsciOptions = field(default_factory=EsciOptions)

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in get_args(Format):
            raise ValueError(
                f'format must be one of {", ".join(get_args(Format))}, got "{self.format}".'
            )
        names_files = any(asdict(self.files).values())
        if self.format == "demo" and (self.folder or names_files):
            raise ValueError(
                'format "demo" reads no files, and some are named; leave the format out, or say '
                "how they are laid out: beir, msmarco, esci or pages."
            )
        if self.format not in (None, "demo") and not (self.folder or names_files):
            raise ValueError(
                f'format "{self.format}" needs files; name their folder with '
                "data.collection.folder, or each with data.collection.files."
            )
        if self.files.triples and self.format not in (None, "msmarco"):
            raise ValueError(f'triples belong to format "msmarco", got "{self.format}".')

    @property
    def layout(self) -> Format:
        """The format, which is found from the folder where it is not given.

        Raises:
            FileNotFoundError: the folder is not there.
            ValueError: nothing tells the format.
        """
        if self.format is not None:
            return self.format
        if self.folder is None:
            documents = self.files.documents
            if not any(asdict(self.files).values()):
                return "demo"
            first = documents[0] if isinstance(documents, list) and documents else documents
            is_tsv = str(first).endswith(".tsv") or self.files.triples
            return "msmarco" if is_tsv else "beir"
        folder = Path(self.folder).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data.collection.folder {folder} is no folder; name that of the collection."
            )
        for layout, patterns in LAYOUTS.items():
            if any(any(folder.glob(pattern)) for pattern in patterns):
                return layout
        told = "; ".join(f"{name}: {', '.join(found)}" for name, found in LAYOUTS.items())
        raise ValueError(
            f"data.collection.folder {folder} holds none of the files that tell a format ({told}); "
            "check the folder, or give data.collection.format and data.collection.files."
        )

    def reader(self) -> "CollectionReader":
        """Return what reads these files.

        Raises:
            FileNotFoundError: a file or folder is not there.
            ValueError: a file cannot be assigned to a part.
        """
        if self.layout == "msmarco":
            from datamodules.search.msmarco import MsMarcoReader

            return MsMarcoReader(self.folder, self.files)
        if self.layout == "esci":
            from datamodules.search.esci import EsciReader

            return EsciReader(self.folder, self.files, self.esci)
        if self.layout == "pages":
            from datamodules.search.pages import PagesReader

            return PagesReader(self.folder, self.files)
        from datamodules.search.beir import BeirReader
        from datamodules.search.demo import demo_collection

        folder = self.folder if self.layout == "beir" else str(demo_collection(cache_root()))
        return BeirReader(folder, self.files)

    def facts(self, reader: "CollectionReader") -> dict[str, Any]:
        """Return what a collection is made of, as plain JSON; places of files are no part of it."""
        root = cache_root()
        return {
            "version": COLLECTION_VERSION,
            "format": self.layout,
            "files": {
                role: [file_digest(path, root) for path in paths]
                for role, paths in reader.files().items()
            },
            "split": asdict(self.split),
            "esci": asdict(self.esci) if self.layout == "esci" else None,
        }

    def cache_folder(self, reader: "CollectionReader", fingerprint: str) -> Path:
        """Return the collection's place in the cache."""
        places = [
            [role, *(str(path.resolve()) for path in paths)]
            for role, paths in reader.files().items()
        ]
        return cache_root() / "collections" / digest_of([fingerprint, places])
