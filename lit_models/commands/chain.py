"""Chains: stages that run one after the other, each on its own devices.

A stage is a command that writes to CHAIN/STAGE. Its record, CHAIN/chain/STAGE.json, holds what
decides its output, with the digests of the stages that it reads, so that the output of an older
chain is never mistaken for a new one.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from datamodules.core.store import digest_of, file_digest, remove, write_whole
from lit_models.config_files import (
    ABSENT,
    changes,
    did_you_mean,
    find_config,
    flat,
    given_value,
    near_names,
    read_config,
)
from lit_models.errors import say, usage_errors

PREFIX = (sys.executable, "-m", "lit_models")
# Some signals exist on POSIX alone.
USR1, HANGUP = (getattr(signal, name, None) for name in ("SIGUSR1", "SIGHUP"))
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
SIGNALS = tuple(s for s in (signal.SIGINT, signal.SIGTERM, USR1, HANGUP) if s is not None)
TRAINER_VERBS = ("fit", "validate", "test", "predict")
VERBS = (*TRAINER_VERBS, "export")
SEED = "seed"
RESERVED = (SEED, "chain")  # a placeholder, and the folder of the records
# No hyphen: NAME-2 would be the folder of a later run of the stage NAME.
NAME = re.compile(r"[a-z][a-z0-9_]*")
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
OWN_OPTIONS = ("trainer.default_root_dir", "to", "trainer.devices")
RECORDS = "chain"
FILES = "the files of the option "
# Options that change no result, like the number of devices.
DEPLOYMENT = ("trainer.num_nodes", "trainer.accelerator")
NO_INPUTS = ("predict_output", "save_dir", "dirpath", "default_root_dir")  # where a run writes
State = Literal["absent", "begun", "complete"]


# Changes are an option of their own because --stages.dump.devices=2 would replace the whole stage
# of the YAML.
def chain(
    *,
    stages: dict | None = None,
    to: str = "runs/chain-{seed}",
    seed: int = 1,
    only: list[str] | None = None,
    change: dict | None = None,
    launcher: str = "",
) -> int:
    """Run the stages of a chain one after the other; complete stages are skipped.

    An interrupted stage resumes. A stage whose options, configs, files named in them or inputs from
    earlier stages have changed is refused, so that nothing is overwritten; the number of devices
    may change.

    Args:
        stages: NAME: {verb, config, checkpoint, options, devices} for each, in order; in
            options, "{NAME}" is the folder of a stage, "{seed}" the seed.
        to: folder of the chain, with a subfolder for each stage.
        seed: seed of every stage that trains or evaluates.
        only: a stage to run; repeatable. Stages that it reads must be complete and are not run.
        change: values that override those of stages: --change.NAME.devices=2,
            --change.NAME.options.data.micro_batch_size=4.
        launcher: words before the command of each stage, such as srun in a SLURM job.

    Returns:
        0, or the exit status of the stage that failed.

    Raises:
        UsageError: stages or options name something that does not exist.
    """
    folder = Path(to.replace("{seed}", str(seed))).expanduser()
    with usage_errors():
        prefix = (*shlex.split(launcher), *PREFIX)
        read = read_stages(stages or {}, change)
        chosen = chosen_stages(read, only)
    return run_stages(read, chosen, folder, seed, prefix)


@dataclass(frozen=True)
class Stage:
    """One command of a chain, which writes to the subfolder of its name.

    Args:
        name: letters, digits and underscores.
        verb: fit, validate, test, predict or export.
        config: files as `--config` takes them; export has none.
        checkpoint: an earlier fit; its best checkpoint, else its last, is evaluated or exported.
        options: dotted name -> value. In a text, {NAME} stands for the folder of this or an
            earlier stage, and {seed} for the chain's seed.
        devices: value of trainer.devices; `None` leaves it to the config.
    """

    name: str
    verb: str
    config: tuple[str, ...] = ()
    checkpoint: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    devices: int | str | None = None

    @property
    def takes(self) -> list[str]:
        """The earlier stages whose output this stage reads."""
        names = [str(self.checkpoint)] if self.checkpoint else []
        names += [name for name in placeholders(self.options) if name not in (self.name, SEED)]
        return list(dict.fromkeys(names))

    def given(self, key: str) -> Any:
        """Return the value of a dotted key in the configs, or `None`."""
        return given_value([f"--config={find_config(name)}" for name in self.config], key)

    def arguments(self, folder: Path, seed: int, is_begun: bool = False) -> list[str]:
        """Return the words after `unisono` on the command line; `is_begun`: an earlier attempt was
        interrupted."""
        own, checkpoint = folder / self.name, None
        if self.checkpoint is not None:
            names = ("best.ckpt", "last.ckpt")
            best, last = (folder / self.checkpoint / "checkpoints" / name for name in names)
            checkpoint = best if best.exists() else last
        values = {name: str(folder / name) for name in (*self.takes, self.name)}
        options = {k: _filled(v, {**values, SEED: str(seed)}) for k, v in self.options.items()}
        if self.verb == "export":
            options = {k: v for k, v in options.items() if v is not None}  # export takes no null
            return [self.verb, str(checkpoint), *_written({"to": str(own), **options})]
        before: dict[str, Any] = {"trainer.default_root_dir": str(own), "seed_everything": seed}
        if self.devices is not None:
            before["trainer.devices"] = self.devices
        if self.verb == "fit" and is_begun:
            before["ckpt_path"] = "auto"
        elif checkpoint is not None:
            before["ckpt_path"] = str(checkpoint)
        files = [word for name in self.config for word in ("--config", name)]
        return [self.verb, *files, *_written({**before, **options})]


def read_stages(stages: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> list[Stage]:
    """Return the stages in order. `stages` maps their names to the values of a `Stage`, as in a
    YAML file; `changes`, in the same form, override them.

    Raises:
        ValueError: a name, a value or a reference is wrong.
    """
    if not stages or not isinstance(stages, Mapping):
        raise ValueError(
            "a chain needs stages; give the YAML of one with --config, whose key `stages` has "
            "NAME: {verb: fit, config: FILE} for each."
        )
    for name in changes or {}:
        if name not in stages:
            raise ValueError(f"--change.{name}: {_no_stage(name, list(stages))}")
    read: list[Stage] = []
    for name, values in stages.items():
        read.append(_stage(str(name), values, (changes or {}).get(name, {})))
        _check_stage(read, list(stages))
    return read


def chosen_stages(stages: list[Stage], only: list[str] | None) -> list[Stage]:
    """Return the stages named in `only`, or all of them.

    Raises:
        ValueError: there is no such stage.
    """
    names = [stage.name for stage in stages]
    for name in only or ():
        if name not in names:
            raise ValueError(f"--only={name}: {_no_stage(name, names)}")
    return [stage for stage in stages if only is None or stage.name in only]


def placeholders(value: Any) -> list[str]:
    """Return the names in braces of all texts in a value."""
    return PLACEHOLDER.findall(json.dumps(value, default=str))


def _stage(name: str, values: Any, changes: Any) -> Stage:
    if not NAME.fullmatch(name) or name in RESERVED:
        raise ValueError(
            f"a stage cannot be called `{name}`: a name has small letters, digits and underscores, "
            f"begins with a letter, and is none of {', '.join(RESERVED)}."
        )
    known = [f.name for f in fields(Stage) if f.name != "name"]
    for part in (values, changes):
        if not isinstance(part, Mapping) or not isinstance(part.get("options") or {}, Mapping):
            raise ValueError(
                f"stage {name} and its options must be mappings with keys such as verb and config, "
                f"got {part!r}."
            )
        for key in part:
            if key not in known:
                near = did_you_mean(near_names(str(key), known) or known)
                raise ValueError(f"stage {name} has the unknown key `{key}`.{near}")
    merged = {**values, **changes}
    options = {k: v for one in (values, changes) for k, v in flat(one.get("options") or {})}
    config = merged.get("config") or ()
    config = tuple(map(str, config if isinstance(config, list | tuple) else (config,)))
    return Stage(**{"verb": None, **merged, "name": name, "options": options, "config": config})


def _check_stage(read: Sequence[Stage], names: list[str]) -> None:
    """Refuse the last stage of `read` if it cannot run, or reads a stage that is not above it."""
    stage, verbs = read[-1], {other.name: other.verb for other in read}
    is_trainer, is_fit = stage.verb in TRAINER_VERBS, stage.verb == "fit"
    own = [option for option in OWN_OPTIONS if option in stage.options]
    missing = next((name for name in stage.takes if name not in verbs), None)
    needs_fit = stage.verb == "export" or stage.checkpoint is not None
    got = f"{stage.verb}.{did_you_mean(near_names(str(stage.verb), VERBS))}"
    has_devices = stage.devices is not None
    for is_wrong, what in (
        (stage.verb not in VERBS, f"verb must be one of {', '.join(VERBS)}, got {got}"),
        (is_trainer and not stage.config, f"{stage.verb} needs a config."),
        (not is_trainer and stage.config, f"{stage.verb} takes no config; leave it out."),
        (not is_trainer and has_devices, f"{stage.verb} runs on no devices; leave devices out."),
        (
            own,
            f"the option {', '.join(own)} is the chain's: each stage writes to the folder of its "
            "name in --to, and has the key `devices`.",
        ),
        (
            "ckpt_path" in stage.options and (is_fit or stage.checkpoint),
            "the option ckpt_path is the chain's own here; a fit begins with the weights of "
            "model.init_from, another stage with those of its checkpoint.",
        ),
        (missing and missing not in names, f"it takes {missing}; {_no_stage(missing, names)}"),
        (missing, f"it takes {missing}, which comes later; move {missing} up."),
        (
            is_fit and stage.checkpoint,
            "fit takes no checkpoint; to begin with its weights, set the option model.init_from.",
        ),
        (
            needs_fit and verbs.get(str(stage.checkpoint)) != "fit",
            f"checkpoint must name an earlier stage that trains, got {stage.checkpoint}.",
        ),
    ):
        if is_wrong:
            raise ValueError(f"stage {stage.name}: {what}")


def _no_stage(name: object, names: list[str]) -> str:
    near = did_you_mean(near_names(str(name), names))
    return f"there is no such stage.{near} The stages are {', '.join(map(str, names))}."


def _filled(value: Any, names: Mapping[str, str]) -> Any:
    """Return the value with the placeholders in its texts replaced by their values in `names`."""
    text = json.dumps(value, default=str)
    return json.loads(PLACEHOLDER.sub(lambda match: json.dumps(names[match[1]])[1:-1], text))


def _written(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in options.items()}
    return [f"--{name}={text}" for name, text in texts.items()]


def made_from(
    stage: Stage, folder: Path, seed: int, outputs: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the plain values that decide what a stage writes; the number of devices is not one.
    `outputs` maps each stage to the digest of its output, `None` until it is complete."""
    configs = {name: read_config(find_config(name)) for name in stage.config}
    values: dict[str, Any] = {
        "verb": stage.verb,
        "checkpoint": stage.checkpoint,
        **{f"the config {name}": content for name, content in configs.items()},
        **{f"the option {k}": v for k, v in stage.options.items() if k not in DEPLOYMENT},
    }
    of_configs = [pair for content in configs.values() for pair in flat(content)]
    options = {name.replace(".init_args", ""): value for name, value in of_configs} | stage.options
    for name, value in options.items():  # the files that it names, except outputs of stages
        if name.rpartition(".")[2] in NO_INPUTS:
            continue
        items = value if isinstance(value, list | tuple) else [value]
        texts = [v for v in items if isinstance(v, str) and set(placeholders(v)) <= {SEED}]
        if name.startswith("model."):  # patterns here match names of weights
            texts = [text for text in texts if not glob.has_magic(text)]
        paths = (p for text in texts for p in _paths(_filled(text, {SEED: str(seed)}), folder))
        digests = [_folder_digest(p, p) if p.is_dir() else file_digest(p) for p in paths]
        if digests:
            values[FILES + name] = digest_of(digests)
    if stage.verb in TRAINER_VERBS or SEED in placeholders(stage.options):
        values[SEED] = seed
    return values | {f"the output of {name}": outputs[name] for name in stage.takes}


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Return the record of a stage, {} if it never began: `made_from`, the plain values that decide
    its output, and `outputs`, the digest of that output, `None` until it is complete.
    """
    path = folder / RECORDS / f"{name}.json"
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def write_record(
    folder: Path, name: str, made_from: dict[str, Any], outputs: str | None = None
) -> None:
    """Write the record of a stage, whole or not at all."""
    record = json.dumps({"made_from": made_from, "outputs": outputs}, indent=2, default=str)
    write_whole(folder / RECORDS / f"{name}.json", record + "\n")


def state_of(stage: Stage, folder: Path, made: dict[str, Any]) -> State:
    """Return the state of a stage in the chain's folder; `made` is the current `made_from`.

    Raises:
        ValueError: the stage's folder holds files made from other values or by another program, or
            files that were changed since the stage was complete.
    """
    own, record = folder / stage.name, read_record(folder, stage.name)
    is_there = any(path.is_file() for path in own.rglob("*"))
    way_out = f"choose another --to, or delete {own} to make it anew"
    if not record:
        if is_there:
            raise ValueError(
                f"stage {stage.name} would write to {own}, which holds files of another origin; "
                f"{way_out}."
            )
        return "absent"
    # A file that did not exist then is no input: the stage itself may have written it.
    changed = changes(record["made_from"], made)
    differing = [n for n, old, _ in changed if not (old == ABSENT and n.startswith(FILES))]
    if differing and is_there:
        raise ValueError(
            f"stage {stage.name}: {own} was made from something else ({', '.join(differing[:3])}) "
            f"and is never overwritten; {way_out}."
        )
    if not differing and record["outputs"] is None:
        return "begun"
    if not is_there:
        return "absent"
    if outputs_digest(stage, folder) != record["outputs"]:
        raise ValueError(
            f"stage {stage.name}: the files in {own} were changed since it was complete; {way_out}."
        )
    return "complete"


def outputs_digest(stage: Stage, folder: Path) -> str:
    """Return the digest of the files that other stages may read: for a fit, its checkpoints."""
    own = folder / stage.name
    return _folder_digest(own / "checkpoints" if stage.verb == "fit" else own, own)


def _paths(text: str, chain: Path) -> list[Path]:
    """Return what exists of a path or pattern, except what the chain itself changes."""
    name, own = os.path.expanduser(text), chain.resolve()
    names = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
    resolved = [Path(match).resolve() for match in names if os.path.exists(match)]
    return [p for p in resolved if own not in (p, *p.parents) and p not in own.parents]


def _folder_digest(folder: Path, root: Path) -> str:
    """Return the digest of all files in a folder and of their paths relative to `root`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_of([[p.relative_to(root).as_posix(), file_digest(p)] for p in files])


