"""No option without an effect: each is changed, and the change is seen on two ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run
from tests.distributed.option_run import JOBS
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run(*launcher, "-m", "tests.distributed.option_run", str(folder))
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


def seen(runs: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((runs / name / f"facts-{rank}.json").read_text()) for rank in (0, 1)]


def test_small_buckets_are_more_buckets(runs):
    for plain, small in zip(seen(runs, "plain"), seen(runs, "small buckets"), strict=True):
        assert (plain["num_buckets"], small["num_buckets"] > 1) == (1, True)


def test_gradients_that_are_views_share_the_buffer_that_is_sent(runs):
    for plain, views in zip(seen(runs, "plain"), seen(runs, "views"), strict=True):
        assert plain["num_storages"] == plain["num_grads"] > 1
        assert views["num_storages"] == views["num_buckets"] == 1


def test_buffers_are_those_of_rank_0_unless_each_rank_keeps_its_own(runs):
    assert [set(facts["places"]) for facts in seen(runs, "plain")] == [{0.0}, {0.0}]
    assert [set(facts["places"]) for facts in seen(runs, "own buffers")] == [{0.0}, {1.0}]


def test_a_parameter_without_a_gradient_is_an_error_that_names_the_option(runs):
    for facts in seen(runs, "unused"):
        assert facts["steps"] < 10
        assert "Use --trainer.strategy=ddp_find_unused_parameters_true" in facts["error"]


@pytest.mark.parametrize("name", ["unused found", "unused, static"])
def test_parameters_without_a_gradient_are_looked_for_or_known(runs, name):
    for facts in seen(runs, name):
        assert (facts["steps"], facts.get("error")) == (10, None)
        assert facts["static_graph"] == (name == "unused, static")


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if "strategy" in job])
def test_no_option_changes_the_run(runs, name):
    expected = ledger_lines(runs / ("plain"))
    for left, right in zip(expected, ledger_lines(runs / name), strict=True):
        assert left["digest"] == right["digest"]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-10)


def test_batch_norms_are_warned_of(runs):
    words = "batch norm layers.*the run depends on the number of devices"
    assert re.search(words, " ".join(seen(runs, "norms")[0]["warnings"]))
    assert not re.search(words, " ".join(seen(runs, "plain")[0]["warnings"]))
