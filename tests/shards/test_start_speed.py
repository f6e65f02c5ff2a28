"""A start on 10^8 documents: seconds and memory, with simulated indices.

pytest -m benchmark tests/shards/test_start_speed.py; 1.9 GB of disk, about a minute.
"""

import json
import sys

import numpy as np
import pytest

from datamodules.tokenizers.text import byte_tokenizer
from tests.distributed.launch import run

NUM_SHARDS, DOCUMENTS = 100, 1_000_000  # of a shard
START = """
import json, resource, sys, time
from datamodules import ShardDataModule
from datamodules.files.splitting import TextSplit
begin = time.perf_counter()
files = {"train_files": sys.argv[1], "validation_files": sys.argv[1]}
data = ShardDataModule(**files, split=TextSplit(0.0), context_length=4096, global_batch_size=512)
data.prepare_data()
data.setup("fit")
plan = data.plan("train", 0)
for step in (0, plan.num_steps // 2):
    plan.step_ids(step)
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": seconds, "peak_gib": peak, "rows": len(plan.order)}))
"""


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Shards with real indices, whose tokens take no disk space."""
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    entries = []
    for number in range(NUM_SHARDS):
        drawn = np.random.default_rng(number).lognormal(np.log(400) - 0.32, 0.8, DOCUMENTS)
        ends = np.cumsum(drawn.astype(np.int64).clip(2, 100_000)).astype("<u8")
        path = tmp_path / f"{number:03}.ds"
        ends.tofile(f"{path}.index")
        with path.open("wb") as file:
            file.truncate(2 * int(ends[-1]))
        digests = {"digest": f"{number:032x}", "index_digest": f"{number:032x}"}
        entries.append({"name": path.name, "bytes": path.stat().st_size, **digests})
    (tmp_path / "manifest.json").write_text(json.dumps({"shards": entries}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer().to_dict()))
    return tmp_path


@pytest.mark.benchmark
def test_a_start_on_many_documents_takes_seconds_and_little_memory(simulated):
    for what in ("with the indices", "again"):
        done = run("-c", START, str(simulated))
        assert done.returncode == 0, done.stdout
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{NUM_SHARDS * DOCUMENTS:,} documents, {what}: {found}", file=sys.stderr)
    assert found["rows"] > 9_000_000
    assert found["peak_gib"] < 1
