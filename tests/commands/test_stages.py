"""Stages in a chain's YAML: their command lines by hand, and an error for each wrong stage."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from lit_models.commands import chain, run_command
from lit_models.commands.chain import read_stages, run_stages

DEBUG = "causal_lm/debug.yaml"
SUBJECT = {"verb": "fit", "config": DEBUG}
CHAIN: dict[str, Any] = {
    "subject": SUBJECT,
    "export": {
        "verb": "export",
        "checkpoint": "subject",
        "options": {"adapter": True, "class_path": None},
    },
    "dump": {
        "verb": "predict",
        "config": [DEBUG, "hardware/cpu.yaml"],
        "options": {
            "model.subject": "{export}",
            "data": {"predict_output": "{dump}/store", "layers": [1, 2], "seed": "{seed}"},
            "model.prompt": None,
        },
        "devices": 2,
    },
    "test": {"verb": "test", "config": DEBUG, "checkpoint": "subject"},
}


def test_each_stage_becomes_a_command_line_with_the_best_checkpoint_that_there_is(tmp_path):
    subject, export, dump, test = read_stages(CHAIN)
    here = Path("runs/x")
    root = "--trainer.default_root_dir=runs/x"
    command = f"fit --config {DEBUG} {root}/subject --seed_everything=3"
    assert shlex.join(subject.arguments(here, 3)) == command
    assert subject.arguments(here, 3, is_begun=True)[-1] == "--ckpt_path=auto"
    last = "runs/x/subject/checkpoints/last.ckpt"
    assert export.arguments(here, 3) == ["export", last, "--to=runs/x/export", "--adapter=true"]
    assert shlex.join(dump.arguments(here, 3)) == (
        f"predict --config {DEBUG} --config hardware/cpu.yaml {root}/dump --seed_everything=3 "
        "--trainer.devices=2 --model.subject=runs/x/export --data.predict_output=runs/x/dump/store "
        "'--data.layers=[1, 2]' --data.seed=3 --model.prompt=null"
    )
    assert f"--ckpt_path={last}" in test.arguments(here, 3)
    takes = [stage.takes for stage in (subject, export, dump, test)]
    assert takes == [[], ["subject"], ["export"], ["subject"]]
    best = tmp_path / "subject" / "checkpoints" / "best.ckpt"
    best.parent.mkdir(parents=True)
    best.touch()
    assert export.arguments(tmp_path, 1)[1] == str(best)


def test_changes_win_and_leave_the_rest():
    changes = {"dump": {"devices": 4, "options": {"data": {"layers": [3]}, "x.y": True}}}
    stage = read_stages(CHAIN, changes)[2]
    assert (stage.verb, stage.devices) == ("predict", 4)
    assert stage.options["data.layers"] == [3]
    assert stage.options["model.subject"] == "{export}"
    assert stage.arguments(Path("r"), 1)[-1] == "--x.y=true"
    assert read_stages(CHAIN, {"dump": {"config": 5}})[2].config == ("5",)  # no such path


def fit(**values: object) -> dict[str, Any]:
    return {"a": SUBJECT, "b": {**SUBJECT, **values}}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({}, "a chain needs stages; give the YAML of one with --config"),
        (["fit"], "a chain needs stages; .* key `stages` has"),
        ({"a": "fit"}, "stage a and its options must be mappings .* got 'fit'"),
        ({"a-2": SUBJECT}, "cannot be called `a-2`: a name has small letters"),
        ({"seed": SUBJECT}, "cannot be called `seed`: .* none of seed, chain"),
        (fit(divices=2), "stage b has the unknown key `divices`. Did you mean devices"),
        ({"a": {"config": DEBUG}}, "stage a: verb must be one of fit, .*, got None"),
        (fit(verb="tst"), "verb must be one of fit, .* got tst. Did you mean test"),
        ({"a": {"verb": "fit"}}, "stage a: fit needs a config"),
        (fit(verb="export", checkpoint="a"), "stage b: export takes no config; leave it out"),
        (fit(options=3), "stage b and its options must be mappings"),
        (fit(options={"trainer.devices": 2}), "option trainer.devices is the chain's: .*`devices`"),
        (fit(options={"trainer.default_root_dir": "x"}), "is the chain's: each stage writes to"),
        (fit(options={"ckpt_path": "x"}), "ckpt_path is the chain's own here; a fit begins with"),
        (fit(checkpoint="a"), "stage b: fit takes no checkpoint; .* model.init_from"),
        ({"a": {"verb": "export"}}, "stage a: checkpoint must name an earlier .*trains, got None"),
        (fit(verb="test", checkpoint="b"), "must name an earlier stage that trains, got b"),
        (fit(verb="test", checkpoint="c"), "stage b: it takes c; there is no such stage"),
        (fit(verb="test", checkpoint=["a"]), r"stage b: it takes \['a'\]; there is no such stage"),
        (fit(options={"x": "{aa}"}), "stage b: it takes aa; .* Did you mean a?"),
        ({"a": {**SUBJECT, "options": {"x": "{b}"}}, "b": SUBJECT}, "it takes b, .* later; move"),
        (
            {"a": SUBJECT, "b": {"verb": "export", "checkpoint": "a", "devices": 2}},
            "stage b: export runs on no devices",
        ),
    ],
)
def test_what_is_wrong_is_named(stages, message):
    with pytest.raises(ValueError, match=message):
        read_stages(stages)


def test_the_command_line_reaches_the_stages(own_folder, monkeypatch):
    Path("mine.yaml").write_text(
        "to: out-{seed}\nstages:\n"
        "  a: {verb: fit, config: causal_lm/debug.yaml, options: {data.x: 1, data.y: '{seed}'}}\n"
        "  b: {verb: export, checkpoint: a, options: {class_path: '{a}'}}\n"
    )
    seen: list[Any] = []
    monkeypatch.setattr(chain, "run_stages", lambda *given: seen.append(given) or 7)
    options = ["--config=mine.yaml", "--seed=3", "--only=a", "--change.a.devices=2"]
    options += ["--change.a.options.data.x=5", "--change.b.options.z=null", "--launcher=srun -N 1"]
    assert run_command("chain", options) == 7
    (stages, chosen, folder, seed, prefix) = seen[0]
    assert prefix == ("srun", "-N", "1", *chain.PREFIX)
    assert [stage.name for stage in chosen] == ["a"]
    assert (str(folder), seed) == ("out-3", 3)
    assert (stages[0].devices, stages[0].options) == (2, {"data.x": 5, "data.y": "{seed}"})
    assert stages[1].options == {"class_path": "{a}", "z": None}
    with pytest.raises(ValueError, match="a chain needs stages; give the YAML"):
        run_command("chain", [])
    with pytest.raises(FileNotFoundError, match="--launcher: there is no srunn here"):
        run_stages([], [], Path("out"), 1, ("srunn",))
