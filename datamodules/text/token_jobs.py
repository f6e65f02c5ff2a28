"""The work of making a token store that processes share: jobs over sections of files.

All that a job needs lies in one folder, and so does what it made, complete under its name or not
there: any process, also of another run or machine, can go on. Such a process is
`python -m datamodules.text.token_jobs`; unlike a fork or a pool of `multiprocessing` it needs
nothing of the program that starts it, nor runs its main module again.
"""

import hashlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.files.documents import (
    SECTION_BYTES,
    Fragment,
    Reading,
    Section,
    read_section,
    sections_of,
)
from datamodules.files.splitting import PART_NAMES
from datamodules.text.token_store import token_dtype
from datamodules.tokenizers.text_tokenizer import TextTokenizer

STRETCH_CHARACTERS = 1 << 18
SCAN, TOKENS = "scan", "tokens"
STAGES = (SCAN, TOKENS)
FAILED = 3


class Jobs:
    """What there is to do, kept in a folder.

    Args:
        folder: as `write_jobs` made it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "jobs.json").read_text("utf-8"))
        self.reading = Reading(**facts["reading"])
        self.sections = [[(part, Section(*values)) for part, *values in j] for j in facts["jobs"]]
        self.num_bytes: int = facts["num_bytes"]

    def __len__(self) -> int:
        return len(self.sections)

    def path(self, stage: str, job: int) -> Path:
        """Return the file that a job makes."""
        return self.folder / f"{stage}-{job:06}.npz"

    def fragments(self, job: int, empty: list[str] | None = None) -> Iterator[tuple[int, Fragment]]:
        """Yield (part, fragment) of all documents with a text; places of the others are noted."""
        for part, section in self.sections[job]:
            for fragment in read_section(section, self.reading):
                if fragment.begins and fragment.ends and not fragment.text.strip():
                    if empty is not None:
                        empty.append(fragment.place)
                    continue
                yield part, fragment

    def cuts(self, job: int) -> np.ndarray:
        """Return [f, 2] int64, where each fragment of a job is cut; see `cuts_of`."""
        bounds = np.load(self.folder / "bounds.npy")
        return np.load(self.folder / "cuts.npy", mmap_mode="r")[bounds[job] : bounds[job + 1]]

    def pieces(self, job: int, part: int) -> Iterator[str]:
        """Yield the texts of a job that belong to a part."""
        for (_, fragment), cut in zip(self.fragments(job), self.cuts(job).tolist(), strict=True):
            bounds = (0, *cut, len(fragment.text))
            yield from stretches(fragment.text[bounds[part] : bounds[part + 1]])

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer; there when the first stage is done."""
        return TextTokenizer.from_dict(
            json.loads((self.folder / "tokenizer.json").read_text("utf-8"))
        )


def write_jobs(folder: Path, files: dict[int, list[Path]], reading: Reading) -> None:
    """Write what there is to do; neighbours that are small make one job."""
    jobs: list[list[tuple[int | str | bool, ...]]] = []
    room = num_bytes = 0
    for part, paths in files.items():
        for path in paths:
            sections, size = sections_of(path, reading), path.stat().st_size
            num_bytes += size
            each = size // len(sections) + 1
            for section in sections:
                if room < each:
                    jobs.append([])
                    room = max(SECTION_BYTES, each)
                jobs[-1].append((part, *section))
                room -= each
    facts = {"reading": asdict(reading), "jobs": jobs, "num_bytes": num_bytes}
    replace_file(folder / "jobs.json", lambda path: path.write_text(json.dumps(facts), "utf-8"))


