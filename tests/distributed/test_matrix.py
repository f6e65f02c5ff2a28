"""Level A over families x {1, 2, 4 processes} x strategies x accumulation, and small sets.

All runs of one world share its processes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_models.certify.compare import BOUNDS, compare, read_record
from lit_models.commands.verify import verify_run
from lit_models.run_files import read_checkpoint
from tests.causal_lm.tiny import texts_of
from tests.distributed.families import FAMILIES, occupation_table, text_files
from tests.distributed.jobs import STEPS, run_jobs
from tests.distributed.launch import FORKED, in_world
from tests.distributed.lens_family import story_files
from tests.distributed.seo_family import SEO, seo_files
from tests.toy import assert_same_samples, ledger_lines
from tests.training.test_memory import assert_equal

pytestmark = pytest.mark.slow
GLOBAL_BATCH = 16
METHODS = {2: "spawn"}  # each new interpreter orders sets differently, which must not matter
SMALL_SETS = (1, 21, 2, 7)  # the first two in every run, the others in the soak
Cell = tuple[str, int, str, int]  # family, processes, strategy, accumulation
SHAPES = [(n, s, a) for n in (1, 2, 4) for s in ("ddp", "fsdp") for a in (1, 4)]
# Each process count, strategy and accumulation at least once; other cells are in the soak.
DIAGONAL = [(1, "ddp", 1), (2, "ddp", 4), (2, "fsdp", 1), (4, "ddp", 1), (4, "fsdp", 4)]
PAIRS = [*DIAGONAL, (1, "fsdp", 4)]  # each pair of values occurs in a cell
# For families that share a base with others; includes a number of processes that divides nothing.
FEW = [(1, "ddp", 1), (2, "ddp", 4), (2, "fsdp", 1), (3, "ddp", 1)]
SHAPES_OF = {"occupation_coder": PAIRS, **dict.fromkeys(("seq2seq", *SEO), FEW)}
IN_HALF = [family for family in FAMILIES if family != "toy"]
UNCUT = ("retriever",)  # a step is one micro-batch, since the loss couples its samples
SPAWNED = ("toy", "occupation_coder", "consistency_lens")  # the first one is evaluated, too


def cells_of(family: str, shapes: list[tuple[int, str, int]]) -> list[Cell]:
    return [(family, *shape) for shape in shapes if family not in UNCUT or shape[2] == 1]


FIRST_CELLS = [cell for name in FAMILIES for cell in cells_of(name, SHAPES_OF.get(name, DIAGONAL))]
# A retriever that computes its step in another way -> the one that it must equal on one device.
SAME = {"retriever_chunked": "retriever", "retriever_dropout_chunked": "retriever_dropout"}
RETRIEVERS = ("sparse_retriever", "retriever_sizes", "retriever_dropout")
FIRST_CELLS += [(name, 1, "ddp", 1) for name in RETRIEVERS]
FIRST_CELLS += [("sparse_retriever", 2, "ddp", 1), ("retriever_sizes", 2, "fsdp", 1)]
FIRST_CELLS += [("retriever_chunked", 2, "fsdp", 1), ("retriever_dropout_chunked", 2, "ddp", 1)]
MUTANT = ("retriever_mutant", 2, "ddp", 1)  # without gradients through what it gathers
FIRST_CELLS += [("consistency_lens", 3, "ddp", 1), ("lens_layers", 2, "fsdp", 1)]
for special in ("linear_coder", "documents", "lens_layers"):
    FIRST_CELLS += [(special, 1, "ddp", 1), (special, 2, "ddp", 4)]
ALL_CELLS = [cell for family in FAMILIES for cell in cells_of(family, SHAPES)]
OTHER_CELLS = [cell for cell in ALL_CELLS if cell not in FIRST_CELLS]


def write_tables(folder: Path) -> None:
    """Write the files of all families."""
    occupation_table(folder / "occupations.csv")
    text_files(folder)
    story_files(folder)
    seo_files(folder)


def run_world(
    folder: Path, num_processes: int, jobs: list[dict[str, Any]], method: str = FORKED
) -> str:
    """Run jobs in one world of processes; return their output."""
    if not (folder / "occupations.csv").exists():
        write_tables(folder)
    return in_world(num_processes, run_jobs, folder, jobs, method=method)


def name_of(cell: Cell) -> str:
    return "-".join(map(str, cell))


def matrix_jobs(cells: list[Cell], num_processes: int) -> list[dict[str, Any]]:
    jobs = []
    for cell in cells:
        family, processes, strategy, accumulation = cell
        if processes == num_processes:
            micro = -(-GLOBAL_BATCH // num_processes // accumulation)
            data = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro}
            job = {"name": name_of(cell), "family": family, "strategy": strategy, "data": data}
            jobs.append(job)
    return jobs


def small_jobs(sizes: tuple[int, ...], num_processes: int) -> list[dict[str, Any]]:
    jobs = []
    for strategy in ("ddp", "fsdp"):
        for rows in sizes:
            data = {"num_samples": rows, "num_evaluated": rows, "global_batch_size": 8}
            name = f"rows{rows}-{num_processes}-{strategy}"
            job = {"name": name, "family": "toy", "strategy": strategy, "data": data}
            jobs.append({**job, **{"trainer": {"max_steps": 3}, "last": {"every_n_steps": 3}}})
    return jobs


def rehearsed_jobs(family: str, strategy: str) -> list[dict[str, Any]]:
    """Return a run of two ranks with less and more memory, and one that is given what it finds."""
    job = {"family": family, "strategy": strategy, "trainer": {"max_steps": 5}, "stages": ()}
    data = {"global_batch_size": GLOBAL_BATCH}
    auto = {"name": f"{family}-auto", "data": data, "positions": [80, 40]}  # 9 in the longest row
    given = {"name": f"{family}-given", "data": {**data, "micro_batch_size": 4}}
    return [{**job, **auto}, {**job, **given}]


def spawned_job(family: str) -> dict[str, Any]:
    """Return a run of a process that spawns two; each further stage spawns them again."""
    data = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2}
    job = {"name": f"{family}-spawned", "family": family, "strategy": "ddp_spawn", "devices": 2}
    return {**job, "data": data, **({} if family == "toy" else {"stages": ()})}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    for num_processes in (1, 2, 3, 4):
        jobs = matrix_jobs([*FIRST_CELLS, MUTANT], num_processes)
        jobs += small_jobs(SMALL_SETS[:2], num_processes)
        # Three steps of every family, with weights that fsdp gathers in bfloat16.
        few = {"trainer": {"precision": "bf16-mixed", "max_steps": 3}, "stages": ()}
        few |= {"strategy": "fsdp", "data": {"global_batch_size": GLOBAL_BATCH}}
        if num_processes == 1:
            jobs = [*map(spawned_job, SPAWNED), *jobs]  # before this process has a group
        if num_processes == 2:
            jobs += [{"name": f"half-{family}", "family": family, **few} for family in IN_HALF]
            jobs += rehearsed_jobs("toy", "ddp") + rehearsed_jobs("tied", "fsdp")
        printed = run_world(folder, num_processes, jobs, METHODS.get(num_processes, FORKED))
        writers = [j for j in jobs if j["family"] == "causal_lm" and j.get("stages", True)]
        assert printed.count("a sample: the") == len(writers)  # one rank of each run prints
    return folder


@pytest.fixture(scope="module")
def all_runs(runs: Path) -> Path:
    """The same folder with the soak's cells added."""
    for num_processes in (1, 2, 3, 4):
        jobs = matrix_jobs(OTHER_CELLS, num_processes)
        jobs += small_jobs(SMALL_SETS[2:], num_processes)
        run_world(runs, num_processes, jobs, METHODS.get(num_processes, FORKED))
    return runs


def facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "facts.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def assert_same(one: Path, other: Path, **bounds: float) -> None:
    """Assert level A in float64, as certified: the same samples in each step and evaluation, losses
    within 1e-10, norms and metrics within 1e-9, weights within 1e-8, predictions with equal
    bytes."""
    found = compare(read_record(one), read_record(other), BOUNDS["64"] | bounds)
    assert [word for finding in found for word in finding.words] == []
    assert all(finding.is_same for finding in found[:4])  # records are not empty


def assert_one_device_ran_the_same(folder: Path, cell: Cell) -> None:
    base = SAME.get(cell[0], cell[0])
    one, other = folder / name_of((base, 1, "ddp", 1)), folder / name_of(cell)
    assert len(ledger_lines(other)) == STEPS
    assert facts(other)["world_size"] == cell[1]
    assert facts(other)["start"] == facts(one)["start"]
    assert any(other.glob("coded.*"))
    assert_same(one, other)
    assert verify_run(other).faults == []


@pytest.mark.parametrize("cell", FIRST_CELLS, ids=name_of)
def test_a_run_does_not_depend_on_devices_strategy_or_accumulation(runs, cell):
    assert_one_device_ran_the_same(runs, cell)


@pytest.mark.parametrize("family", IN_HALF)
def test_weights_gathered_in_bfloat16_have_nearly_the_losses_of_float64(runs, family):
    found = ledger_lines(runs / f"half-{family}")
    precise = ledger_lines(runs / name_of((family, 1, "ddp", 1)))[: len(found)]
    assert_same_samples(precise, found, rel=1e-2)
    assert_same_samples(precise[:1], found[:1], rel=1e-3)  # losses in bfloat16 are less precise
    assert len(found) == 3
    assert found[0]["loss"] != precise[0]["loss"]


