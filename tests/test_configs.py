"""Every shipped YAML parses; every debug.yaml trains, saves and reloads."""

import csv
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lit_models.cli import ParsedCLI
from lit_models.commands.chain import read_stages
from lit_models.commands.verify import Status
from lit_models.config_files import load_yaml, read_config, shipped_configs

Unisono = Callable[..., tuple[int, str]]
ROOT = Path(__file__).parents[1]
CHAINS = [n for n in shipped_configs() if "stages" in read_config(ROOT / "configs" / n)]
OTHERS = ("hardware/", "prepare/")
CONFIGS = [n for n in shipped_configs() if not n.startswith(OTHERS) and n not in CHAINS]
OVERLAYS = [name for name in shipped_configs() if name.startswith("hardware/")]
HEADS = ["kind", "num_parameters", "has_default"]
PREDICTED = [
    *("predicted_kind", "probability_kind"),
    *("predicted_num_parameters", "probability_has_default"),
]
ERRORS = {  # the first columns of a table of errors, before those that describe the sample
    "causal_lm/debug.yaml": ["positions", "document 1", "document 2"],
    "consistency_lens/debug.yaml": ["position", "input", "truth", "answer"],
    "occupation_coder/debug.yaml": [*["input", "language", "truth", "answer"]],
    "seo/ranker_debug.yaml": ["input", "truth", "answer"],
    "seo/retriever_debug.yaml": ["input", "truth", "answer"],
    "seo/sparse_retriever_debug.yaml": ["input", "truth", "answer"],
    "seo/scorer_debug.yaml": ["input", *HEADS, *PREDICTED],
    "seq2seq/debug.yaml": ["place", "input", "truth", "answer"],
    "seo/writer_debug.yaml": ["place", "input", "truth", "answer"],
}
DEBUG = [name for name in CONFIGS if name.endswith("debug.yaml")]
LARGE_DEMOS = ("consistency_lens/debug.yaml", "seo/writer_debug.yaml", "seq2seq/debug.yaml")
LARGE_DEMOS += tuple(f"seo/{name}_debug.yaml" for name in ("sparse_retriever", "scorer", "ranker"))
FINE_TUNING = [name for name in CONFIGS if "finetune" in name or "lora" in name]


def test_a_config_has_dates_and_times_as_they_are_written():
    found = load_yaml("{a: 1:00:00, b: 2020-01-31, c: 1e-3, d: [-12, 1_000]}", "own.yaml")
    assert found == {"a": "1:00:00", "b": "2020-01-31", "c": 0.001, "d": [-12, 1000]}


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {*DEBUG, *FINE_TUNING}))  # which start below
def test_a_config_parses(own_folder, name):
    assert ParsedCLI(["fit", "--config", name], is_stage=True).values["trainer"]


@pytest.mark.parametrize("name", FINE_TUNING)
def test_a_recipe_of_fine_tuning_needs_weights_to_start_from(done, own_folder, name):
    output = done("fit", "--config", name, status=2)
    assert "--model.pretrained=" in output or "--model.init_from=" in output
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_has_sound_stages(name):
    assert read_stages(read_config(ROOT / "configs" / name)["stages"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_holds_trainer_keys_only_and_parses(done, toy_config, name):
    assert set(yaml.safe_load((ROOT / "configs" / name).read_text())) == {"trainer"}
    done("fit", "--config", "toy.yaml", "--config", name, "--print_config")


@pytest.mark.parametrize("name", shipped_configs())
def test_the_first_three_lines_say_how_it_is_run_what_it_costs_and_what_to_expect(name):
    lines = (ROOT / "configs" / name).read_text().splitlines()
    assert not any(": /" in line for line in lines)  # an absolute path
    assert all(line.startswith("# ") for line in lines[:3])
    assert re.search(f"unisono ({'chain' if name in CHAINS else 'fit|predict|prepare'})", lines[0])
    assert lines[1].startswith("# Cost: ")
    assert lines[2].startswith(("# Expected: ", "# Result: "))
    assert len(lines) <= 60


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LARGE_DEMOS else []) for n in DEBUG]
)
def test_a_debug_config_trains_validates_saves_reloads(
    unisono, done, own_folder, monkeypatch, name
):
    run = "runs/" + name.removesuffix(".yaml").replace("/", "-")
    output = done("fit", "--config", name)
    if name.split("/")[0] != "occupation_coder":  # its next command codes a user's table
        assert re.search(r"^best: .*val/", output, re.M), output
        assert re.search(r"^report: unisono report runs/", output, re.M), output
        (line,) = re.findall(r"^next: (.*)$", output, re.M)
        before, _, command = line.rpartition(" && ")
        if before:
            subprocess.run(before, shell=True, check=True)
        program, *words = shlex.split(command)
        status, output = unisono(*words, "--data.global_batch_size=500")
        assert (program, status) == ("unisono", 0), output
    monkeypatch.setattr("lit_models.training.predictions.MOST", 20)  # if no answer is marked wrong
    output = done("test", "--config", name, "--ckpt_path", "auto")
    assert f"uses {run}/checkpoints/" in output
    assert f"errors: {run}/errors-test.csv (" in output
    has_table = "ranker" in name or "retriever" in name
    assert bool(re.search(r"^test/", output, re.M)) != has_table  # each figure is printed once
    status, output = unisono("verify", run)
    assert status in (Status.PROVEN, Status.CUT), output  # most end in the middle of an epoch
    # The table of errors, which the report shows.
    is_retriever = "retriever" in name
    with (Path(run) / "errors-test.csv").open(newline="", encoding="utf-8") as file:
        heads, *rows = csv.reader(file)
    assert heads[:-2] == ERRORS[name] + ["confidence", "seen in training"] * (not is_retriever)
    assert (len(rows) > 20) == bool(re.search("occupation|retriever|seq2seq", name))
    assert len({row[-2] for row in rows}) == len(rows)
    assert all(row[0] for row in rows)
    worst = [float(row[-1]) for row in rows]
    assert worst == sorted(worst, reverse=not is_retriever)
