"""The stages of a chain: which command each one runs, and what it takes from those before it.

Torch-free: a chain is read and checked in well under a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lit_models.config_files import did_you_mean, find_config, flat, near_names

TRAINER_VERBS = ("fit", "validate", "test", "predict")
VERBS = (*TRAINER_VERBS, "export")
SEED = "seed"
RESERVED = (SEED, "chain")  # a placeholder, and the folder of the records
# A hyphen and a number would make it the later run of another stage.
NAME = re.compile(r"[a-z][a-z0-9_]*")
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
FOLDER_RULE = "each stage writes to the folder of its name; leave it out, or choose --to"
OWN_OPTIONS = {
    "trainer.default_root_dir": FOLDER_RULE,
    "to": FOLDER_RULE,
    "trainer.devices": "set the stage's `devices` instead",
}


@dataclass(frozen=True)
class Stage:
    """One command of a chain; its output goes to a folder of its name in the chain's.

    Args:
        name: letters, digits and underscores.
        verb: fit, validate, test, predict or export.
        config: files as `--config` takes them; export has none.
        checkpoint: an earlier fit whose best checkpoint, else its last, is evaluated or exported.
        options: dotted name -> value. In a text, {NAME} stands for the folder of this or an
            earlier stage, and {seed} for the chain's seed.
        devices: of the trainer, a number or what else it takes; none leaves it to the config.
    """

    name: str
    verb: str
    config: tuple[str, ...] = ()
    checkpoint: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    devices: int | str | None = None

    @property
    def takes(self) -> list[str]:
        """The earlier stages whose output it reads."""
        named = [self.checkpoint] if self.checkpoint else []
        named += [name for name in placeholders(self.options) if name not in (self.name, SEED)]
        return list(dict.fromkeys(named))

    def arguments(self, folder: Path, seed: int, is_begun: bool = False) -> list[str]:
        """Return what follows `unisono` on the command line.

        Args:
            folder: of the chain.
            seed: of the chain.
            is_begun: an earlier attempt was interrupted.
        """
        own, checkpoint = folder / self.name, self._checkpoint_path(folder)
        values = {name: str(folder / name) for name in (*self.takes, self.name)}
        options = {k: filled(v, {**values, SEED: str(seed)}) for k, v in self.options.items()}
        if self.verb == "export":
            again = {"overwrite": True} if is_begun else {}
            return [self.verb, str(checkpoint), *_written({"to": str(own), **again, **options})]
        before: dict[str, Any] = {"trainer.default_root_dir": str(own), "seed_everything": seed}
        if self.devices is not None:
            before["trainer.devices"] = self.devices
        if self.verb == "fit" and is_begun:
            before["ckpt_path"] = "auto"
        elif checkpoint is not None:
            before["ckpt_path"] = str(checkpoint)
        files = [word for name in self.config for word in ("--config", name)]
        return [self.verb, *files, *_written({**before, **options})]

    def _checkpoint_path(self, folder: Path) -> Path | None:
        if self.checkpoint is None:
            return None
        best, last = (
            folder / self.checkpoint / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")
        )
        return best if best.exists() else last


def read_stages(stages: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> list[Stage]:
    """Return the stages in their order.

    Args:
        stages: name -> the values of a `Stage`, as a YAML file has them.
        changes: name -> values that win over those.

    Raises:
        ValueError: a name, a value or a reference is wrong.
        FileNotFoundError: a config does not exist.
    """
    if not stages:
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
        _check_references(read[-1], [stage.name for stage in read], list(stages), read)
    return read


def chosen_stages(stages: list[Stage], start: str | None, only: list[str] | None) -> list[Stage]:
    """Return the stages from one on, or those named, or all.

    Raises:
        ValueError: there is no such stage.
    """
    names = [stage.name for stage in stages]
    for option, given in (("start", [start] if start else []), ("only", only or [])):
        for name in given:
            if name not in names:
                raise ValueError(f"--{option}={name}: {_no_stage(name, names)}")
    first = names.index(start) if start else 0
    return [s for s in stages[first:] if only is None or s.name in only]


def placeholders(value: Any) -> Iterator[str]:
    """Yield the names in braces of all texts in a value."""
    if isinstance(value, str):
        yield from PLACEHOLDER.findall(value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from placeholders(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from placeholders(inner)


def _stage(name: str, values: Any, changes: Any) -> Stage:
    if not NAME.fullmatch(name) or name in RESERVED:
        raise ValueError(
            f"a stage cannot be called `{name}`: a name has small letters, digits and underscores, "
            f"begins with a letter, and is none of {', '.join(RESERVED)}."
        )
    known = [f.name for f in fields(Stage) if f.name != "name"]
    for given in (values, changes):
        if not isinstance(given, Mapping):
            raise ValueError(
                f"stage {name} must be a mapping with keys such as verb and config, got {given!r}."
            )
        for key in given:
            if key not in known:
                near = did_you_mean(near_names(str(key), known))
                raise ValueError(
                    f"stage {name} has the key `{key}`, which there is not.{near} A stage has "
                    f"{', '.join(known)}."
                )
    merged = {**values, **changes}
    options = [given.get("options") or {} for given in (values, changes)]
    if not all(isinstance(given, Mapping) for given in options):
        raise ValueError(f"stage {name}: options must map names to values, got {options[-1]!r}.")
    merged["options"] = {k: v for given in options for k, v in flat(given)}
    config = merged.get("config") or ()
    merged["config"] = (config,) if isinstance(config, str) else tuple(config)
    stage = Stage(**{"verb": None, **merged, "name": name})
    _check_values(stage)
    return stage


def _check_values(stage: Stage) -> None:
    place, is_trainer = f"stage {stage.name}", stage.verb in TRAINER_VERBS
    if stage.verb not in VERBS:
        near = did_you_mean(near_names(str(stage.verb), VERBS))
        raise ValueError(
            f"{place}: verb must be one of {', '.join(VERBS)}, got {stage.verb}.{near}"
        )
    if is_trainer != bool(stage.config):
        rule = "needs a config" if is_trainer else "takes no config; leave it out"
        raise ValueError(f"{place}: {stage.verb} {rule}.")
    for name in stage.config:
        try:
            find_config(name)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{place}: {error}") from error
    if stage.devices is not None and not is_trainer:
        raise ValueError(f"{place}: {stage.verb} runs on no devices; leave devices out.")
    if isinstance(stage.devices, int) and (stage.devices is True or stage.devices < 1):
        raise ValueError(f"{place}: devices must be 1 or more, got {stage.devices}.")
    _check_options(stage, place)


def _check_options(stage: Stage, place: str) -> None:
    for option in stage.options:
        if option in OWN_OPTIONS:
            raise ValueError(f"{place}: the option {option} is the chain's: {OWN_OPTIONS[option]}.")
    if "ckpt_path" in stage.options and (stage.verb == "fit" or stage.checkpoint):
        raise ValueError(
            f"{place}: the option ckpt_path is the chain's own here; a fit begins with the weights "
            "of model.init_from, another stage with those of its checkpoint."
        )


def _check_references(stage: Stage, so_far: list[str], names: list[str], read: list[Stage]) -> None:
    """Refuse what a stage takes from no stage, or from a later one, so that none waits for itself.

    Args:
        stage: the last one that was read.
        so_far: names of those read, itself included.
        names: of all.
        read: all that were read.
    """
    place = f"stage {stage.name}"
    for name in (*placeholders(stage.options), *([stage.checkpoint] if stage.checkpoint else [])):
        if name in so_far or name == SEED:
            continue
        if name in names:
            raise ValueError(
                f"{place} takes {name}, which comes later; a stage takes from those above it: "
                f"move {name} up."
            )
        raise ValueError(f"{place} takes {name}: {_no_stage(name, names)}")
    if stage.verb in ("fit", "export") and (stage.verb == "export") != bool(stage.checkpoint):
        rule = "needs a checkpoint, the name of an earlier fit"
        if stage.verb == "fit":
            rule = "takes no checkpoint; to begin with its weights, set the option model.init_from"
        raise ValueError(f"{place}: {stage.verb} {rule}.")
    if stage.checkpoint:
        source = next(other for other in read if other.name == stage.checkpoint)
        if source.verb != "fit":
            raise ValueError(
                f"{place}: checkpoint must name a stage that trains, and {source.name} is a "
                f"{source.verb}."
            )


def _no_stage(name: str, names: list[str]) -> str:
    near = did_you_mean(near_names(str(name), names))
    return f"there is no such stage.{near} The stages are {', '.join(map(str, names))}."


def filled(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value in whose texts each placeholder is replaced by what stands for it."""
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda match: names[match[1]], value)
    if isinstance(value, Mapping):
        return {key: filled(inner, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [filled(inner, names) for inner in value]
    return value


def _written(options: Mapping[str, Any]) -> list[str]:
    """Return the options of a command line."""
    return [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in options.items()
    ]
