"""Strategies by their plain names, on CPU and GPU alike: `ddp`, `ddp_spawn`, `fsdp`."""

from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, StrategyRegistry

from lit_models.training.strategies.fsdp import FullyShardedStrategy

__all__ = ["COLLECTIVE_TIMEOUT", "FullyShardedStrategy", "register"]

# A rank that waits so long for another waits for ever: the run ends instead of hanging.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def register() -> None:
    """Give the plain names their meaning here; Lightning's `fsdp` refuses the CPU by its name."""
    options = {"timeout": COLLECTIVE_TIMEOUT, "override": True}
    StrategyRegistry.register("ddp", DDPStrategy, **options)
    StrategyRegistry.register("ddp_spawn", DDPStrategy, start_method="spawn", **options)
    names = FSDPStrategy._registered_strategies
    if "fsdp" in names:
        names.remove("fsdp")
    StrategyRegistry.register("fsdp", FullyShardedStrategy, **options)
