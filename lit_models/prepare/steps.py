"""Steps of a preparation that datatrove lacks; datatrove runs them together with its own.

A task is a process with its share of the files. Each step writes an account of what it drops, with
a line on every document: all that was read is in the shards or in the audit.
"""

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.utils.hashing import HashConfig, create_hash_func
from datatrove.utils.text import ngrams, simplify_text
from datatrove.utils.word_tokenizers import WhitespaceTokenizer
from loguru import logger

from datamodules.core.store import file_digest, write_whole
from datamodules.files.documents import SUFFIXES as DOCUMENTS
from datamodules.files.documents import read_documents, text_files
from datamodules.files.rows import check_characters, placed
from datamodules.files.tables import SEPARATORS
from datamodules.shards.remote import is_url, local_copy
from datamodules.shards.writing import write_shards
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions, make_tokenizer

SUFFIXES = (*DOCUMENTS, *SEPARATORS)
NUM_EXAMPLES, EXAMPLE_CHARACTERS = 3, 60
# Scripts without spaces between words: each of their characters counts as a word.
SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"[{SPACELESS}]|[^\s{SPACELESS}]+")
NOTHING_LEFT = "no document is left; {}/audit says what dropped them. Loosen it, in a new folder."
Data = Iterator[Document]


class Words(WhitespaceTokenizer):
    """Splits text into words at white space, without a model of its language."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        return WORD.findall(text)


class QuietExecutor(LocalPipelineExecutor):
    """Runs tasks on this machine without log messages in the terminal; errors still show."""

    def get_distributed_env(self, node_rank: int = -1) -> Any:
        """Disable the log of a task's process, which calls this before it logs anything."""
        logger.disable("datatrove")
        return super().get_distributed_env(node_rank)


class Account:
    """Account of what one step of a task drops, which datatrove uses as the writer of documents.
    `folder` has the name of the step and holds the accounts of all tasks. Without `rank`, a file
    is written only if something is dropped."""

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        self.folder, self.own_rank = folder, rank

    def __enter__(self) -> "Account":
        self.rank, self._lines = self.own_rank, list[str]()
        self.facts: dict[str, Any] = {"dropped": {}}
        return self

    def write(self, document: Document, rank: int) -> None:
        """Record a dropped document, with the reason in its metadata."""
        self.rank, reason = rank, document.metadata.get("filter_reason", "not kept")
        entry = {"documents": 0, "bytes": 0, "examples": []}
        entry = self.facts["dropped"].setdefault(reason, entry)
        entry["documents"] += 1
        entry["bytes"] += len(document.text.encode())
        if len(entry["examples"]) < NUM_EXAMPLES:
            entry["examples"].append(f"{document.id}: {document.text[:EXAMPLE_CHARACTERS]}")
        self._lines.append(json.dumps({"document": document.id, "reason": reason}) + "\n")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.rank is not None:
            write_whole(self.folder / f"{self.rank:05d}.json", json.dumps(self.facts))
            if self._lines:
                path = self.folder / f"{self.rank:05d}.dropped.jsonl.gz"
                path.write_bytes(gzip.compress("".join(self._lines).encode()))


