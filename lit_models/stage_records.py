"""What is known of a stage that a chain has run: from what it was made, and whether it is whole.

A record is CHAIN/chain/STAGE.json. The digest of what a stage has written stands in the records of
those that take it, so that nothing of an older chain is taken for new.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from datamodules.cache import cache_root, digest_of, file_digest
from lit_models.config_files import find_config, read_config
from lit_models.stages import SEED, TRAINER_VERBS, Stage, placeholders

RECORDS = "chain"
State = Literal["absent", "begun", "complete"]


@dataclass
class Record:
    """Of one stage.

    Args:
        made_from: plain values that decide what comes out, see `made_from`.
        outputs: digest of all that it wrote; none before it is complete.
        seconds: that its last attempt took.
    """

    made_from: dict[str, Any]
    outputs: str | None = None
    seconds: float | None = None


def made_from(stage: Stage, seed: int, outputs: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the plain values that decide what a stage writes. The number of devices does not.

    Args:
        stage: any of the chain.
        seed: of the chain.
        outputs: stage -> digest of what it wrote, none if that is still to come.
    """
    uses_seed = stage.verb in TRAINER_VERBS or SEED in placeholders(stage.options)
    return {
        "verb": stage.verb,
        "checkpoint": stage.checkpoint,
        **{f"the config {name}": read_config(find_config(name)) for name in stage.config},
        **{f"the option {name}": value for name, value in stage.options.items()},
        **({SEED: seed} if uses_seed else {}),
        **{f"the output of {name}": outputs[name] for name in stage.takes},
    }


def read_record(folder: Path, name: str) -> Record | None:
    """Return the record of a stage in a chain's folder; none if it was never begun."""
    path = _path(folder, name)
    return Record(**json.loads(path.read_text("utf-8"))) if path.exists() else None


def write_record(folder: Path, name: str, record: Record) -> None:
    """Write the record of a stage, whole or not at all."""
    path = _path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(record), indent=2, default=str) + "\n", "utf-8")
    os.replace(partial, path)


def state_of(stage: Stage, folder: Path, made: dict[str, Any]) -> State:
    """Return how far a stage is.

    Args:
        stage: of the chain.
        folder: of the chain.
        made: what it would be made from now.

    Raises:
        ValueError: its folder holds what was made from something else, or by something else, or
            was changed since.
    """
    own, record = folder / stage.name, read_record(folder, stage.name)
    is_there = any(path.is_file() for path in own.rglob("*"))
    way_out = f"choose another --to, or delete {own} to make it anew"
    if record is None:
        if is_there:
            raise ValueError(
                f"stage {stage.name} would write to {own}, which holds files of another origin; "
                f"{way_out}."
            )
        return "absent"
    differing = _differences(record.made_from, made)
    if differing and is_there:
        raise ValueError(
            f"stage {stage.name}: {own} was made from something else ({', '.join(differing[:3])}) "
            f"and is never overwritten; {way_out}."
        )
    if differing or record.outputs is None:
        return "absent" if differing else "begun"
    if not is_there and record.outputs != digest_of([]):
        return "absent"
    if outputs_digest(stage, folder) != record.outputs:
        raise ValueError(
            f"stage {stage.name}: the files in {own} were changed since it was complete; {way_out}."
        )
    return "complete"


def outputs_digest(stage: Stage, folder: Path) -> str:
    """Return the digest of all that others can take from a stage: of a fit, the checkpoints."""
    own, root = folder / stage.name, cache_root()
    place = own / "checkpoints" if stage.verb == "fit" else own
    files = sorted(path for path in place.rglob("*") if path.is_file())
    return digest_of([[p.relative_to(own).as_posix(), file_digest(p, root)] for p in files])


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return in words what is not the same."""
    differing = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if _plain(old) == _plain(new):
            continue
        is_long = isinstance(old, dict) or isinstance(new, dict) or key.startswith("the output")
        differing.append(f"{key} is another" if is_long else f"{key} was {old}, is {new}")
    return differing


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)  # YAML also knows dates


def _path(folder: Path, name: str) -> Path:
    return folder / RECORDS / f"{name}.json"
