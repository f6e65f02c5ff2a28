"""Loss of the lens: its terms, their schedules, and the text of the teacher.

Shapes: B samples, D features, T tokens, t words, K explanations of a group, P places of a
document, V vocabulary.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, arange, no_grad

from datamodules.activations.dataset import TERMS
from datamodules.core.batches import ActivationBatch
from lit_models.consistency_lens.lens import Explanation, Lens, precise
from lit_models.consistency_lens.subject import PatchedSubject
from lit_models.training.dropout import mixed


@dataclass(frozen=True)
class LossWeight:
    """Weight of one term of the loss. Units of all steps: optimizer steps of the run.

    Args:
        weight: while the term counts.
        begin: first step at which it does.
        end: first step at which it does no more; none for the end of the run.
        warmup: steps after `begin` in which it grows from 0.

    Raises:
        ValueError: one is negative, or the end is not after the beginning.
    """

    weight: float = 0.0
    begin: int = 0
    end: int | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        if min(self.weight, self.begin, self.warmup) < 0:
            raise ValueError(
                f"weight, begin and warmup of a loss must be 0 or more, got {self.weight}, "
                f"{self.begin} and {self.warmup}."
            )
        if self.end is not None and self.end <= self.begin:
            raise ValueError(
                f"a loss from step {self.begin} on cannot end at step {self.end}; give a later "
                "end, or weight 0 to leave it out."
            )

    def at(self, step: int) -> float:
        """Return the weight at an optimizer step, from 0."""
        if step < self.begin or (self.end is not None and step >= self.end):
            return 0.0
        if self.warmup:
            return self.weight * min(1.0, (step - self.begin + 1) / self.warmup)
        return self.weight


@dataclass(frozen=True)
class TemperatureSchedule:
    """Temperature of the choice of words, which falls in a straight line.

    Args:
        start: at step `begin` and before.
        end: at step `until` and after.
        begin: optimizer step.
        until: optimizer step.

    Raises:
        ValueError: a temperature is not above 0, or the steps are in the wrong order.
    """

    start: float = 1.0
    end: float = 0.5
    begin: int = 0
    until: int = 1000

    def __post_init__(self) -> None:
        if min(self.start, self.end) <= 0:
            raise ValueError(
                f"temperatures must be above 0, got {self.start} and {self.end}; usual is 1 to 0.5."
            )
        if not 0 <= self.begin < self.until:
            raise ValueError(
                f"temperature.begin {self.begin} must be 0 or more and below temperature.until "
                f"{self.until}."
            )

    def at(self, step: int) -> float:
        """Return the temperature at an optimizer step, from 0."""
        share = min(1.0, max(0.0, (step - self.begin) / (self.until - self.begin)))
        return self.start + (self.end - self.start) * share


SMALL_DEVIATION = 1e-4  # of errors in units of the variance: below, they are as good as equal
MAX_NATS = 50.0  # by which a word is improbable: an impossible one must not outweigh all others
JOINT = ("reconstruction", "effect")  # terms from which both networks learn together


@dataclass(frozen=True)
class LensLosses:
    """Weights of the terms, each over the optimizer steps of the run.

    Args:
        teacher_text: nats per word of the teacher's text, given the activation (warm start).
        teacher_reconstruction: squared error of what is rebuilt from the teacher's text.
        reconstruction: squared error of what is rebuilt from the verbalizer's own words.
        reference: nats per word by which the verbalizer's choices leave those of the reference.
        effect: nats by which the subject's next words change with the rebuilt activation, mean
            over its position and up to 8 that follow it.
        fluency: nats per word by which the choices leave those of the subject as a language model.
        entropy: nats per word of the verbalizer's choices; a positive weight makes them surer.
        group_size: explanations drawn for each activation, of which the verbalizer learns by a
            policy gradient; 0 lets the gradient pass through the words (straight-through).
    """

    teacher_text: LossWeight = LossWeight()
    teacher_reconstruction: LossWeight = LossWeight()
    reconstruction: LossWeight = LossWeight()
    reference: LossWeight = LossWeight()
    effect: LossWeight = LossWeight()
    fluency: LossWeight = LossWeight()
    entropy: LossWeight = LossWeight()
    group_size: int = 0

    def __post_init__(self) -> None:
        assert tuple(field.name for field in fields(self)) == (*TERMS, "group_size")
        if self.group_size == 1 or self.group_size < 0:
            raise ValueError(
                f"losses.group_size must be 0 or at least 2, got {self.group_size}: an explanation "
                "is worth more or less than others of its group; usual is 4 to 16."
            )
        if not any(getattr(self, name).weight for name in TERMS):
            raise ValueError(
                "every weight of losses is 0, so there is nothing to learn; give one, such as "
                "losses.reconstruction.weight 1."
            )

    def at(self, step: int) -> dict[str, float]:
        """Return the terms that count at an optimizer step, with their weights."""
        weights = {name: term.at(step) for name, term in self._given.items()}
        return {name: weight for name, weight in weights.items() if weight}

    @cached_property
    def _given(self) -> dict[str, LossWeight]:
        """The terms that have a weight at any step."""
        terms = {name: getattr(self, name) for name in TERMS}
        return {name: term for name, term in terms.items() if term.weight}

    @cached_property
    def joint_start(self) -> int | None:
        """First step at which the verbalizer's own words are rebuilt; none where they never are."""
        terms = [getattr(self, name) for name in JOINT]
        return min((term.begin for term in terms if term.weight), default=None)


