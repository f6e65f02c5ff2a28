"""Launchers that may restart a run in another world, and the options that they decide."""

import importlib
import os
from collections.abc import Mapping

from lit_models.config_files import given_value, one_word_each
from lit_models.errors import UsageError

AUTO = "--trainer.num_nodes=auto"
BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # for a rank without a launcher


def launch(argv: list[str]) -> int:
    """Run fit, validate, test or predict on the engine that `--engine` names; return the status.

    Raises:
        UsageError: the engine is unknown or not installed.
    """
    words = [word for word in one_word_each(argv) if word.startswith("--engine")]
    engines = {word for word in words if word.startswith("--engine=")}
    if engines != {"--engine=ray"}:
        raise UsageError(f"{' '.join(engines) or words[0]}: the only engine is --engine=ray.")
    return int(importlib.import_module("lit_models.engines.on_ray").launch(argv))


def in_launched_world(argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Returns a command line with trainer.num_nodes and devices of its launcher's world where they
    are not given or `auto`: under torchrun, which may restart the same command in another world,
    and under SLURM if num_nodes is `auto`. Without a launcher, `auto` is one node."""
    options = {name: given_value(argv, f"trainer.{name}") for name in ("num_nodes", "devices")}
    is_auto = options["num_nodes"] == "auto"
    argv = [word for word in argv if word != AUTO]  # the parser takes numbers alone
    world = {"num_nodes": 1} if is_auto else {}
    if "TORCHELASTIC_RUN_ID" in environ:
        on_node = int(environ["LOCAL_WORLD_SIZE"])
        world = {"num_nodes": int(environ["WORLD_SIZE"]) // on_node, "devices": on_node}
    elif is_auto and "SLURM_STEP_ID" in environ:
        nodes = int(environ.get("SLURM_NNODES") or 1)
        world = {"num_nodes": nodes, "devices": int(environ["SLURM_NTASKS"]) // nodes}
    missing = [name for name in world if options[name] in (None, "auto")]
    return argv + [f"--trainer.{name}={world[name]}" for name in missing]


def complete_rendezvous(environ: dict[str, str] | os._Environ[str], num_nodes: int) -> None:
    """Adds LOCAL_RANK and NODE_RANK for a rank that was started by hand with only RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT; each node has equally many ranks.

    Raises:
        ValueError: a variable is missing, or the numbers contradict each other.
    """
    is_launched = "LOCAL_RANK" in environ or "SLURM_NTASKS" in environ
    if "RANK" not in environ or is_launched or environ.get("WORLD_SIZE") == "1":
        return
    values = {name: environ.get(name) for name in BY_HAND}
    rank, world_size = int(environ["RANK"]), int(environ.get("WORLD_SIZE") or 0)
    if not all(values.values()) or rank >= world_size or world_size % num_nodes:
        raise ValueError(
            f"a rank started by hand needs {', '.join(BY_HAND)}, with ranks from 0 and equally "
            f"many on each of {num_nodes} node(s); got "
            f"{' '.join(f'{name}={value}' for name, value in values.items())}. Correct them, or "
            "unset RANK."
        )
    environ["NODE_RANK"], environ["LOCAL_RANK"] = map(str, divmod(rank, world_size // num_nodes))