def run_stages(
    stages: Sequence[Stage],
    chosen: Sequence[Stage],
    folder: Path,
    seed: int,
    prefix: Sequence[str] = PREFIX,
) -> int:
    """Run the chosen stages that are not complete, with commands that begin with `prefix`. Return 0
    or the exit status of the stage that failed.

    Raises:
        UsageError: the parser refuses an option of a later stage.
        ValueError: an output was made from other values, or a stage that is read is not complete.
    """
    if shutil.which(prefix[0]) is None:
        raise FileNotFoundError(f"--launcher: there is no {prefix[0]} here; leave it out.")
    states, outputs = check_outputs(stages, chosen, folder, seed)
    waiting = [stage for stage in chosen if states[stage.name] != "complete"]
    for stage in waiting[1:]:  # check their options now, not hours later
        if stage.given("model"):  # else it is the checkpoint's, which may not exist yet
            importlib.import_module("lit_models.cli").ParsedCLI(stage.arguments(folder, seed), True)
    for stage in chosen:
        if states[stage.name] == "complete":
            print(f"stage {stage.name} is complete: skipped", flush=True)
            continue
        own, is_begun = folder / stage.name, states[stage.name] == "begun"
        arguments = stage.arguments(folder, seed, is_begun)
        if is_begun and stage.verb != "fit":  # nothing is overwritten; predict goes on with parts
            for path in own.glob("*"):
                if path.suffix != ".parts":
                    remove(path)
        made = made_from(stage, folder, seed, outputs)
        write_record(folder, stage.name, made)
        own.mkdir(exist_ok=True)
        print(f"stage {stage.name}: unisono {shlex.join(arguments)}", flush=True)
        started = time.monotonic()
        status, received = run_process([*prefix, *arguments])
        seconds = time.monotonic() - started
        if status:
            what = "was stopped" if received else "failed"
            advice = "" if received else "mend what it names, and "
            say(
                f"stage {stage.name} {what} after {seconds:.0f} s with exit status {status}; "
                f"{advice}the same command goes on with it"
            )
            return status
        outputs[stage.name] = outputs_digest(stage, folder)
        write_record(folder, stage.name, made, outputs[stage.name])
        print(f"stage {stage.name} is complete, in {seconds:.1f} s", flush=True)
        if received:
            return 128 + received[0]
    return 0


