"""The run's own parser reads a job's command line before the job waits for its machines."""

from __future__ import annotations

from lit_models.cli import parsed_options
from lit_models.errors import UsageError
from lit_models.training import rules


def check_run(argv: list[str], processes: int, is_stage: bool = False) -> None:
    """Refuse a command line that the job would be refused for.

    Args:
        argv: the verb and its options.
        processes: of the job, on all machines.
        is_stage: files of earlier stages may be missing.

    Raises:
        UsageError: the parser refuses it, or the strategy or the batch do not fit the job.
    """
    try:
        settings = rules.settings_of(parsed_options(argv, is_stage=is_stage))
        world = {"SLURM_NTASKS": str(processes)}
        rules.check_strategy(settings.strategy, _strategies())
        rules.check_world(processes, settings.strategy, world, [])
        rules.check_batch(settings, processes)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def _strategies() -> list[str]:
    from lightning.pytorch.strategies import StrategyRegistry

    return StrategyRegistry.available_strategies()
