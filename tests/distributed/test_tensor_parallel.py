"""Tensor parallelism: devices share the same samples, and each holds a part of every layer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_models import LitCausalLM
from lit_models.commands.export import export
from lit_models.commands.verify import verify_run
from lit_models.training import ExactDropout
from lit_models.training.run import Topology
from lit_models.training.throughput import DATA_OF_RANKS
from tests.distributed.families import text_files
from tests.distributed.jobs import STEPS, run_job
from tests.distributed.test_matrix import assert_same, run_world, weights
from tests.toy import assert_same_samples, ledger_lines

pytestmark = pytest.mark.slow
FEW = {"max_steps": STEPS // 2}
HALF: dict[str, Any] = {"trainer": FEW, "stages": ()}
BATCH = 16


def job(name: str, family: str = "llama", **sharding: Any) -> dict[str, Any]:
    """Return a job under fsdp, by default in groups of two devices."""
    options = {"tensor_parallel_size": 2, **sharding}
    data = {"global_batch_size": BATCH}
    return {
        "name": name,
        "family": family,
        "strategy": "fsdp",
        "data": data,
        "sharding": options,
        **({"callbacks": [ExactDropout()], "decay": 0.9} if family == "gpt2" else {}),
    }


def alone(folder: Path, name: str, family: str = "llama", **more: Any) -> None:
    """Run on one device, in this process."""
    given = {**job(name, family), "strategy": "auto", **more}
    del given["sharding"]
    run_job(folder / name, given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs on one device, on a group of two, and on two groups of two."""
    folder = tmp_path_factory.mktemp("tensor")
    text_files(folder)

    def last(name: str) -> str:
        return str(folder / name / "checkpoints" / "last.ckpt")

    alone(folder, "one")
    alone(folder, "one gpt2", "gpt2")
    alone(folder, "half", **HALF)
    two = [
        {**job("pair"), "seeds_apart": True},
        job("pair gpt2", "gpt2"),
        {**job("pair half", sharded_checkpoint=True), **HALF},
        {**job("one to pair"), "resume": last("half"), "stages": ()},
        {
            **job("pair bf16"),
            **{"callbacks": [Topology()], "stages": ()},
            "trainer": {**FEW, "precision": "bf16-mixed"},
        },
    ]
    printed = run_world(folder, 2, two)
    for words in ("tensor parallel 2, gloo", "rendezvous", "16 = 1 tensor group x 16 x 1 acc"):
        assert words in printed
    alone(folder, "pair to one", resume=last("pair half"), stages=())
    four = [
        {
            **job("square gpt2", "gpt2"),
            "data": {"global_batch_size": BATCH, "micro_batch_size": 2},
            "seeds_apart": True,
        },
        {**job("hybrid", replicate_size=2, sharded_checkpoint=True), "seeds_apart": True},
        {**job("pair to square"), "resume": last("pair half")},
    ]
    run_world(folder, 4, four)
    return folder


@pytest.mark.parametrize("name", ["pair", "pair gpt2", "square gpt2", "hybrid"])
def test_a_run_depends_neither_on_the_split_nor_on_what_other_ranks_drew(runs, name):
    assert_same(runs / ("one gpt2" if "gpt2" in name else "one"), runs / name)
    assert verify_run(runs / name).faults == []


def of_rank(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"facts{f'-{rank}' * (rank > 0)}.json").read_text())


@pytest.mark.parametrize(("name", "ranks"), [("pair", 2), ("pair to square", 4), ("hybrid", 4)])
def test_every_rank_holds_its_part_of_parameters_and_moments(runs, name, ranks):
    copies = 2 if name == "hybrid" else 1
    for rank in range(ranks):
        for moment in ("bytes", "bytes_after"):  # after fit; after validation, test and prediction
            held = of_rank(runs / name, rank)[moment]
            assert held["local"] / held["whole"] <= 1.1 * copies / ranks


def test_unsplit_parameters_stay_equal_in_all_bits_within_a_group(runs):
    for name, groups in (("pair", [(0, 1)]), ("square gpt2", [(0, 1), (2, 3)])):
        for group in groups:
            facts = [of_rank(runs / name, rank) for rank in group]
            assert len({fact["copies"] for fact in facts}) == 1
            assert all(fact["bytes_of_copies"] > 0 for fact in facts)


@pytest.mark.parametrize("name", ["one to pair", "pair to one", "pair to square"])
def test_a_run_goes_on_with_other_groups_and_without(runs, name):
    assert_same_samples(ledger_lines(runs / "one")[STEPS // 2 :], ledger_lines(runs / name))
    torch.testing.assert_close(weights(runs / name), weights(runs / "one"), rtol=1e-8, atol=1e-10)


def test_mixed_precision_uses_the_same_samples_and_nearly_the_same_losses(runs):
    single, mixed = ledger_lines(runs / "half"), ledger_lines(runs / "pair bf16")
    assert_same_samples(single, mixed, rel=2e-2)
    assert all(a["loss"] != b["loss"] for a, b in zip(single, mixed, strict=True))


def test_throughput_counts_the_samples_of_a_group_once_and_says_who_waited(runs):
    expected = sum(line["samples"] for line in ledger_lines(runs / "one"))
    for name, num_ranks in (("pair", 2), ("hybrid", 4)):
        text = (runs / name / "throughput.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        samples = sum(line["samples_per_s"] * line["seconds"] for line in lines)
        assert samples == pytest.approx(expected, rel=1e-3)
        for line in lines:
            least, median, most = (line[name] for name in DATA_OF_RANKS)
            assert 0 < least <= median <= most
            assert least <= line["split"]["data"] <= most
            assert line["slowest_rank"] in range(num_ranks)


def test_shards_of_split_layers_are_exported_whole(runs, tmp_path):
    last = runs / "pair half" / "checkpoints" / "last.ckpt"
    export(last, to=tmp_path / "exported", class_path="lit_models.LitCausalLM")
    exported = LitCausalLM.from_exported(tmp_path / "exported").state_dict()
    expected = weights(runs / "half")
    assert exported.keys() == expected.keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, expected[name].to(value), rtol=1e-6, atol=1e-8)