def squared_error(rebuilt: Tensor, activation: Tensor, variance: Tensor) -> Tensor:
    """Return [B]: mean square over features, in units of the training part's variance."""
    return (precise(rebuilt) - precise(activation)).square().mean(-1) / variance


def text_nats(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return [B]: mean nats of the words of a text. Args: logits [B, t, V], token_ids [B, t]."""
    return F.cross_entropy(logits.mT, token_ids, reduction="none").mean(-1)


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """Return [B]: mean over words of KL(softmax(logits) || softmax(other)), both [B, t, V].

    What `other` says of a word is cut off, and not the sum: its gradient must not vanish where the
    two differ most.
    """
    own = logits.log_softmax(-1)
    against = other.log_softmax(-1).clamp(min=-MAX_NATS)
    return (own.exp() * (own - against)).sum(-1).mean(-1)


def advantages(rewards: Tensor) -> Tensor:
    """Return [B, K]: by how many deviations of its group [B, K] each reward is above the mean; 0 in
    a group of equals."""
    away = rewards - rewards.mean(1, keepdim=True)
    deviation = away.square().mean(1, keepdim=True).sqrt()
    return away / deviation.clamp(min=SMALL_DEVIATION)


def entropy(logits: Tensor) -> Tensor:
    """Return [B]: mean nats of the choices, logits [B, t, V]."""
    own = logits.log_softmax(-1)
    return -(own.exp() * own).sum(-1).mean(-1)


def effect(true: Tensor, changed: Tensor, counts: Tensor) -> Tensor:
    """Return [B]: mean over the places that count of KL(true || changed).

    Args:
        true: [B, P, V] logits of the subject at the position and those that follow it.
        changed: as true, with another activation at the position.
        counts: [B, P] bool.
    """
    own = precise(true).log_softmax(-1)
    nats = (own.exp() * (own - precise(changed).log_softmax(-1))).sum(-1)  # [B, P]
    return (nats * counts).sum(-1) / counts.sum(-1)


_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class TeacherText:
    """Which words of the text up to the position the teacher's text is made of.

    The most recent words tell most of an activation; rare ones name what a document is about.

    Args:
        rare: words that are the rarest ones of the text, by their number in the training part; all
            others are the most recent ones.
        rare_first: the rare words stand before the recent ones, not after them.

    Raises:
        ValueError: rare is below 0.
    """

    rare: int = 0
    rare_first: bool = False

    def __post_init__(self) -> None:
        if self.rare < 0:
            raise ValueError(f"teacher.rare must be 0 or more, got {self.rare}.")

    def check(self, num_words: int) -> None:
        """Refuse more rare words than an explanation has words.

        Raises:
            ValueError: there are more.
        """
        if self.rare > num_words:
            raise ValueError(
                f"teacher.rare {self.rare} is more than the {num_words} words of an explanation; "
                "lower it, or raise lens.num_words."
            )

    def words(
        self,
        input_ids: Tensor,
        position: Tensor,
        num_words: int,
        token_counts: Tensor,
        is_word: Tensor,
    ) -> Tensor:
        """Return the teacher's text [B, t] int64, words alone: the verbalizer says nothing else.

        Args:
            input_ids: [B, T] int64.
            position: [B] int64, that of the activation.
            num_words: t.
            token_counts: [V] int64, how often each token occurs in the training part; 0 for what
                is no word.
            is_word: [V] bool.
        """
        recent = recent_words(input_ids, position, max(1, num_words - self.rare), is_word)
        last, recent = recent[:, :1], recent[:, : num_words - self.rare]
        if not self.rare:
            return recent
        rare = rare_words(input_ids, position, self.rare, token_counts, recent)
        rare = rare.where(is_word[rare], last)  # where the position holds no word
        return torch.cat([rare, recent] if self.rare_first else [recent, rare], dim=1)


def current_token(batch: ActivationBatch) -> Tensor:
    """Return [B] int64: the words at the positions of the activations."""
    return batch["input_ids"].gather(1, batch["position"][:, None])[:, 0]


def recent_words(input_ids: Tensor, position: Tensor, num_words: int, is_word: Tensor) -> Tensor:
    """Return [B, t] int64: the last words up to the position, the most recent one first.

    Tokens that are no words, such as one that begins every document, are passed over. The earliest
    word is repeated where there are fewer, and the vocabulary's first one where there is none.

    Args:
        input_ids: [B, T] int64.
        position: [B] int64, that of the activation.
        num_words: t.
        is_word: [V] bool.
    """
    length = input_ids.shape[1]
    age = position[:, None] - arange(length, device=position.device)  # [B, T]
    counts = (age >= 0) & is_word[input_ids]
    places = age.where(counts, length).argsort(1)  # words first, from the most recent one on
    steps = arange(num_words, device=position.device)
    last = counts.sum(1, keepdim=True) - 1  # [B, 1], -1 without any word
    found = input_ids.gather(1, places.gather(1, torch.minimum(steps, last.clamp(min=0))))
    return found.where(last >= 0, is_word.int().argmax())


def rare_words(
    input_ids: Tensor, position: Tensor, num_words: int, token_counts: Tensor, known: Tensor
) -> Tensor:
    """Return [B, t] int64: distinct words up to the position, the rarest one first.

    Of equally rare words the most recent one comes first. The word at the position stands where
    the text has no other word.

    Args:
        input_ids: [B, T] int64.
        position: [B] int64.
        num_words: t.
        token_counts: [V] int64; tokens with 0 are never taken.
        known: [B, k] int64, words that are not taken.
    """
    length = input_ids.shape[1]
    age = position[:, None] - arange(length, device=position.device)  # [B, T]
    counts = token_counts[input_ids]
    is_free = (age >= 0) & (counts > 0) & (input_ids[..., None] != known[:, None]).all(-1)
    order = counts * length + age
    current, found = input_ids.gather(1, position[:, None]), []  # [B, 1]
    for _ in range(num_words):
        place = order.where(is_free, _NEVER).argmin(1, keepdim=True)
        word = input_ids.gather(1, place).where(is_free.any(1, keepdim=True), current)
        is_free = is_free & (input_ids != word)
        found.append(word)
    return torch.cat(found, dim=1)


WARM = ("teacher_text", "teacher_reconstruction")


def lens_terms(
    lens: Lens,
    batch: ActivationBatch,
    activation: Tensor,
    names: set[str],
    temperature: float,
    teacher_text: TeacherText,
    group_size: int = 0,
) -> dict[str, Tensor]:
    """Return the terms that are asked for, name -> [B].

    Args:
        lens: in training mode.
        batch: planned.
        activation: [B, D].
        names: of the terms.
        temperature: of the choice of words.
        teacher_text: what the teacher's text is made of.
        group_size: see `LensLosses`.
    """
    found: dict[str, Tensor] = {}
    if names & set(WARM):
        place = (batch["input_ids"], batch["position"], lens.verbalizer.num_words)
        teacher = teacher_text.words(*place, lens.token_counts, lens.verbalizer.is_word)
    if "teacher_text" in names:
        found["teacher_text"] = text_nats(lens.verbalizer(activation, teacher), teacher)
    if "teacher_reconstruction" in names:
        rebuilt = lens.reconstructor(lens.words(teacher), current_token(batch))
        found["teacher_reconstruction"] = squared_error(rebuilt, activation, lens.variance)
    if names - set(WARM):
        if group_size:
            found |= group_terms(lens, batch, activation, names, group_size)
        else:
            own = lens.verbalizer.explain(activation, batch["noise_key"], temperature)
            found |= _of_words(lens, batch, activation, names, own)
    return {name: found[name] for name in TERMS if name in names}


def group_terms(
    lens: Lens, batch: ActivationBatch, activation: Tensor, names: set[str], group_size: int
) -> dict[str, Tensor]:
    """Return the terms of the verbalizer's own words, means over a group of drawn explanations.

    No gradient passes through a text. That of `reconstruction` is, for the reconstructor, of the
    error; for the verbalizer, it makes texts more probable whose error is below that of their
    group, by how many deviations it is. `effect` teaches the reconstructor alone.

    Args: as of `lens_terms`.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.1; each group is used for one step, so
    that no ratio of policies is left, and the reference is a term of its own.
    """
    rows = torch.arange(len(activation), device=activation.device).repeat_interleave(group_size)
    draws = torch.arange(group_size, device=activation.device)
    keys = mixed(batch["noise_key"][:, None], draws).flatten()
    with no_grad():
        token_ids = lens.verbalizer.explain(activation[rows], keys).token_ids
    logits = lens.verbalizer(activation[rows], token_ids)
    needed = ("input_ids", "position", "lengths")
    many: Any = {name: batch[name][rows] for name in needed}  # type: ignore[literal-required]
    drawn = Explanation(token_ids, lens.words(token_ids), logits)
    found = _of_words(lens, many, activation[rows], names, drawn)
    grouped = {name: values.unflatten(0, (-1, group_size)) for name, values in found.items()}
    nats = text_nats(logits, token_ids).unflatten(0, (-1, group_size))
    policy = advantages(-grouped["reconstruction"].detach()) * nats  # [B, K]
    grouped["reconstruction"] = grouped["reconstruction"] + policy - policy.detach()
    return {name: values.mean(1) for name, values in grouped.items()}


def _of_words(
    lens: Lens,
    batch: ActivationBatch,
    activation: Tensor,
    names: set[str],
    own: Explanation,
) -> dict[str, Tensor]:
    rebuilt = lens.reconstructor(own.embeddings, current_token(batch))
    found = {"reconstruction": squared_error(rebuilt, activation, lens.variance)}
    if "entropy" in names:
        found["entropy"] = entropy(own.logits)
    if "reference" in names:
        with no_grad():
            before = lens.reference["verbalizer"](activation, own.token_ids)
        found["reference"] = divergence(own.logits, before)
    if "fluency" in names:
        with no_grad():
            subject = lens.language_logits(own.token_ids)
        found["fluency"] = divergence(own.logits, subject)
    if "effect" in names:
        found["effect"] = _effect(lens, batch, rebuilt)
    return found


def _effect(lens: Lens, batch: ActivationBatch, rebuilt: Tensor) -> Tensor:
    with no_grad():
        patched = PatchedSubject(lens.subject, batch)
    return effect(patched.true, patched.changed(rebuilt), patched.counts)


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
