"""Shards in object storage: broken connections, changed objects, a bounded cache."""

import json
import multiprocessing
import pickle
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from datamodules import ShardDataModule
from datamodules.core.store import content_digest
from datamodules.files.documents import read_documents
from datamodules.files.splitting import TextSplit
from datamodules.shards import remote
from datamodules.shards.remote import RemoteShards, fetch, list_urls, local_copy
from tests.shards.small import write_folder

NUM_SHARDS = 4


class Breaking(SimpleHTTPRequestHandler):
    """Serves files, counts requests, and cuts some answers short."""

    asked: Counter[str] = Counter()
    breaks: Counter[str] = Counter()  # name -> number of answers still to cut

    def do_GET(self) -> None:
        name = Path(self.path).name
        self.asked[name] += 1
        if self.breaks[name] > 0:
            self.breaks[name] -= 1
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder of shards with its manifest, and the URL that serves it."""
    folder = Path(write_folder(tmp_path / "store", NUM_SHARDS))
    entries = []
    for path in sorted(folder.rglob("*.ds")):
        index = Path(f"{path}.index")
        sizes = {"documents": index.stat().st_size // 8, "bytes": path.stat().st_size}
        digests = {"digest": content_digest(path), "index_digest": content_digest(index)}
        entries.append({"name": path.relative_to(folder).as_posix(), **sizes, **digests})
    (folder / "manifest.json").write_text(json.dumps({"shards": entries}))
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "WAITS_S", (0.01, 0.02))
    Breaking.asked.clear()
    Breaking.breaks.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Breaking, directory=folder))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_broken_connection_is_tried_again_and_a_file_comes_once(store):
    folder, url = store
    shards = RemoteShards(url)
    first, second, *_ = shards.entries
    Breaking.breaks[Path(first).name] = 2
    assert shards.local_file(first).read_bytes() == (folder / first).read_bytes()
    assert Breaking.asked[Path(first).name] == 3
    again = pickle.loads(pickle.dumps(RemoteShards(url)))
    assert again.local_file(first) == shards.local_file(first)
    assert Breaking.asked[Path(first).name] == 3
    index = shards.local_file(f"{second}.index")
    assert index.read_bytes() == (folder / f"{second}.index").read_bytes()
    Breaking.breaks[Path(second).name] = 9
    with pytest.raises(RuntimeError, match=r"cannot be read .*after 3 attempts; see that the stor"):
        shards.local_file(second)
    assert not (shards.folder / second).exists()
    assert not list(shards.folder.rglob("*unfinished*"))


@pytest.mark.parametrize("content", [b"shorter", None])
def test_a_changed_object_is_refused(store, content):
    folder, url = store
    shards = RemoteShards(url)
    name = next(iter(shards.entries))
    old = (folder / name).read_bytes()
    (folder / name).write_bytes(content or bytes([old[0] ^ 1]) + old[1:])
    with pytest.raises(ValueError, match=r"is not the file of [\d,]+ bytes in its manifest"):
        shards.local_file(name)
    assert not (shards.folder / name).exists()
    shards.prefetch([name])
    with pytest.raises(ValueError, match="it was changed since"):
        shards.local_file(name)


def test_the_files_that_were_used_longest_ago_go(store):
    _, url = store
    sizes = [entry["bytes"] for entry in RemoteShards(url).entries.values()]
    small = RemoteShards(url, 2.5 * max(sizes) / 2**30)
    a, b, c, d = small.entries
    for name in (a, b, a, c):
        assert small.local_file(name).is_file()
    assert [(small.folder / name).exists() for name in (a, b, c, d)] == [True, False, True, False]
    small.prefetch([d, b])
    assert {small.local_file(name).is_file() for name in (b, d)} == {True}
    assert sum([path.stat().st_size for path in small.folder.rglob("*.ds")]) <= small.limit


def ask(url: str, queue: "multiprocessing.Queue[int]") -> None:
    shards = RemoteShards(url)
    for name in shards.entries:
        queue.put(shards.local_file(name).stat().st_size)


def test_processes_of_a_machine_share_the_files_also_forks(store):
    folder, url = store
    shards = RemoteShards(url)
    shards.prefetch(shards.entries)  # threads, which forks do not inherit
    queue = multiprocessing.get_context("fork").Queue()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=ask, args=(url, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    sizes = [queue.get(timeout=120) for _ in range(2 * NUM_SHARDS)]
    for process in processes:
        process.join()
    assert Counter(sizes) == Counter(2 * [path.stat().st_size for path in folder.rglob("*.ds")])
    assert all(Breaking.asked[path.name] == 1 for path in folder.rglob("*.ds"))


def test_urls_of_a_folder_a_pattern_or_a_file(store, tmp_path):
    folder, url = store
    (folder / "texts").mkdir()
    for name in ("a.jsonl", "b.jsonl.gz", "c.html"):
        (folder / "texts" / name).write_text("{}")
    names = [f"{url}/texts/a.jsonl", f"{url}/texts/b.jsonl.gz"]
    assert list(list_urls(f"{url}/texts", (".jsonl",))) == names
    assert list(list_urls(f"{url}/texts/*.jsonl", (".jsonl",))) == names[:1]
    assert list_urls(names[0], (".jsonl",)) == {names[0]: 2}
    with (
        pytest.raises(ValueError, match=f"^{names[1]}:1: the row has no"),
        local_copy(names[1]) as path,
    ):
        list(read_documents(path))
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        fetch(f"{url}/texts/none.jsonl", tmp_path / "x")
    assert Breaking.asked["none.jsonl"] == 1  # without waiting and asking again


def test_a_model_reads_the_same_rows_from_object_storage(store, tmp_path):
    folder, url = store
    rows = []
    for files in (str(folder), url):
        options = {"split": TextSplit(0.2), "context_length": 32, "global_batch_size": 8}
        data = ShardDataModule(files, shuffle_shards=1, cache_gib=1e-4, **options)
        data.prepare_data()
        data.setup("fit")
        rows.append([batch for loader in (data.train_dataloader(),) for batch in loader])
        digest = data.request("train").digest()
    assert digest == data.request("train").digest()
    for here, there in zip(*rows, strict=True):
        assert torch.equal(here["input_ids"], there["input_ids"])
        assert torch.equal(here["sample_id"], there["sample_id"])
    data = ShardDataModule(url, cache_gib=1e-5, global_batch_size=8)
    with pytest.raises(ValueError, match="shuffled together and the next ones take"):
        data.prepare_data()
