"""The run's own parser reads a job's command line before the job waits for its machines."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from lit_models import config_files
from lit_models.cli import ParsedCLI
from lit_models.errors import UsageError
from lit_models.training import rules
from lit_models.training.run_folder import Run


class ParsedStage(ParsedCLI):
    """The same for a stage whose beginning an earlier one has still to write."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(self.argv)


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
        argv = [argv[0], *config_files.expand_configs(argv[1:])]
        parsed = (ParsedStage if is_stage else ParsedCLI)(argv, Run("runs"))
        config: Any = parsed.config[argv[0]]
        settings = rules.settings_of(config)
        world = {"SLURM_NTASKS": str(processes)}
        rules.check_strategy(settings.strategy, _strategies())
        rules.check_world(processes, settings.strategy, world, [])
        rules.check_batch(settings, processes)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def _strategies() -> list[str]:
    from lightning.pytorch.strategies import StrategyRegistry

    return StrategyRegistry.available_strategies()
