"""Negatives from all ranks: 2 ranks x b equals 1 rank x 2b, in every way to compute the step."""

from pathlib import Path

import pytest

from tests.distributed.test_matrix import assert_same, run_world
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
# family -> the family on one device that it must equal, and its strategy on two
CELLS = [
    ("retriever", "retriever", "ddp"),
    ("retriever_chunked", "retriever", "fsdp"),
    ("sparse_retriever", "sparse_retriever", "ddp"),
    ("retriever_sizes", "retriever_sizes", "fsdp"),
    ("retriever_dropout_chunked", "retriever_dropout", "ddp"),
    ("retriever_mutant", "retriever", "ddp"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retriever")
    ones = [(one, "ddp") for one in dict.fromkeys(one for _, one, _ in CELLS)]
    for number, cells in ((1, ones), (2, [(name, how) for name, _, how in CELLS])):
        options = {"trainer": {"max_steps": 6}}
        named = [(f"{name}-{number}", name, how) for name, how in cells]
        jobs = [{"name": n, "family": name, "strategy": how, **options} for n, name, how in named]
        run_world(folder, number, jobs)
    return folder


@pytest.mark.parametrize(("name", "one", "strategy"), CELLS[:-1])
def test_two_devices_train_and_find_what_one_does(runs, name, one, strategy):
    assert_same(runs / f"{one}-1", runs / f"{name}-2")


def test_without_gradients_through_the_gathering_it_is_another_training(runs: Path) -> None:
    right, wrong = (ledger_lines(runs / n) for n in ("retriever-1", "retriever_mutant-2"))
    assert wrong[0]["loss"] == pytest.approx(right[0]["loss"], rel=1e-10)
    assert wrong[0]["grad_norm"] != pytest.approx(right[0]["grad_norm"], rel=1e-3)