class Language(BaseFilter):
    """Keeps documents that are in one of these languages by a fastText model.

    Args:
        model: file of the model, such as lid.176.bin.
        keep: languages to keep, as the model names them.
        threshold: least probability, 0 to 1.
        exclusion_writer: receives the dropped documents.
    """

    name = "language"

    def __init__(
        self, model: str, keep: Sequence[str], threshold: float = 0.65, exclusion_writer: Any = None
    ) -> None:
        super().__init__(exclusion_writer)
        self.path, self.keep, self.threshold = model, keep, threshold
        if not Path(model).is_file():
            raise ValueError(f"filters.Language.model: {model} is no file. Nothing is downloaded.")

    @cached_property
    def model(self) -> Any:
        """The model, loaded by each task."""
        import fasttext

        return fasttext.load_model(self.path)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return True if a document is kept, else False and the reason."""
        labels, scores = self.model.predict(" ".join(doc.text.split()))
        language = labels[0].removeprefix("__label__")
        if language in self.keep and scores[0] >= self.threshold:
            return True
        return False, f"{'unsure' if language in self.keep else 'is'} {language}"


class WithoutTests(BaseFilter):
    """Drops documents that share an n-gram of words with a test.

    Case, numbers, accents and punctuation make no difference, as in datatrove's own filter, which
    needs the tests of lighteval.

    Args:
        files: files of tests, in the formats of sources.
        n_grams: number of words that are shared in a row.
        text_column: column of the text in tables.
        exclusion_writer: receives the dropped documents.
    """

    name = "without tests"

    def __init__(
        self,
        files: str | list[str],
        n_grams: int = 13,
        text_column: str = "text",
        exclusion_writer: Any = None,
    ) -> None:
        super().__init__(exclusion_writer)
        self.files = text_files(files, "filters.WithoutTests.files", SUFFIXES)
        self.n_grams, self.text_column = n_grams, text_column

    @cached_property
    def tests(self) -> dict[int, str]:
        """Hash of an n-gram -> name of a test that has it; each task reads the tests."""
        names = dict[int, str]()
        for path in self.files:
            before = len(names)
            for _, text in read_documents(path, self.text_column):
                names |= dict.fromkeys(self.hashes(text), path.name)
            if len(names) == before:
                raise ValueError(
                    f"filters.WithoutTests: {path} adds no {self.n_grams} words in a row to "
                    "the tests before it; lower n_grams, or leave it out."
                )
        return names

    def hashes(self, text: str) -> Iterator[int]:
        """Yield the hash of each n-gram of a text."""
        hash_of = create_hash_func(HashConfig())
        for gram in ngrams(WORD.findall(simplify_text(text)), self.n_grams):
            yield hash_of(" ".join(gram))

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return True if a document is kept, else False and the test it shares words with."""
        shared = next((one for one in self.hashes(doc.text) if one in self.tests), None)
        return True if shared is None else (False, f"shares words with {self.tests[shared]}")


