"""Preparation of token stores: documents are read, divided and tokenised once into the cache.

The work lies in an unfinished folder beside the store, as jobs over sections of files. Each job's
result is complete under its name or not there: what an interrupted preparation has done is used by
the next one, and two that run at the same time share the work. `python -m
datamodules.text.preparation` is a process that does jobs; unlike a fork or a pool of
`multiprocessing` it needs nothing of the program that starts it.

Shapes: F fragments of all documents, P pieces (the fragments that a part has something of), D
documents of a part.
"""

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once
from datamodules.files.documents import (
    SECTION_BYTES,
    Fragment,
    Reading,
    Section,
    read_section,
    sections_of,
)
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.text.splitting import Fragments, TextSplit, cuts_of
from datamodules.text.store import TokenStore, token_dtype
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions, make_tokenizer

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


class _Pieces(NamedTuple):
    """Where the pieces of one part lie in its stream.

    fragment [P] int64; leads [P] bool, a begin token stands before; trails [P] bool, an end token
    behind; stops [P] int64, position behind the piece; starts, num_positions and hashes [D];
    texts [D, 2] int64, where the text of a document begins and ends, without begin and end token.
    """

    fragment: np.ndarray
    leads: np.ndarray
    trails: np.ndarray
    stops: np.ndarray
    starts: np.ndarray
    num_positions: np.ndarray
    hashes: np.ndarray
    texts: np.ndarray


def write_streams(jobs: Jobs, fragments: Fragments, folder: Path) -> dict[str, object]:
    """Write the arrays of every part into the folder.

    Returns:
        fingerprint, and per part its number of documents, tokens, characters and UTF-8 bytes.
    """
    cuts = np.load(jobs.folder / "cuts.npy")
    counts, num_bytes = [], np.zeros(len(PART_NAMES), np.int64)
    for job in range(len(jobs)):
        with np.load(jobs.path(TOKENS, job)) as made:
            counts.append(made["counts"])
            num_bytes += made["num_bytes"]
    all_counts, content = np.concatenate(counts), hashlib.sha256()
    bounds = np.column_stack([np.zeros(len(cuts), np.int64), cuts, fragments.characters])
    is_cut = _are_cut(fragments, bounds)
    parts = {}
    for part, name in enumerate(PART_NAMES):
        taken = bounds[:, part : part + 2]
        pieces = _laid_out(jobs, fragments, taken, all_counts[:, part])
        _write_tokens(jobs, part, pieces, folder / f"{name}.tokens.npy", content)
        if is_cut:  # parts share documents, and no text
            pieces = pieces._replace(hashes=_hashed(folder / f"{name}.tokens.npy", pieces.texts))
        for kind in ("starts", "num_positions", "hashes"):
            values = getattr(pieces, kind)
            np.save(folder / f"{name}.{kind}.npy", values)
            if kind != "hashes":  # they depend on where a long document is cut for reading
                content.update(values.tobytes())
        parts[name] = {
            "num_documents": len(pieces.starts),
            "num_tokens": int(pieces.stops[-1]) if len(pieces.stops) else 0,
            "num_characters": int((taken[:, 1] - taken[:, 0]).sum()),
            "num_bytes": int(num_bytes[part]),
        }
    return {"fingerprint": content.hexdigest()[:32], "parts": parts}


def _laid_out(jobs: Jobs, fragments: Fragments, taken: np.ndarray, counts: np.ndarray) -> _Pieces:
    """Return where everything goes.

    Args:
        jobs: for the tokenizer.
        fragments: all.
        taken: [F, 2] the characters of each fragment that belong to the part.
        counts: [F] their tokens.
    """
    begin_id, end_id = jobs.tokenizer.begin_id, jobs.tokenizer.end_id
    fragment = np.flatnonzero(taken[:, 1] > taken[:, 0])
    document = fragments.document[fragment]
    opens = np.diff(document, prepend=-1) != 0
    begins = fragments.begins[fragment] & (taken[fragment, 0] == 0) & (begin_id is not None)
    trails = fragments.ends[fragment] & (taken[fragment, 1] == fragments.characters[fragment])
    # One token that both begins and ends stands once between two documents, as in GPT-2's data.
    is_shared = begins & np.concatenate([[False], trails])[:-1] & (begin_id == end_id)
    leads = begins & ~is_shared
    stops = np.cumsum(leads + counts[fragment] + trails)
    firsts = np.concatenate([[0], stops])[:-1]
    is_last = np.append(opens[1:], True)[: len(opens)]
    starts = (firsts - is_shared)[opens]
    num_positions = np.maximum(stops[is_last] - 1 - starts, 0)
    hashes = fragments.document_hashes()[document[opens]]
    texts = np.column_stack([(firsts + leads)[opens], (stops - trails)[is_last]])
    return _Pieces(fragment, leads, trails, stops, starts, num_positions, hashes, texts)


