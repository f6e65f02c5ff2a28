"""Negatives from all ranks: 2 ranks x b is 1 x 2b, however the step is computed."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run
from tests.distributed.test_matrix import assert_same
from tests.seo.retrieval_collection import write_collection
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
# family -> the one on one device that it must equal, and its strategy on two
CELLS = [
    ("retriever", "retriever", "ddp"),
    ("retriever_chunked", "retriever", "fsdp"),
    ("retriever_dropout_chunked", "retriever_dropout", "ddp"),
    ("retriever_mutant", "retriever", "ddp"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retriever")
    write_collection(folder / "collection")
    ones = [(one, 1, "ddp") for one in dict.fromkeys(one for _, one, _ in CELLS)]
    for number in (1, 2):
        cells = ones if number == 1 else [(name, 2, how) for name, _, how in CELLS]
        jobs = [
            {"name": f"{name}-{number}", "family": name, "strategy": how} for name, _, how in cells
        ]
        path = folder / f"jobs-{number}.json"
        path.write_text(json.dumps([{**job, "trainer": {"max_steps": 6}} for job in jobs]))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
        done = run(*launcher, "-m", "tests.distributed.jobs", str(folder), str(path), timeout_s=300)
        assert done.returncode == 0, done.stdout[-4000:]
    return folder


@pytest.mark.parametrize(("name", "one", "strategy"), CELLS[:-1])
def test_two_devices_train_and_find_what_one_does(
    runs: Path, name: str, one: str, strategy: str
) -> None:
    assert_same(runs / f"{one}-1", runs / f"{name}-2")


def test_without_gradients_through_the_gathering_it_is_another_training(runs: Path) -> None:
    right, wrong = (ledger_lines(runs / n) for n in ("retriever-1", "retriever_mutant-2"))
    assert wrong[0]["loss"] == pytest.approx(right[0]["loss"], rel=1e-10)
    assert wrong[0]["grad_norm"] != pytest.approx(right[0]["grad_norm"], rel=1e-3)
