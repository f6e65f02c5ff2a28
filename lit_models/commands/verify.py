"""Prove from the ledger which samples a run used."""

from pathlib import Path

SHOWN_FINDINGS = 10


def verify(run: Path) -> int:
    """Hold a run's ledger, plan and checkpoints against each other: each sample used once?

    Exit status: 0 proven, every epoch whole; 3 an epoch is cut, or the run has no end; 4 steps
    were skipped; 5 steps are missing; 6 a step is there twice; 7 a step used other
    samples or targets than planned; 8 the ledger was edited; 9 a checkpoint is not the ledger's.

    Args:
        run: a run folder, such as runs/demo.
    """
    from rich.console import Console

    from lit_models.training.lineage import Status, verify_run

    proof = verify_run(Path(run))
    console = Console(highlight=False, soft_wrap=True)
    worlds = ", ".join(str(size) for size in proof.attempts)
    lines = [("attempts", f"{len(proof.attempts)} (devices: {worlds})")]
    lines += [("discarded", f"{lost} (repeated after the kill)") for lost in proof.discarded]
    lines.append(("in the weights", f"{proof.num_steps:,} steps, {proof.num_samples:,} samples"))
    if proof.checkpoints:
        lines.append(("checkpoints", f"{', '.join(proof.checkpoints)}: the ledger's"))
    # A count of samples that are not the plan's would say nothing.
    if proof.status <= Status.NOT_APPLIED:
        lines += proof.epoch_lines()
    for label, text in lines:
        console.print(f"{label:<17} {text}")
    for finding in proof.findings[:SHOWN_FINDINGS]:
        word = "not whole" if finding.status is Status.CUT else "fault"
        console.print(f"[red]{word}[/red]{' ' * (17 - len(word))} ", end="")
        console.print(finding.text, markup=False)
    if len(proof.findings) > SHOWN_FINDINGS:
        console.print(f"(+{len(proof.findings) - SHOWN_FINDINGS} more)")
    if proof.findings:
        console.print(f"status            {proof.status:d} ({proof.status.name.lower()})")
    return int(proof.status)
