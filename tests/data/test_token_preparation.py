"""Token stores are prepared once, by several processes, and a kill in the middle loses little."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from datamodules.core.store import cache_root
from datamodules.files import documents
from datamodules.files.documents import Reading
from datamodules.files.splitting import TRAIN, VALIDATION
from datamodules.text import preparation as token_jobs
from datamodules.text import preparation as token_writer
from datamodules.text.preparation import open_token_store
from datamodules.text.splitting import TextSplit
from datamodules.tokenizers.text_tokenizer import TokenizerOptions
from tests.text_corpora import request, same, text_file


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_processes_give_the_same_store(tmp_path, monkeypatch):
    rows = [{"text": f"row {i} " + "word " * (i % 9)} for i in range(800)]
    path = text_file(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    options = TokenizerOptions(kind="bpe", vocab_size=300)
    alone = open_token_store(request([path], TextSplit(), options))
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(documents, "SECTION_BYTES", 8_000)
    monkeypatch.setattr(token_jobs, "SECTION_BYTES", 8_000)
    monkeypatch.setattr(token_writer, "IN_PROCESS_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert same(open_token_store(request([path], TextSplit(), options)), alone)
    bad = text_file(tmp_path / "bad.jsonl", path.read_text() + "no json\n")
    with pytest.raises(ValueError, match=r"bad.jsonl:801: the line is no JSON"):
        open_token_store(request([bad]))


def test_a_store_is_made_once_and_named_by_all_it_depends_on(tmp_path, monkeypatch):
    path = text_file(tmp_path / "a.txt", "Some text.\n\nAnd more.")
    base = request([path])
    store = open_token_store(base)
    others = [
        request([path], TextSplit(0.1)),
        request([path], options=TokenizerOptions(kind="characters")),
        request([path], reading=Reading(documents_by="blank_line")),
        request({TRAIN: [path], VALIDATION: [path]}),
    ]
    assert len({base.folder(), *(other.folder() for other in others)}) == 5
    moved = tmp_path / "moved"
    moved.mkdir()
    assert request([text_file(moved / "b.txt", path.read_text())]).folder() == base.folder()
    monkeypatch.setattr(token_writer, "_make", None)  # making it would now fail
    assert open_token_store(request([path])).fingerprint == store.fingerprint
    text_file(path, "Other text")
    assert base.folder() != store.folder


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "SECTION_BYTES", 1 << 15)
    monkeypatch.setattr(token_jobs, "SECTION_BYTES", 1 << 15)
    monkeypatch.setattr(token_jobs, "STRETCH_CHARACTERS", 1 << 13)
    line = json.dumps({"text": "a line of text " * 70}) + "\n"
    peaks = []
    for num in (200, 2000):  # 0.2 and 2 MB
        path = text_file(tmp_path / f"{num}.jsonl", line * num)
        request([path]).folder()  # reads the file in large steps for its digest
        tracemalloc.start()
        open_token_store(request([path]))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.3 * path.stat().st_size  # a few numbers for each document


PREPARE = """
import sys, time
from datamodules.files import documents
from datamodules.text import preparation as token_jobs
from datamodules.text import preparation as token_writer
from tests.text_corpora import request
from pathlib import Path

documents.SECTION_BYTES = token_jobs.SECTION_BYTES = 2000
save = token_jobs._save


def slow(arrays, path):
    time.sleep(float(sys.argv[2]))
    save(arrays, path)


token_jobs._save = slow
token_writer.open_token_store(request([Path(sys.argv[1])]))
"""


def start(path, seconds):
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(path), str(seconds)],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
    )


def corpus(tmp_path):
    rows = [json.dumps({"text": f"row {i} " + "word " * 20}) + "\n" for i in range(200)]
    return text_file(tmp_path / "a.jsonl", "".join(rows))


def test_a_killed_preparation_is_gone_on_with(tmp_path, monkeypatch):
    path = corpus(tmp_path)
    process = start(path, 0.05)
    tokens = cache_root() / "tokens"
    deadline = time.monotonic() + 60
    while len(list(tokens.glob(".*unfinished/tokens-*.npz"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (unfinished,) = tokens.glob(".*.unfinished")
    done = {p: p.stat().st_mtime_ns for p in unfinished.glob("*-*.npz")}
    assert 3 <= sum("tokens" in p.name for p in done) < 12
    monkeypatch.setattr(documents, "SECTION_BYTES", 2000)
    monkeypatch.setattr(token_jobs, "SECTION_BYTES", 2000)
    made = []
    do = token_jobs._tokenise
    monkeypatch.setattr(
        token_jobs, "_tokenise", lambda jobs, job: made.append(job) or do(jobs, job)
    )
    resumed = open_token_store(request([path]))
    assert not {f"tokens-{job:06}.npz" for job in made} & {p.name for p in done}
    assert made
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "other"))
    assert same(resumed, open_token_store(request([path])))


def test_two_processes_at_once_make_one_store(tmp_path):
    path = corpus(tmp_path)
    processes = [start(path, 0.02) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    folder = request([path]).folder()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert open_token_store(request([path])).part_facts(TRAIN).num_documents == 200


def test_a_worker_ends_when_its_parent_is_gone(tmp_path):
    token_jobs.write_jobs(tmp_path, {TRAIN: [corpus(tmp_path)]}, Reading())
    nobody = str(os.getppid() + 1)
    assert token_jobs.main(str(tmp_path), "scan", "0", "0", "1", nobody) == 0
    assert not list(tmp_path.glob("scan*"))
    assert token_jobs.main(str(tmp_path), "scan", "0", "0", "1", str(os.getppid())) == 0
    assert len(list(tmp_path.glob("scan*"))) == 1


def test_a_worker_that_was_killed_is_named(tmp_path):
    token_jobs.write_jobs(tmp_path, {TRAIN: [corpus(tmp_path)]}, Reading())
    jobs = token_jobs.Jobs(tmp_path)
    code = "import os; os.kill(os.getpid(), 9)"
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        ) as process,
        pytest.raises(RuntimeError, match="ended with status -9; if it was killed for its mem"),
    ):
        token_writer._wait([process], jobs, "scan")


def test_a_worker_says_what_it_could_not_write(tmp_path, monkeypatch, capsys):
    def refuse(path, write):
        raise OSError(errno.ENOSPC, "No space left on device")

    token_jobs.write_jobs(tmp_path, {TRAIN: [corpus(tmp_path)]}, Reading())
    jobs = token_jobs.Jobs(tmp_path)
    monkeypatch.setattr(token_jobs, "replace_file", refuse)
    parent = str(os.getppid())
    assert token_jobs.main(str(tmp_path), "scan", "0", "0", "1", parent) == token_jobs.FAILED
    code = f"print({capsys.readouterr().out!r}); raise SystemExit({token_jobs.FAILED})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process, pytest.raises(OSError, match="No space left on device") as found:
        token_writer._wait([process], jobs, "scan")
    assert found.value.errno == errno.ENOSPC


def test_progress_of_a_long_preparation_is_said(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger=token_writer.log.name)
    monkeypatch.setattr(token_writer, "PROGRESS_S", 0.0)
    token_jobs.write_jobs(tmp_path, {TRAIN: [corpus(tmp_path)]}, Reading())
    code = "import time; time.sleep(0.2)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        token_writer._wait([process], token_jobs.Jobs(tmp_path), "tokens")
    assert "Tokenised 0% of the text." in caplog.messages