def _are_cut(fragments: Fragments, bounds: np.ndarray) -> bool:
    """Return whether parts share documents, each having another stretch of them."""
    has = np.diff(bounds, axis=1) > 0  # [F, parts]
    held = [np.unique(fragments.document[has[:, part]]) for part in range(has.shape[1])]
    return sum(map(len, held)) > len(np.unique(np.concatenate(held)))


def _hashed(path: Path, texts: np.ndarray) -> np.ndarray:
    """Return [D] uint64, a hash of the tokens of each text."""
    tokens = np.load(path, mmap_mode="r")
    digests = (
        hashlib.blake2b(tokens[start:stop].tobytes(), digest_size=8).digest()
        for start, stop in texts.tolist()
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def _write_tokens(
    jobs: Jobs, part: int, pieces: _Pieces, path: Path, content: "hashlib._Hash"
) -> None:
    tokenizer = jobs.tokenizer
    dtype = token_dtype(tokenizer.vocab_size)
    total = int(pieces.stops[-1]) if len(pieces.stops) else 0
    if not total:
        np.save(path, np.empty(0, dtype))  # an empty file cannot be mapped
        return
    stream = np.lib.format.open_memmap(path, "w+", dtype, (total,))
    bounds = np.searchsorted(pieces.fragment, np.load(jobs.folder / "bounds.npy"))
    for job, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        start = int(pieces.stops[first - 1]) if first else 0
        stops = pieces.stops[first:last] - start
        sizes = np.diff(stops, prepend=0)
        leads, trails = pieces.leads[first:last], pieces.trails[first:last]
        out, is_text = np.empty(stops[-1], dtype), np.ones(stops[-1], bool)
        for places, token in (
            ((stops - sizes)[leads], tokenizer.begin_id),
            ((stops - 1)[trails], tokenizer.end_id),
        ):
            out[places] = token or 0
            is_text[places] = False
        with np.load(jobs.path(TOKENS, job)) as made:
            out[is_text] = made[PART_NAMES[part]]
        stream[start : start + len(out)] = out
        content.update(out.tobytes())
    stream.flush()


log = logging.getLogger("lightning.pytorch.datamodules")  # Lightning shows its own at this level
STORE_VERSION = 3
IN_PROCESS_BYTES = 8 << 20
MAX_PROCESSES = 64
POLL_S, PROGRESS_S = 0.02, 60.0


@dataclass
class TokenRequest:
    """All that a token store depends on.

    Args:
        files: per part (train, validation, test) the files.
        tokenizer: which tokenizer, where none is given.
        split: how training documents are divided.
        given: a tokenizer that is there already, such as a checkpoint's.
        reading: where documents stand in files.
    """

    files: dict[int, list[Path]]
    tokenizer: TokenizerOptions
    split: TextSplit
    given: TextTokenizer | None = None
    reading: Reading = field(default_factory=Reading)

    def folder(self) -> Path:
        """Return the store's place in the cache, a digest of all that it depends on."""
        root, split = cache_root(), self.effective_split()
        facts = {
            "version": STORE_VERSION,
            "files": {
                PART_NAMES[part]: [[p.suffix.lower(), file_digest(p, root)] for p in paths]
                for part, paths in self.files.items()
            },
            "tokenizer": self.given.digest if self.given else self.tokenizer.facts(),
            "split": None if split is None else asdict(split),
            "reading": asdict(self.reading),
        }
        return root / "tokens" / digest_of(facts)

    def effective_split(self) -> TextSplit | None:
        """Return how the training files are divided; none where they are not.

        Validation files leave the training files whole; test files leave them undivided but for
        validation.
        """
        if self.files.get(VALIDATION):
            return None
        split = replace(self.split, test_share=0.0) if self.files.get(TEST) else self.split
        return split if split.validation_share or split.test_share else None


def open_token_store(request: TokenRequest) -> TokenStore:
    """Return the store of a request, made at first use.

    Raises:
        ValueError: there is no text, or a file cannot be read as text.
    """
    folder = request.folder()
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    made_once(folder, lambda target: _make(request, unfinished, folder, target))
    shutil.rmtree(unfinished, ignore_errors=True)
    return TokenStore(folder)


def _make(request: TokenRequest, unfinished: Path, folder: Path, target: Path) -> None:
    try:
        is_continued = unfinished.exists()
        unfinished.mkdir(exist_ok=True)
        assembled = _prepared(request, unfinished, os.getpid() if is_continued else 0)
        for path in assembled.iterdir():
            os.replace(path, target / path.name)
    except ValueError:  # of the text or the options: others will have another folder
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    except FileNotFoundError:
        if not folder.exists():  # else another process has finished, and cleared the work away
            raise


def _prepared(request: TokenRequest, unfinished: Path, rotation: int) -> Path:
    """Return a complete store in the unfinished folder.

    Args:
        request: what is prepared.
        unfinished: may hold what an earlier or another process has done.
        rotation: with which job to begin, so that two processes do different ones.
    """
    started = time.monotonic()
    if not (unfinished / "jobs.json").exists():
        write_jobs(unfinished, request.files, request.reading)
    jobs = Jobs(unfinished)
    _run(jobs, SCAN, rotation)
    scans = [_loaded(jobs.path(SCAN, job)) for job in range(len(jobs))]
    fragments = _fragments(scans)
    if not (unfinished / "cuts.npy").exists():
        bounds = np.cumsum([0, *(len(scan["part"]) for scan in scans)], dtype=np.int64)
        replace_file(unfinished / "bounds.npy", lambda path: _save_array(path, bounds))
        cuts = cuts_of(fragments, request.effective_split())
        replace_file(unfinished / "cuts.npy", lambda path: _save_array(path, cuts))
    if not (unfinished / "tokenizer.json").exists():
        tokenizer = request.given or make_tokenizer(
            request.tokenizer,
            (text for job in range(len(jobs)) for text in jobs.pieces(job, TRAIN)),
        )
        text = json.dumps(tokenizer.to_dict())
        replace_file(unfinished / "tokenizer.json", lambda path: path.write_text(text, "utf-8"))
    _run(jobs, TOKENS, rotation)
    assembled = Path(tempfile.mkdtemp(prefix="store.", dir=unfinished))
    facts = write_streams(jobs, fragments, assembled)
    facts |= _empty_facts(scans)
    (assembled / "facts.json").write_text(json.dumps(facts), "utf-8")
    shutil.copy(unfinished / "tokenizer.json", assembled)
    _report(facts, time.monotonic() - started)
    return assembled


def _run(jobs: Jobs, stage: str, rotation: int) -> None:
    """Do all jobs of a stage, in this process where they are small."""
    assert stage in STAGES
    todo = sum(not jobs.path(stage, job).exists() for job in range(len(jobs)))
    num = min(len(os.sched_getaffinity(0)), todo, MAX_PROCESSES)
    if num <= 1 or jobs.num_bytes < IN_PROCESS_BYTES:
        do_jobs(jobs, stage, ((job + rotation) % len(jobs) for job in range(len(jobs))))
        return
    if stage == TOKENS:
        size = f"{jobs.num_bytes / 1e6:,.0f} MB"
        log.info(f"Tokenising {size} of text, once, in {num} processes.")
    command = [sys.executable, "-m", "datamodules.text.preparation", str(jobs.folder), stage]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rotation), str(first), str(num), str(os.getpid())],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **paths},
        )
        for first in range(num)
    ]
    try:
        _wait(processes, jobs, stage)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def _wait(processes: "list[subprocess.Popen[str]]", jobs: Jobs, stage: str) -> None:
    running, said = processes, time.monotonic()
    while running:
        for process in running:
            if process.poll():
                _raise(process)
        running = [process for process in running if process.poll() is None]
        time.sleep(POLL_S)
        if stage == TOKENS and time.monotonic() - said > PROGRESS_S:
            done = sum(jobs.path(stage, job).exists() for job in range(len(jobs)))
            log.info(f"Tokenised {done / len(jobs):.0%} of the text.")
            said = time.monotonic()


