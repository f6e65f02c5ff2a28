"""What is known of a stage that a chain has run: from what it was made, and whether it is whole.

A record is CHAIN/chain/STAGE.json. The digest of what a stage has written stands in the records of
those that take it, so that nothing of an older chain is taken for new.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from datamodules.core.store import cache_root, digest_of, file_digest
from lit_models.config_files import find_config, read_config
from lit_models.stages import SEED, TRAINER_VERBS, Stage, filled, placeholders

RECORDS = "chain"
OPTION = "the option "
FILES = "the files of the option "
# Of more files in a folder, names and sizes stand for the content.
NUM_FILES_READ = 1000
# Options that decide nothing, as the number of devices.
DEPLOYMENT = ("trainer.num_nodes", "trainer.accelerator")
NO_INPUTS = ("predict_output", "save_dir", "dirpath")  # last parts of options where a run writes
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


def made_from(
    stage: Stage, folder: Path, seed: int, outputs: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the plain values that decide what a stage writes. The number of devices does not.

    Args:
        stage: any of the chain.
        folder: of the chain.
        seed: of the chain.
        outputs: stage -> digest of what it wrote, none if that is still to come.
    """
    uses_seed = stage.verb in TRAINER_VERBS or SEED in placeholders(stage.options)
    return {
        "verb": stage.verb,
        "checkpoint": stage.checkpoint,
        **{f"the config {name}": read_config(find_config(name)) for name in stage.config},
        **{f"{OPTION}{k}": v for k, v in stage.options.items() if k not in DEPLOYMENT},
        **_files_of_options(stage, folder, seed),
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
    if not is_there:
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


def remove_predictions(own: Path) -> None:
    """Remove what an interrupted prediction wrote, which it would not overwrite.

    Its hidden parts, with which it goes on, stay; links are neither followed nor removed.

    Args:
        own: the folder of the stage.
    """
    for place, folders, names in os.walk(own):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if not path.is_symlink():
                path.unlink()
    for place, *_ in os.walk(own, topdown=False):
        if Path(place) != own and not any(Path(place).iterdir()):
            Path(place).rmdir()


def _files_of_options(stage: Stage, folder: Path, seed: int) -> dict[str, str]:
    """Return name -> digest of the files that options name, those of the chain's stages aside."""
    found = {}
    for name, value in stage.options.items():
        if name.rpartition(".")[2] in NO_INPUTS:
            continue
        texts = [t for t in _texts(value) if set(placeholders(t)) <= {SEED}]
        named = [filled(text, {SEED: str(seed)}) for text in texts]
        digests = [_path_digest(path) for text in named for path in _paths(text, folder)]
        if digests:
            found[FILES + name] = digest_of(digests)
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _paths(text: str, chain: Path) -> list[Path]:
    """Return what is there of a path or pattern, unless the chain itself changes it."""
    name, own = os.path.expanduser(text), chain.resolve()
    if not text or "\0" in text:
        return []
    is_pattern = not os.path.exists(name) and glob.has_magic(name)
    names = sorted(glob.glob(name, recursive=True)) if is_pattern else [name]
    resolved = [Path(found).resolve() for found in names if os.path.exists(found)]
    return [p for p in resolved if own not in (p, *p.parents) and p not in own.parents]


def _path_digest(path: Path) -> str:
    if path.is_file():
        return file_digest(path, cache_root())
    files = sorted(inner for inner in path.rglob("*") if inner.is_file())
    is_read = len(files) <= NUM_FILES_READ
    return digest_of(
        [
            [p.relative_to(path).as_posix(), file_digest(p, cache_root()) if is_read else size]
            for p, size in ((inner, inner.stat().st_size) for inner in files)
        ]
    )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return in words what is not the same."""
    differing = []
    for key in dict.fromkeys([*before, *now]):
        if key.startswith(FILES) and key not in before:
            continue  # what was not there then is no input: the stage itself may have written it
        if key.removeprefix(OPTION) in DEPLOYMENT:
            continue  # in the record of an earlier version
        old, new = before.get(key), now.get(key)
        if _plain(old) == _plain(new):
            continue
        is_long = (
            isinstance(old, dict) or isinstance(new, dict) or key.startswith(("the output", FILES))
        )
        differing.append(f"{key} is another" if is_long else f"{key} was {old}, is {new}")
    return differing


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)  # YAML also knows dates


def _path(folder: Path, name: str) -> Path:
    return folder / RECORDS / f"{name}.json"