class Work:
    """The folder of a preparation, and the steps that read and write there: callables for datatrove
    that take data, the rank of the task and the number of tasks. `tokenizer` are its options; the
    attribute `steps` names the steps that may drop documents, in order.
    """

    def __init__(self, to: Path, recipe: dict[str, Any], tokenizer: TokenizerOptions) -> None:
        self.to, self.recipe, self.options = to, recipe, tokenizer
        self.audit, self.texts = to / "audit", to / "work" / "texts"
        self.tokenizer, self.steps = to / "work" / "tokenizer.json", ["read"]

    def account(self, name: str) -> Account:
        """Return the account of one more step, which datatrove fills."""
        self.steps.append(f"{len(self.steps)} {name}")
        return Account(self.audit / self.steps[-1])

    @staticmethod
    def mark_of(name: str, size: int) -> str | int:
        """Return what changes with a source: its digest, or the size of a URL."""
        return size if is_url(name) else file_digest(Path(name))

    def read_files(self, data: Data | None, rank: int, world_size: int) -> Data:
        """Yield the documents of every `world_size`-th file, with their places as ids; drop those
        without text. A ValueError names the place of a fault."""
        with Account(self.audit / "read", rank) as account:
            files = json.loads((self.to / "work" / "files.json").read_text("utf-8"))
            facts = account.facts
            marks = [(name, self.mark_of(name, size)) for name, size in files[rank::world_size]]
            facts |= {"files": marks, "documents": 0, "bytes": 0}
            for name, _ in facts["files"]:
                with local_copy(name) as path:
                    for place, text in read_documents(path, self.recipe["text_column"]):
                        placed(place, check_characters, text)
                        facts["documents"] += 1
                        facts["bytes"] += len(text.encode())
                        document = Document(text, place.replace(str(path), name))
                        if text.strip():
                            yield document
                        else:
                            document.metadata["filter_reason"] = "empty"
                            account.write(document, rank)

    def read_texts(self, data: Data | None, rank: int, world_size: int) -> Data:
        """Yield the documents that this task wrote in an earlier stage."""
        name = f"{rank:05d}.jsonl.zst"
        if (self.texts / name).exists():  # else it kept no document
            yield from JsonlReader(str(self.texts)).read_files_shard([name])

    def train_tokenizer(self, data: None, rank: int, world_size: int) -> None:
        """Train and write the tokenizer, on the first documents of each file of texts."""
        files = sorted(self.texts.glob("*.jsonl.zst"))
        if not files:
            raise ValueError(NOTHING_LEFT.format(self.to))

        def sample() -> Iterator[str]:
            for path in files:
                rest = 1e6 * self.recipe["tokenizer"].get("sample_megabytes", 100) / len(files)
                for document in JsonlReader(str(self.texts)).read_files_shard([path.name]):
                    yield document.text
                    rest -= len(document.text.encode())
                    if rest <= 0:
                        break

        self.write_tokenizer(sample())

    def write_tokenizer(self, texts: Iterator[str]) -> None:
        """Write the tokenizer, which may be trained on these texts."""
        write_whole(self.tokenizer, json.dumps(make_tokenizer(self.options, texts).to_dict()))

    def tokenise(self, data: Data, rank: int, world_size: int) -> None:
        """Write a task's documents as shards in a folder of its own; see `write_shards`."""
        tokenizer = TextTokenizer.from_dict(json.loads(self.tokenizer.read_text("utf-8")))
        pairs = ((document.id, document.text) for document in data)
        places = self.to, f"shards/{rank:05d}"
        with Account(self.audit / "tokenise", rank) as account:
            made = write_shards(pairs, tokenizer, *places, self.recipe["tokens_per_shard"])
            account.facts |= dict(zip(("shards", "bytes"), made, strict=True))

    def finish(self, data: None, rank: int, world_size: int) -> None:
        """Write `audit.json`, `tokenizer.json` and, last of all, `manifest.json`; one task.

        Raises:
            ValueError: no document is left.
            RuntimeError: a document is neither in the shards nor in the audit.
        """
        dropped = {step: reasons_of(self._accounts(step)) for step in self.steps}
        readers, writers = self._accounts("read"), self._accounts("tokenise")
        shards = [shard for account in writers for shard in account["shards"]]
        read = {name: sum(one[name] for one in readers) for name in ("documents", "bytes")}
        kept = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
        lost = read["documents"] - kept["documents"]
        lost -= sum(one["documents"] for reasons in dropped.values() for one in reasons.values())
        if lost or len(readers) != len(writers):
            raise RuntimeError(
                f"{lost:,} of {read['documents']:,} documents are neither in the shards nor in the "
                f"audit of {self.to}; delete that folder and start again."
            )
        read["files"] = sum(len(account["files"]) for account in readers)
        kept |= {"bytes": sum(one["bytes"] for one in writers), "shards": len(shards)}
        audit = {"read": read, "dropped": dropped, "kept": kept}
        write_whole(self.to / "audit.json", json.dumps(audit, indent=1) + "\n")
        if not shards:
            raise ValueError(NOTHING_LEFT.format(self.to))
        write_whole(self.to / "tokenizer.json", self.tokenizer.read_text("utf-8"))
        write_whole(self.to / "manifest.json", json.dumps({"shards": shards}, indent=1) + "\n")

    def _accounts(self, step: str) -> list[dict[str, Any]]:
        return [
            json.loads(p.read_text("utf-8")) for p in sorted((self.audit / step).glob("*.json"))
        ]


def reasons_of(accounts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what one step dropped in all tasks: reason -> counts, most documents first."""
    reasons: dict[str, dict[str, Any]] = {}
    for account in accounts:
        for reason, counts in account["dropped"].items():
            total = reasons.setdefault(reason, {"documents": 0, "bytes": 0, "examples": []})
            for name in total:
                total[name] += counts[name]
            del total["examples"][NUM_EXAMPLES:]
    return dict(sorted(reasons.items(), key=lambda pair: -pair[1]["documents"]))