def _raise(process: "subprocess.Popen[str]") -> None:
    output = process.stdout.read().strip()
    if not output:
        raise RuntimeError(
            f"a process that tokenised ended with status {process.returncode}; if it was killed "
            "for its memory, give the run more of it. What is done is kept."
        )
    error = json.loads(output.splitlines()[-1])
    if error["errno"] is not None:
        raise OSError(error["errno"], error["message"])
    kinds = {"FileNotFoundError": FileNotFoundError, "ValueError": ValueError}
    raise kinds.get(error["kind"], RuntimeError)(error["message"])


def _fragments(scans: list[dict[str, np.ndarray]]) -> Fragments:
    """Return what the scans found.

    Raises:
        ValueError: there is no text at all.
    """
    if not any(len(scan["part"]) for scan in scans):
        empty = _empty_facts(scans)
        found = (
            f"{empty['num_empty']} documents, all without a text, the first at "
            f"{empty['first_empty']}"
            if empty["num_empty"]
            else "no document"
        )
        raise ValueError(f"the files hold {found}; give them at least one text.")
    return Fragments(
        *(np.concatenate([scan[name] for scan in scans]) for name in Fragments._fields)
    )


def _empty_facts(scans: list[dict[str, np.ndarray]]) -> dict[str, object]:
    first = [str(scan["first_empty"][0]) for scan in scans if len(scan["first_empty"])]
    return {
        "num_empty": sum(int(scan["num_empty"]) for scan in scans),
        "first_empty": first[0] if first else None,
    }


def _report(facts: dict, seconds: float) -> None:
    num_documents = sum(part["num_documents"] for part in facts["parts"].values())
    num_tokens = sum(part["num_tokens"] for part in facts["parts"].values())
    text = f"Tokenised {num_documents:,} documents, {num_tokens:,} tokens, in {seconds:.1f} s"
    if facts["num_empty"]:
        text += (
            f"; {facts['num_empty']:,} documents without a text are left out, the first at "
            f"{facts['first_empty']}"
        )
    log.info(text + ".")


def _loaded(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def _save_array(path: Path, values: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, values)


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
