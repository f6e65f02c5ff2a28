"""Which of the two networks learns at which step of a run."""

from datamodules.activations.dataset import TERMS
from lit_models.consistency_lens.loss import LensLosses

VERBALIZER_TERMS = frozenset(
    ("teacher_text", "reconstruction", "reference", "effect", "fluency", "entropy")
)
RECONSTRUCTOR_TERMS = frozenset(("teacher_reconstruction", "reconstruction", "effect"))


def leaves_one_idle(losses: LensLosses) -> bool:
    """Return whether there are steps in which one of the networks gets no gradient."""
    sets = [set(losses.at(step)) for step in _changes(losses)]
    return not all(names & VERBALIZER_TERMS and names & RECONSTRUCTOR_TERMS for names in sets)


def check_phases(losses: LensLosses, num_steps: int | None) -> None:
    """Refuse a run with steps that have nothing to learn.

    Args:
        losses: of the run.
        num_steps: optimizer steps of the run; none where it has no end.

    Raises:
        ValueError: no term counts at some step, or the reference is asked for before it is kept.
    """
    for step in _changes(losses):
        if not losses.at(step) and (num_steps is None or step < num_steps):
            raise ValueError(
                f"no term of losses counts from step {step} on, and the run has "
                f"{'no end' if num_steps is None else f'{num_steps} steps'}; give a term a later "
                "end, or end the run there with trainer.max_steps."
            )
    begin = losses.reference.begin
    if losses.reference.weight and begin < losses.joint_start:
        raise ValueError(
            f"losses.reference begins at step {begin}, but the reference is kept when the two "
            f"networks begin to learn together, at step {losses.joint_start} "
            "(losses.reconstruction.begin); let it begin there or later."
        )


def _changes(losses: LensLosses) -> list[int]:
    """Return the steps at which a term begins or ends, and the first."""
    terms = [getattr(losses, name) for name in TERMS]
    return sorted({0, *(t.begin for t in terms), *(t.end for t in terms if t.end is not None)})