@pytest.mark.soak
@pytest.mark.parametrize("cell", OTHER_CELLS, ids=name_of)
def test_a_run_does_not_depend_on_any_other_cell_either(all_runs, cell):
    assert_one_device_ran_the_same(all_runs, cell)


@pytest.mark.parametrize("family", SPAWNED)
def test_spawned_processes_learn_as_one_device(runs, family):
    one, two = runs / name_of((family, 1, "ddp", 1)), runs / f"{family}-spawned"
    assert_same_samples(ledger_lines(one), ledger_lines(two))
    torch.testing.assert_close(weights(two), weights(one), rtol=1e-8, atol=1e-10)
    assert ledger_lines(two)[0]["world_size"] == 2
    assert verify_run(two).faults == []
    if family == "toy":
        assert_same(one, two)


def test_without_gradients_through_the_gathering_it_is_another_training(runs):
    cells = ("retriever", 1, "ddp", 1), MUTANT
    right, wrong = (ledger_lines(runs / name_of(cell)) for cell in cells)
    assert wrong[0]["loss"] == pytest.approx(right[0]["loss"], rel=1e-10)
    assert wrong[0]["grad_norm"] != pytest.approx(right[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("family", ["toy", "tied"])
def test_the_rank_with_the_least_memory_decides_on_the_micro_batch(runs, family):
    auto, given = runs / f"{family}-auto", runs / f"{family}-given"
    assert facts(auto)["micro_batch_size"] == 4
    assert_equal(auto, given)


@pytest.mark.parametrize("cell", [c for c in FIRST_CELLS if "lens" in c[0]], ids=name_of)
def test_every_control_of_a_lens_is_the_same_on_any_devices(runs, cell):
    names = [name_of(c) for c in ((cell[0], 1, "ddp", 1), cell)]
    expected, found = (json.loads((runs / n / "controls.json").read_text()) for n in names)
    assert found["rows"].keys() == expected["rows"].keys()
    for group, rows in expected["rows"].items():
        assert found["legibility"][group] == pytest.approx(expected["legibility"][group], rel=1e-9)
        for row, values in rows.items():
            assert values["count"] > 20
            assert found["rows"][group][row] == pytest.approx(values, rel=1e-7, abs=1e-9), row


@pytest.mark.parametrize("cell", [c for c in FIRST_CELLS if c[0] == "causal_lm"], ids=name_of)
def test_texts_that_a_model_writes_while_it_learns_are_the_same_on_any_devices(runs, cell):
    texts = texts_of(runs / name_of(cell))
    assert texts == texts_of(runs / name_of(("causal_lm", 1, "ddp", 1)))
    assert {step for _, step in texts} == {3, 6, 9}


@pytest.mark.parametrize("cell", [c for c in FIRST_CELLS if c[0] == "ranker"], ids=name_of)
def test_every_query_of_a_ranker_has_the_same_metrics_on_any_devices(runs, cell):
    one, other = (runs / name_of(c) for c in (("ranker", 1, "ddp", 1), cell))
    for name in ("ranking-test.json", "queries-test.csv"):
        assert (other / name).read_bytes() == (one / name).read_bytes()


def assert_used_once(folder: Path, rows: int, strategy: str, num_processes: int) -> None:
    one, other = folder / f"rows{rows}-1-ddp", folder / f"rows{rows}-{num_processes}-{strategy}"
    assert read_record(other)["metrics"]["test/count"] == rows
    assert len((other / "coded.csv").read_text().splitlines()) == rows
    assert_same(one, other)


@pytest.mark.parametrize("rows", SMALL_SETS[:2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_sets_smaller_than_the_world_are_used_once(runs, rows, strategy, num_processes):
    assert_used_once(runs, rows, strategy, num_processes)


@pytest.mark.soak
@pytest.mark.parametrize("rows", SMALL_SETS[2:])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_sets_of_other_sizes_are_used_once(all_runs, rows, strategy, num_processes):
    assert_used_once(all_runs, rows, strategy, num_processes)
