"""fsdp: what each rank holds, the effect of every option, and checkpoints across strategies."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_models.commands.export import export
from lit_models.run_files import damage, read_checkpoint, read_exported
from lit_models.training.checkpoints import newest_checkpoint
from lit_models.training.optim import AVERAGED
from tests.causal_lm.folders import saved_with_bytes
from tests.distributed.jobs import STEPS, GradientSums, OfRanks
from tests.distributed.test_matrix import assert_same, facts, run_world
from tests.toy import assert_same_samples, ledger_lines

pytestmark = pytest.mark.slow
LARGE_ON = ("large", "large folder lora")
LARGE = (*LARGE_ON, "large lora", "large folder")
HALF: dict[str, Any] = {"trainer": {"max_steps": 5}, "stages": ()}
SHARDS = {"sharded_checkpoint": True}
LIT_TIED = "tests.distributed.families.LitTied"
SHARD = [f"shard-0000{number}-of-00002.safetensors" for number in (1, 2)]
RESUMED = ["ddp-1 to fsdp-2", "fsdp-2 to ddp-1", "fsdp-2 to fsdp-4"]
# Family -> number of blocks that are whole at once in a validation, of two or more.
GATHERED = {"tied": 3, "causal_lm": 1, "text_scorer": 1, "retriever": 1, "consistency_lens": 1}
FROM_SHARDS = ["shards to one", "shards to two files", "shards to three"]


def job(name: str, strategy: str = "fsdp", **more: Any) -> dict[str, Any]:
    given = {"family": "tied", "data": {"global_batch_size": 16}, "decay": 0.9}
    return {"name": name, "strategy": strategy, **given, **more}


def last(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs, and runs in two halves with different strategies and numbers of processes."""
    folder = tmp_path_factory.mktemp("sharding")
    ddp, fsdp, shards = (str(last(folder / f"half of {n}")) for n in ("ddp-1", "fsdp-2", "shards"))
    run_world(folder, 1, [job("one", "ddp"), job("half of ddp-1", "ddp", **HALF)])
    saved_with_bytes(folder / "large", "Llama", num_hidden_layers=8, hidden_size=64)
    evaluated = {"callbacks": [OfRanks()], "stages": ()}
    begun = {"trainer": {"limit_train_batches": 0, "limit_val_batches": 0}, "stages": ()}
    two = [
        job("sharded"),
        job("half of fsdp-2", **HALF),
        job("ddp-1 to fsdp-2", resume=ddp),
        job("kept", sharding={"reshard_after_forward": False}),
        job("ddp-2", "ddp"),
        job("copies", sharding={"replicate_size": 2}),
        job("shards", sharding=SHARDS),
        job("half of shards", sharding=SHARDS, **HALF),
        job("shards to two files", resume=shards, stages=()),
        *(job(f"half {n}", family=n, sharding=SHARDS, **HALF) for n in LARGE_ON),
        *(job(n, family=n, **begun) for n in LARGE),
        *(
            job(f"{n} on", family=n, resume=str(last(folder / f"half {n}")), **begun)
            for n in LARGE_ON
        ),
        *(job(f"evaluated {n}", family=n, **evaluated) for n in GATHERED),
    ]
    run_world(folder, 2, two)
    one = {"fsdp-2 to ddp-1": fsdp, "shards to one": shards}
    run_world(folder, 1, [job(n, "ddp", resume=path, stages=()) for n, path in one.items()])
    run_world(folder, 3, [job("shards to three", sharding=SHARDS, resume=shards, stages=())])
    copies = {"sharding": {"replicate_size": 2, **SHARDS}, "callbacks": [GradientSums()]}
    in_parts = {"data": {"global_batch_size": 16, "micro_batch_size": 2}, "family": "tied"}
    hybrid = [job("hybrid", **copies), job("hybrid in parts", **copies, **in_parts)]
    run_world(folder, 4, [*hybrid, job("fsdp-2 to fsdp-4", resume=fsdp, stages=())])
    return folder


def test_two_ranks_hold_half_of_parameters_and_moments_each(runs):
    for name in ("sharded", "ddp-1 to fsdp-2", "hybrid"):  # "hybrid" has two groups of two
        for file in ("facts.json", "facts-1.json"):
            held = json.loads((runs / name / file).read_text())
            for moment in ("bytes", "bytes_after"):  # after fit; after the other stages
                assert 0.4 <= held[moment]["local"] / held[moment]["whole"] <= 0.6
    assert facts(runs / "ddp-2")["bytes"]["local"] == facts(runs / "ddp-2")["bytes"]["whole"]


