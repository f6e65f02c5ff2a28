"""The command `certify`, which compares runs of one configuration on several devices."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

import lightning
import torch

from datamodules.core.store import write_whole
from lit_models.certify.compare import (
    ASPECTS,
    BOUNDS,
    Comparison,
    Record,
    compare,
    first_difference,
    read_record,
)
from lit_models.cli import ParsedCLI
from lit_models.commands.verify import verify_run
from lit_models.config_files import expand_configs
from lit_models.engines.jobs import device_counts
from lit_models.errors import UsageError, say, usage_errors
from lit_models.run_files import LEDGER
from lit_models.training.run import code_facts, command_line

LEVELS = {
    "A": "the same run on any number of devices",
    "B": "every bit of the weights, by --exactness=bitwise",
    "C": "the same run after kills, each resumed on other devices",
}
STAGES = ("validation", "test", "prediction")
COLUMNS, NAME_WIDTH, CELL_WIDTH = 80, 21, 10  # of the table
LEAST_STEPS, LIMIT_S = 6, 600.0  # steps of a run; seconds of one start
LOG_WORDS = 60  # shown of a failed start
# Options override these, config files do not: only rounding may differ between runs.
DEFAULTS = ("--trainer.precision=64-true", "--trainer.accelerator=cpu")
# Variables of the launcher of this process, whose world has no part in the runs.
LAUNCHERS = ("RANK", "LOCAL_", "NODE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_")
PROBE = "lit_models.certify.probe"
World = tuple[int, str]  # devices and strategy
ONE: World = (1, "auto")


@dataclass
class Way:
    """One way to run the configuration, and how it differs from one device."""

    level: str
    worlds: tuple[World, ...]  # of each start; between starts the run is killed
    faults: list[str] = field(default_factory=list)  # of a start, or of the ledger
    proof: list[str] = field(default_factory=list)  # lines of the ledger's proof
    findings: list[Comparison] = field(default_factory=list)
    parted: str = ""  # where it differs first

    @property
    def name(self) -> str:
        """Its worlds in words, such as "2 ddp -> 1"."""
        return " -> ".join(f"{count} {name}".removesuffix(" auto") for count, name in self.worlds)

    @property
    def sentences(self) -> list[str]:
        """What differs; empty if it is the same run. Of samples, losses, norms and weights only the
        first that differs is named, because the others follow from it."""
        training, rest = self.findings[:4], self.findings[4:]
        shown = [finding for finding in training if finding.words][:1] + rest
        words = [f"{finding.aspect}: {word}" for finding in shown for word in finding.words]
        return [*self.faults, *words, *([self.parted] if self.parted else [])]


def certify(
    run_options: list[str] | None = None,
    *,
    devices: str = "1,2",
    strategies: str = "ddp,fsdp",
    levels: str = "A,C",
    steps: int = 12,
    to: Path | None = None,
) -> int:
    """Run a configuration on several devices, also killed and resumed, and compare the runs.

    Samples, losses, gradient norms, weights, metrics and files of predictions are compared. Unless
    options say otherwise, the runs use float64 on CPUs, where only rounding may differ. The module
    and its data may be plain Lightning. Your own run folders are not touched.

    Args:
        run_options: options of `unisono fit`, such as --config mine.yaml.
        devices: numbers of devices, such as 1,2,3; each is compared with one.
        strategies: strategies for several devices, such as ddp,fsdp,ddp_spawn.
        levels: A: any devices; B: every bit; C: kills, each resumed on other devices.
        steps: optimizer steps of each run.
        to: new folder for certificate.md and .json and the runs; by default certificates/NAME.

    Returns:
        0 if all is the same, else 1.

    Raises:
        UsageError: an option is not valid.
        RuntimeError: the configuration does not run on one device.
    """
    if not set(levels.split(",")) <= LEVELS.keys():
        raise UsageError(f"--levels must be some of {','.join(LEVELS)}, got {levels}.")
    if steps < LEAST_STEPS:
        raise UsageError(f"--steps must be {LEAST_STEPS} or more, got {steps}: kills take some.")
    several = sorted(set(device_counts(devices)) - {1})
    worlds = [(count, name) for count in several for name in strategies.split(",")]
    most = [world for world in worlds if world[0] == worlds[-1][0]] or [ONE]
    of_level: dict[str, list[tuple[World, ...]]] = {
        "A": [(world,) for world in worlds],
        "B": [((n, name),) for n, name in worlds if n.bit_count() == 1 and name != "fsdp"],
        "C": [(most[0], ONE, most[-1])],
    }
    ways = [Way(level, way) for level in sorted(set(levels.split(","))) for way in of_level[level]]
    if not ways or ("B" in levels and not of_level["B"]):
        raise UsageError(
            f"--devices={devices} --strategies={strategies} leave --levels={levels} nothing to "
            "compare: add 2 devices; B takes 2, 4, 8, … of them, and ddp or ddp_spawn."
        )
    trial = Trial(run_options or [], steps, to)
    for signum in (signal.SIGINT, signal.SIGTERM):  # exits, which ends the ranks, too
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
    for way in ways:
        trial.judge(way)
    facts, lines = trial.facts(ways), table(ways)
    write_whole(trial.folder / "certificate.json", json.dumps(facts, indent=1) + "\n")
    write_whole(trial.folder / "certificate.md", page(facts, lines))
    print("\n".join([*lines, f"written to {trial.folder / 'certificate.md'}, and as .json"]))
    return 0 if facts["is_same"] else 1


def table(ways: list[Way]) -> list[str]:
    """Return lines of 80 columns: for each level and way what is the same, and what is not."""
    heads = "".join(f"{aspect:<{CELL_WIDTH}}" for aspect in ASPECTS)
    lines, level = [], ""
    for way in ways:
        if way.level != level:
            level = way.level
            lines += [f"{level}: {LEVELS[level]}", (" " * NAME_WIDTH + heads).rstrip()]
        cells = "".join(f"{finding.cell:<{CELL_WIDTH}}" for finding in way.findings)
        lines.append(f"{way.name:<{NAME_WIDTH}}{cells or 'did not run'}".rstrip())
        for sentence in way.sentences:
            text = f"  {sentence}"
            lines += wrap(text, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
    return lines


def page(facts: dict[str, Any], lines: list[str]) -> str:
    """Return a certificate in Markdown."""
    proofs = [f"- {w['name']}: {'; '.join(w['proof'])}" for w in facts["ways"] if w["proof"]]
    rows = [f"| {name} | {facts[name]} |" for name in ("date", "hardware", "versions", "bounds")]
    parts = [
        f"# {facts['name']}: {'the same run' if facts['is_same'] else 'NOT the same run'}",
        f"```bash\n{facts['command']}\n```",
        "\n".join(["| | |", "|---|---|", *rows]),
        "\n".join(["```text", *lines, "```"]),
        "Numbers are the largest distances from one device, relative to its own; `NOT` is beyond "
        "the bound, `-` was not there.",
        *(["What the ledgers prove:\n\n" + "\n".join(proofs)] if proofs else []),
        *(f"Left out: {stage}: {why}" for stage, why in facts["left out"].items()),
    ]
    return "\n\n".join(parts) + "\n"


class Trial:
    """The runs of one certificate, all with these options and this number of steps, in the folder
    `to`; `None` is certificates/NAME."""

    def __init__(self, options: list[str], steps: int, to: Path | None) -> None:
        with usage_errors():
            options = expand_configs(options)
        files = [word for word in options if word.startswith("--config=")]
        named = {word.partition("=")[0] for word in options}
        defaults = [word for word in DEFAULTS if word.partition("=")[0] not in named]
        place = len(options) - options[::-1].index(files[-1]) if files else 0  # overrides files
        self.options = [*options[:place], *defaults, *options[place:]]
        values = ParsedCLI(["fit", *self.options]).values
        if "predict_output" in values["data"].get("init_args", {}):
            self.options.append("--data.predict_output=null")  # not to the user's file
        precision = str(values["trainer"]["precision"])
        self.bounds = BOUNDS.get(precision.removesuffix("-true"), BOUNDS["16"])
        self.about, self.steps = f"{steps} steps in {precision}", steps
        self.name = Path(files[0].partition("=")[2]).stem if files else "options"
        self.folder = to or Path("certificates") / self.name
        if self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(f"{self.folder} is not empty; name a new folder with --to.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.references: dict[str, Record] = {}  # run folder on one device -> its record
        self.stages: list[str] | None = None  # evaluations that can be run, once they are known

    def judge(self, way: Way) -> None:
        """Run one way and compare it with one device."""
        one, folder = self.folder_of(Way(way.level, (ONE,))), self.folder_of(way)
        if one.name not in self.references:
            if fault := self.run(Way(way.level, (ONE,)), one):
                raise RuntimeError(f"the configuration does not run on one device: {fault}")
            self.references[one.name] = read_record(one)
            self.stages = [s for s in STAGES if s not in self.references[one.name]["left out"]]
        reference = self.references[one.name]
        if fault := self.run(way, folder):
            way.faults.append(fault)
            return
        bounds = self.bounds | ({"weights": 0.0} if way.level == "B" else {})
        way.findings = compare(reference, read_record(folder), bounds)
        if (folder / LEDGER).exists():
            proof = verify_run(folder)
            way.faults, way.proof = proof.faults, [": ".join(line) for line in proof.epoch_lines()]
        steps = {each.aspect: each.step for each in way.findings if each.step is not None}
        if steps:
            way.parted = self.parted(way, min(steps.values()), steps)

    def parted(self, way: Way, step: int, steps: dict[str, int]) -> str:
        """Return where a way differs first, found by running that step again with hooks."""
        if steps.get("samples") == step:
            return f"parted first in step {step}, by its samples"
        pair = (Way(way.level, (ONE,)), way)
        one, other = (self.folder / f"step-{step}" / self.folder_of(part).name for part in pair)
        for part, folder in zip(pair, (one, other), strict=True):
            if not folder.exists() and (fault := self.run(part, folder, step)):
                return f"parted first in step {step}; {fault}"
        place = first_difference(one, other, max(self.bounds.values()))
        if steps.get("losses") == step and not place.startswith(("the weight", "the output")):
            place = "the loss of equal outputs: a mean of the devices' means is not the mean of all"
        return f"parted first in step {step}: {place or 'what is not on tape'}"

    def folder_of(self, way: Way) -> Path:
        """Return the run folder of a way; levels A and C share the run on one device."""
        level = way.level if way.level == "B" or way.worlds != (ONE,) else "A"
        return self.folder / f"{level} {way.name}".replace(" -> ", " ").replace(" ", "-")

    def run(self, way: Way, folder: Path, look_at: int | None = None) -> str:
        """Run a way to its end, and return what went wrong, "" if nothing did."""
        begun, last, log = time.monotonic(), len(way.worlds), folder.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        for number, (devices, strategy) in enumerate(way.worlds, 1):
            kill_after = self.steps * number // last + 1 if number < last else None
            probe = {"attempt": number, "kill_after": kill_after, "look_at": look_at}
            words = [
                *self.options,
                f"--trainer.default_root_dir={folder}",
                *(f"--trainer.max_steps={self.steps}", "--trainer.max_epochs=-1"),
                *(f"--trainer.devices={devices}", f"--trainer.strategy={strategy}"),
                *("--trainer.num_nodes=1", "--trainer.enable_progress_bar=false"),
                *("--test_after_fit=false", f"--ckpt_path={'null' if number == 1 else 'auto'}"),
                *(["--exactness=bitwise"] if way.level == "B" else []),
                f"--trainer.callbacks+={PROBE}.Probe",
                *(f"--trainer.callbacks.{name}={json.dumps(v)}" for name, v in probe.items()),
                f"--trainer.callbacks.stages={json.dumps(self.stages)}",
            ]
            status = ran([sys.executable, "-m", PROBE, "fit", *words], log)
            is_killed = status and any((folder / "checkpoints").glob("*.ckpt"))  # even in a save
            if status if number == last else not is_killed:
                tail = log.read_text("utf-8", "replace").rpartition("error: ")[2].split()
                ends = " ".join(tail[-LOG_WORDS:])
                return f"start {number} ended with status {status}, {log} with: {ends}"
        say(f"{way.name}: {time.monotonic() - begun:.0f} s")
        return ""

    def facts(self, ways: list[Way]) -> dict[str, Any]:
        """Return the certificate as plain values."""
        code, path = code_facts(), Path("/proc/cpuinfo")  # Linux alone has it
        names = re.findall("model name.*: (.+)", path.read_text("utf-8") if path.exists() else "")
        gpus = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
        bounds = ", ".join(f"{aspect} {bound:g}" for aspect, bound in self.bounds.items())
        return {
            "name": self.name,
            "is_same": not any(way.sentences for way in ways),
            "command": command_line(),
            "date": datetime.now(UTC).isoformat(" ", "seconds"),
            "hardware": ", ".join([f"{os.cpu_count()} x {[*names, platform.machine()][0]}", *gpus]),
            "versions": f"unisono {code['version']} ({code['digest']}), torch {torch.__version__}, "
            f"lightning {lightning.__version__}, Python {platform.python_version()}",
            "bounds": f"{self.about}: {bounds}",
            "left out": next(iter(self.references.values()))["left out"],
            "ways": [
                {
                    **{"level": way.level, "name": way.name, "sentences": way.sentences},
                    **{"proof": way.proof, **{f.aspect: f.cell for f in way.findings}},
                }
                for way in ways
            ],
        }


def ran(command: list[str], log: Path) -> int:
    """Run a command, append its output to `log`, kill what is left of its processes, and return the
    exit status; a command that takes longer than LIMIT_S is killed."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    environ = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **environ}  # ranks share cores
    with log.open("ab") as file:
        outputs: Any = {"stdout": file, "stderr": file}
        process = subprocess.Popen(command, env=environ, start_new_session=True, **outputs)
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        with log.open("a") as file:
            file.write(f"it took more than {LIMIT_S:.0f} s\n")
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    return status
