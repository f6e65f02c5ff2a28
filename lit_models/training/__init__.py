"""Shared by all families; `status(trainer)` says what runs where."""

from typing import Any

__all__ = ["status"]


def __getattr__(name: str) -> Any:
    if name == "status":  # imported when first named: `unisono --help` needs no torch
        from lit_models.training.run_facts import status

        return status
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