def test_a_rank_builds_and_resumes_by_its_shard_and_a_layer(runs):
    for name in (*LARGE, *(f"{name} on" for name in LARGE_ON)):
        held, copies = facts(runs / name), 3 if name == "large on" else 1  # with the moments
        local = held["bytes"]["local"] * (4 / 3 if name == "large on" else 1)  # and averages
        assert held["most_bytes"] < local + held["bytes"]["whole"] / copies / 8


def test_an_evaluation_gathers_one_block_at_a_time_where_ranks_call_them_alike(runs):
    for name, most in GATHERED.items():
        assert json.loads((runs / f"evaluated {name}" / "gathered.json").read_text()) == most


def test_one_rank_makes_a_matrix_orthogonal(runs):
    run = runs / "evaluated causal_lm"
    counts = [json.loads((run / f"orthogonal-{rank}.json").read_text()) for rank in (0, 1)]
    [moments] = read_checkpoint(last(run))["optimizer_states"]
    num_matrices = sum("momentum_buffer" in state for state in moments["state"].values())
    assert sum(counts) == STEPS * num_matrices
    assert counts[0] == counts[1] > 0  # of two blocks


def test_copies_add_their_gradients_once_a_step(runs):
    whole, parts = (
        json.loads((runs / n / "sums.json").read_text()) for n in ("hybrid", "hybrid in parts")
    )
    assert set(whole) == {4}  # three blocks, and the parameters outside of them
    assert parts == [0, 4] * len(whole)


@pytest.mark.parametrize(
    "name", ["sharded", "kept", "copies", "hybrid", "hybrid in parts", "ddp-2"]
)
def test_no_option_changes_the_run(runs, name):
    assert_same(runs / "one", runs / name)


@pytest.mark.parametrize("name", RESUMED + FROM_SHARDS)
def test_a_run_goes_on_under_another_strategy_and_number_of_devices(runs, name):
    assert_same_samples(ledger_lines(runs / "one")[5:], ledger_lines(runs / name))
    expected, found = (read_checkpoint(last(runs / n)) for n in ("one", name))
    for key in ("state_dict", AVERAGED):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-8, atol=1e-10)


def test_every_rank_writes_its_half(runs):
    for name in ("last", "previous", "best"):
        folder = runs / "shards" / "checkpoints" / f"{name}.ckpt"
        assert sorted(p.name for p in folder.iterdir()) == ["meta.pt", *SHARD]
        assert damage(folder) is None
    sizes = [(last(runs / "shards") / name).stat().st_size for name in SHARD]
    assert 0.8 < sizes[0] / sizes[1] < 1.25
    names = sorted(p.name for p in (runs / "shards" / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt", "previous.ckpt"]  # no unfinished file is left


def test_a_folder_reads_as_the_file_of_the_same_run(runs):
    for name in ("last", "previous", "best"):
        file = read_checkpoint(runs / "sharded" / "checkpoints" / f"{name}.ckpt")
        folder = read_checkpoint(runs / "shards" / "checkpoints" / f"{name}.ckpt")
        assert folder.keys() == file.keys()
        assert folder["global_step"] == file["global_step"]
        (ours,), (theirs,) = folder["optimizer_states"], file["optimizer_states"]
        for key in ("state_dict", AVERAGED):
            torch.testing.assert_close(folder[key], file[key], rtol=0, atol=0)
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
        assert ours["param_groups"] == theirs["param_groups"]
        assert all("param_names" in group for group in ours["param_groups"])


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs / "shards" / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "file", "message"),
    [
        (cut_short, SHARD[1], f"{SHARD[1]} is cut short"),
        (alter, SHARD[0], f"checksum of its shard {SHARD[0]} is wrong"),
        (Path.unlink, SHARD[1], f"{SHARD[1]} is missing"),
        (cut_short, "meta.pt", "of its meta.pt: it is cut short"),
        (Path.unlink, "meta.pt", "a folder without meta.pt"),
    ],
)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_used(copy, harm, file, message):
    (copy / "checkpoints" / "best.ckpt").rename(copy / "best.ckpt")
    harm(last(copy) / file)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(last(copy))
    with pytest.warns(UserWarning, match=message):
        assert newest_checkpoint(copy) == copy / "checkpoints" / "previous.ckpt"


def test_shards_of_two_steps_are_never_mixed(copy):
    shutil.copy(copy / "checkpoints" / "previous.ckpt" / SHARD[1], last(copy) / SHARD[1])
    assert SHARD[1] in (damage(last(copy)) or "")


def test_an_export_of_shards_is_that_of_the_file(runs, tmp_path):
    content = {}
    for name in ("sharded", "shards"):
        export(last(runs / name), to=tmp_path / name, class_path=LIT_TIED)
        content[name] = read_exported(tmp_path / name)["state_dict"]
    torch.testing.assert_close(content["shards"], content["sharded"], rtol=0, atol=0)