def do_jobs(jobs: Jobs, stage: str, numbers: Iterable[int]) -> None:
    """Do those of these jobs that are not done."""
    do = {SCAN: _scan, TOKENS: _tokenise}[stage]
    for job in numbers:
        if not jobs.path(stage, job).exists():
            replace_file(jobs.path(stage, job), partial(_save, do(jobs, job)))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is complete under its name, or not there, even after a power cut."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    write(unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def stretches(text: str) -> Iterator[str]:
    """Yield a text in stretches that need little memory, cut at line ends where there are some."""
    start = 0
    while len(text) - start > STRETCH_CHARACTERS:
        end = start + STRETCH_CHARACTERS
        end = text.rfind("\n", start + STRETCH_CHARACTERS // 2, end) + 1 or end
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def _save(arrays: dict[str, np.ndarray], path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _scan(jobs: Jobs, job: int) -> dict[str, np.ndarray]:
    empty: list[str] = []
    part, characters, hashes, begins, ends = [], bytearray(), bytearray(), [], []
    for number, fragment in jobs.fragments(job, empty):
        part.append(number)
        characters += len(fragment.text).to_bytes(8, "little")
        hashes += hashlib.blake2b(_utf8(fragment), digest_size=8).digest()
        begins.append(fragment.begins)
        ends.append(fragment.ends)
    return {
        "part": np.array(part, np.int8),
        "characters": np.frombuffer(characters, "<i8").astype(np.int64),
        "hashes": np.frombuffer(hashes, "<u8").astype(np.uint64),
        "begins": np.array(begins, bool),
        "ends": np.array(ends, bool),
        "num_empty": np.array(len(empty)),
        "first_empty": np.array(empty[:1], str),
    }


def _utf8(fragment: Fragment) -> bytes:
    try:
        return fragment.text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{fragment.place}: character {error.start + 1} is half of a surrogate pair "
            f"({fragment.text[error.start]!r}), which no text in UTF-8 can hold; write the whole "
            "character."
        ) from error


class _Waiting(NamedTuple):
    row: int
    part: int
    place: str
    text: str
    continues: bool  # a document that began before


def _tokenise(jobs: Jobs, job: int) -> dict[str, np.ndarray]:
    cuts = jobs.cuts(job)
    counts = np.zeros((len(cuts), len(PART_NAMES)), np.int64)
    num_bytes = np.zeros(len(PART_NAMES), np.int64)
    tokens: list[list[np.ndarray]] = [[] for _ in PART_NAMES]
    vocab_size = jobs.tokenizer.vocab_size
    dtype = token_dtype(vocab_size)
    for batch in _batches(jobs, job, cuts):
        for waiting, ids in zip(batch, _encoded(jobs.tokenizer, batch), strict=True):
            if ids.size and ids.max() >= vocab_size:
                raise ValueError(
                    f"{waiting.place}: the tokenizer gave the token {ids.max()}, and its "
                    f"vocabulary has {vocab_size}; its folder mixes files of two tokenizers."
                )
            counts[waiting.row, waiting.part] += len(ids)
            num_bytes[waiting.part] += len(waiting.text.encode())
            tokens[waiting.part].append(ids.astype(dtype))
    joined = {
        name: np.concatenate([np.empty(0, dtype), *found])
        for name, found in zip(PART_NAMES, tokens, strict=True)
    }
    return {"counts": counts, "num_bytes": num_bytes, **joined}


def _batches(jobs: Jobs, job: int, cuts: np.ndarray) -> Iterator[list[_Waiting]]:
    waiting: list[_Waiting] = []
    size = 0
    for row, (_, fragment) in enumerate(jobs.fragments(job)):
        bounds = (0, *cuts[row].tolist(), len(fragment.text))
        for part in range(len(PART_NAMES)):
            continues = not fragment.begins or bounds[part] > 0
            for text in stretches(fragment.text[bounds[part] : bounds[part + 1]]):
                if waiting and size + len(text) > STRETCH_CHARACTERS:
                    yield waiting
                    waiting, size = [], 0
                if text:
                    waiting.append(_Waiting(row, part, fragment.place, text, continues))
                    size += len(text)
                    continues = True
    if waiting:
        yield waiting


def _encoded(tokenizer: TextTokenizer, batch: list[_Waiting]) -> list[np.ndarray]:
    ids: list[np.ndarray] = [np.empty(0, np.int64)] * len(batch)
    try:
        for continues in (False, True):
            rows = [row for row, waiting in enumerate(batch) if waiting.continues == continues]
            texts = [batch[row].text for row in rows]
            for row, found in zip(rows, tokenizer.encode_batch(texts, continues), strict=True):
                ids[row] = found
    except ValueError:
        for waiting in batch:
            try:
                tokenizer.encode(waiting.text)
            except ValueError as error:
                raise ValueError(f"{waiting.place}: {error}") from error
        raise
    return ids


def main(folder: str, stage: str, rotation: str, first: str, step: str, parent: str) -> int:
    """Do every `step`-th job from the first on, as long as the parent lives."""
    jobs = Jobs(Path(folder))
    try:
        for number in range(int(first), len(jobs), int(step)):
            if os.getppid() != int(parent):
                return 0
            do_jobs(jobs, stage, [(number + int(rotation)) % len(jobs)])
    except (ValueError, OSError) as error:
        errno = getattr(error, "errno", None)
        print(json.dumps({"kind": type(error).__name__, "message": str(error), "errno": errno}))
        return FAILED
    return 0


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this one
    sys.exit(main(*sys.argv[1:]))
