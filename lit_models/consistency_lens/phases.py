"""Which of the two networks learns at which step of a run."""

from datamodules.activations.dataset import TERMS
from lit_models.consistency_lens.loss import LensLosses
from lit_models.consistency_lens.terms import WARM

VERBALIZER_TERMS = frozenset(
    ("teacher_text", "reconstruction", "reference", "effect", "fluency", "entropy")
)
RECONSTRUCTOR_TERMS = frozenset(("teacher_reconstruction", "reconstruction", "effect"))


def leaves_one_idle(losses: LensLosses) -> bool:
    """Return whether there are steps in which one of the networks gets no gradient."""
    sets = [set(losses.at(step)) for step in _changes(losses)]
    speaking = VERBALIZER_TERMS - ({"effect"} if losses.group_size else set())  # see `group_terms`
    return not all(names & speaking and names & RECONSTRUCTOR_TERMS for names in sets)


def check_phases(losses: LensLosses, num_steps: int | None) -> None:
    """Refuse a run with steps that have nothing to learn.

    Args:
        losses: of the run.
        num_steps: optimizer steps of the run; none where it has no end.

    Raises:
        ValueError: no term counts at some step, the reference is asked for before it is kept, or a
            group of explanations has nothing to be compared by.
    """
    for step in _changes(losses):
        if num_steps is None or step < num_steps:
            _check_step(losses, step, num_steps)
    start, begin = losses.joint_start, losses.reference.begin
    if losses.reference.weight and (start is None or begin < start):
        when = "which they never do here" if start is None else f"at step {start}"
        raise ValueError(
            f"losses.reference begins at step {begin}, but the reference is kept when the two "
            f"networks begin to learn together, {when} (losses.reconstruction or losses.effect); "
            "let it begin there or later, or leave it out."
        )
    if losses.group_size and not losses.reconstruction.weight:
        raise ValueError(_no_reward(losses, "the run has none"))


def _check_step(losses: LensLosses, step: int, num_steps: int | None) -> None:
    names = set(losses.at(step))
    if not names:
        raise ValueError(
            f"no term of losses counts from step {step} on, and the run has "
            f"{'no end' if num_steps is None else f'{num_steps} steps'}; give a term a later "
            "end, or end the run there with trainer.max_steps."
        )
    own = sorted(names - set(WARM))
    if losses.group_size and own and "reconstruction" not in own:
        raise ValueError(_no_reward(losses, f"from step {step} on only {', '.join(own)} counts"))


def _no_reward(losses: LensLosses, finding: str) -> str:
    return (
        f"losses.group_size is {losses.group_size}: of a group of explanations the verbalizer "
        f"learns by losses.reconstruction alone, and {finding}; let reconstruction count wherever "
        "terms of its own words do, or set group_size to 0."
    )


def _changes(losses: LensLosses) -> list[int]:
    """Return the steps at which a term begins or ends, and the first."""
    terms = [getattr(losses, name) for name in TERMS]
    return sorted({0, *(t.begin for t in terms), *(t.end for t in terms if t.end is not None)})