def check_outputs(
    stages: Sequence[Stage], chosen: Sequence[Stage], folder: Path, seed: int
) -> tuple[dict[str, State], dict[str, str | None]]:
    """Check the chosen stages before any of them runs, so that none is refused hours later.

    Returns:
        Chosen stage -> its state; stage -> digest of its output, `None` where that is not complete
        or is to be written again.

    Raises:
        ValueError: as `run_stages`.
    """
    states: dict[str, State] = {}
    outputs: dict[str, str | None] = {}
    for stage in stages:
        outputs[stage.name] = read_record(folder, stage.name).get("outputs")
        if stage not in chosen:
            continue
        for name in stage.takes:
            if outputs[name] is None and name not in [other.name for other in chosen]:
                raise ValueError(
                    f"stage {stage.name} takes {name}, which is not complete in {folder}; run it "
                    "too: leave --only out."
                )
        state = state_of(stage, folder, made_from(stage, folder, seed, outputs))
        states[stage.name] = state
        if state != "complete":
            outputs[stage.name] = None
    return states, outputs


def run_process(command: Sequence[str]) -> tuple[int, list[int]]:
    """Run a command in its own process group, and kill what remains of the group afterwards.

    Signals that ask this process to end are forwarded to the whole group, as a terminal does;
    SIGHUP is forwarded as SIGTERM, on which a training saves. A job's script repeats SIGUSR1: once
    forwarded, it is ignored after the command has ended, while its output is checked.

    Returns:
        The exit status, 128 + N if signal N ended the command; the forwarded signals.
    """
    received: list[int] = []
    group: list[int] = []

    def pass_on(signum: int, frame: FrameType | None = None) -> None:
        received.append(signal.SIGTERM if signum == HANGUP else signum)
        for leader in group:
            _signal_group(leader, received[-1])

    signals = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]  # as under nohup
    before = {signum: signal.signal(signum, pass_on) for signum in signals}
    try:
        process = subprocess.Popen(command, start_new_session=True)
        group.append(process.pid)
        if received:  # while the command started
            _signal_group(process.pid, received[0])
        status = process.wait()
    finally:
        for leader in group:
            _signal_group(leader, KILL)
        for signum, handler in before.items():
            is_repeated = signum == USR1 and USR1 in received
            signal.signal(signum, signal.SIG_IGN if is_repeated else handler)
    return (status if status >= 0 else 128 - status), received


def _signal_group(leader: int, signum: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        getattr(os, "killpg", os.kill)(leader, signum)  # on Windows the leader alone
