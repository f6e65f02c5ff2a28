"""Makes token stores: reads documents, divides them, tokenises them once into the cache.

The work lies in an unfinished folder beside the store. What an interrupted preparation has done
is used by the next one, and two that run at the same time share the work.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once
from datamodules.files.documents import Reading
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.text.splitting import Fragments, TextSplit, cuts_of
from datamodules.text.token_jobs import (
    SCAN,
    STAGES,
    TOKENS,
    Jobs,
    do_jobs,
    replace_file,
    write_jobs,
)
from datamodules.text.token_store import TokenStore
from datamodules.text.token_streams import write_streams
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions, make_tokenizer

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
        replace_file(unfinished / "bounds.npy", lambda path: _save(path, bounds))
        cuts = cuts_of(fragments, request.effective_split())
        replace_file(unfinished / "cuts.npy", lambda path: _save(path, cuts))
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
    command = [sys.executable, "-m", "datamodules.text.token_jobs", str(jobs.folder), stage]
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


def _save(path: Path, values: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, values)
