"""Prove from the ledger that each sample was used exactly once."""

from pathlib import Path


def verify(run: Path) -> int:
    """Prove from the ledger and the plan that a run used each sample exactly once per epoch.

    Args:
        run: a run folder, such as runs/demo.
    """
    from rich.console import Console

    from lit_models.training.lineage import verify_run

    verdict = verify_run(Path(run))
    console = Console(highlight=False)
    worlds = ", ".join(str(size) for size in verdict.attempts)
    console.print(f"attempts          {len(verdict.attempts)} (devices: {worlds})")
    for lost in verdict.discarded:
        console.print(f"discarded         {lost} (repeated after the kill)")
    console.print(f"steps that count  {verdict.num_steps}, {verdict.num_samples} samples")
    if verdict.faults:
        for fault in verdict.faults[:10]:
            console.print(f"[red]fault[/red]             {fault}", soft_wrap=True)
        if len(verdict.faults) > 10:
            console.print(f"(+{len(verdict.faults) - 10} more)")
        return 1
    console.print(
        f"finished epochs   {verdict.finished_epochs}: each sample used exactly once in each"
    )
    return 0
