"""Launchers that may start a run again in another world."""

import importlib

from lit_models.config_files import one_word_each
from lit_models.errors import UsageError


def launch(argv: list[str]) -> int:
    """Run fit, validate, test or predict on the engine that `--engine` names; return the status.

    Raises:
        UsageError: there is no such engine, or what it needs is not installed.
    """
    given = [word for word in one_word_each(argv) if word.startswith("--engine")]
    named = {word for word in given if word.startswith("--engine=")}
    if named != {"--engine=ray"}:
        raise UsageError(f"{' '.join(named) or given[0]}: the only engine is --engine=ray.")
    return int(importlib.import_module("lit_models.engines.on_ray").launch(argv))
