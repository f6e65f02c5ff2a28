"""Strategies by their names, on CPU and GPU alike: `ddp`, `ddp_spawn`, `fsdp`."""

from datetime import timedelta

from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry

from lit_models.training.strategies.ddp import ReplicatedStrategy
from lit_models.training.strategies.fsdp import FullyShardedStrategy

__all__ = [
    "COLLECTIVE_TIMEOUT",
    "FullyShardedStrategy",
    "ReplicatedStrategy",
    "register",
]

# A rank that waits so long for another waits for ever: the run ends instead of hanging.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
START_METHODS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}


def register() -> None:
    """Give the plain names their meaning here; Lightning's `fsdp` refuses the CPU by its name."""
    options = {"timeout": COLLECTIVE_TIMEOUT, "override": True}
    for name, start_method in START_METHODS.items():
        replicated = {**options, "start_method": start_method}
        StrategyRegistry.register(name, ReplicatedStrategy, **replicated)
        for finds in (True, False):
            longer = f"{name}_find_unused_parameters_{str(finds).lower()}"
            replicated["find_unused_parameters"] = finds
            StrategyRegistry.register(longer, ReplicatedStrategy, **replicated)
    names = FSDPStrategy._registered_strategies
    if "fsdp" in names:
        names.remove("fsdp")
    StrategyRegistry.register("fsdp", FullyShardedStrategy, **options)
