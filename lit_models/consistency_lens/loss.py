"""Loss terms of the lens, their schedules, and the schedule of the temperature of words; the
teacher's text of the warm start.

Shapes: B samples, D features, T tokens, t words, P positions of a document, V vocabulary, K
readings per sample, W wrong activations per sample, n pairs of a sample and a word.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, arange, no_grad

from datamodules.activations.store import one_thread
from datamodules.core.batches import TERMS, ActivationBatch
from datamodules.files.splitting import TRAIN
from lit_models.consistency_lens.lens import Lens, of_layer
from lit_models.consistency_lens.subject import PatchedSubject
from lit_models.training.dropout import mixed
from lit_models.training.metrics import in_float32

NUM_READINGS, NUM_WRONG = 4, 7  # readings and wrong activations per sample in `contrast`
READING = 32  # first key of its random draws


@dataclass(frozen=True)
class LossWeight:
    """Weight of one term of the loss.

    Args:
        weight: 0 or more, from step `begin` until before step `end`; 0 at other steps.
        begin: first optimizer step with the term.
        end: first step without the term, after `begin`; `None` for the end of the run.
    """

    weight: float = 0.0
    begin: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if min(self.weight, self.begin) < 0 or (self.end is not None and self.end <= self.begin):
            raise ValueError(
                "a term of losses needs a weight and a begin of 0 or more and an end after its "
                f"begin, got {self}; weight 0 leaves it out."
            )

    def at(self, step: int) -> float:
        is_over = self.end is not None and step >= self.end
        return 0.0 if step < self.begin or is_over else self.weight


MAX_NATS = 50.0  # cap for improbable words, so that an impossible one does not outweigh the others
JOINT = ("reconstruction", "effect")  # terms that train both networks together


@dataclass(frozen=True)
class LensLosses:
    """Weights of the loss terms over the optimizer steps of the run.

    Args:
        teacher_text: nats per word of the teacher's text given the activation (warm start).
        teacher_reconstruction: squared error of the activation rebuilt from the teacher's text.
        reconstruction: squared error of the activation rebuilt from the verbalizer's words.
        reference: KL divergence of the verbalizer's words from the reference's, nats per word.
        effect: KL divergence of the subject's next tokens when the rebuilt activation replaces the
            true one, mean nats over its position and up to 8 following ones.
        fluency: as `reference`, from the subject as a language model instead.
        contrast: negative reward of `contrast`; trains only the verbalizer.
    """

    teacher_text: LossWeight = LossWeight()
    teacher_reconstruction: LossWeight = LossWeight()
    reconstruction: LossWeight = LossWeight()
    reference: LossWeight = LossWeight()
    effect: LossWeight = LossWeight()
    fluency: LossWeight = LossWeight()
    contrast: LossWeight = LossWeight()

    def __post_init__(self) -> None:
        assert tuple(field.name for field in fields(self)) == TERMS

    def at(self, step: int) -> dict[str, float]:
        """Return the terms with a weight above 0 at an optimizer step, and their weights."""
        weights = {name: getattr(self, name).at(step) for name in TERMS}
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def joint_start(self) -> int | None:
        """First step with a term of `JOINT`; `None` if there is none."""
        terms = [getattr(self, name) for name in JOINT]
        return min((term.begin for term in terms if term.weight), default=None)

    def changes(self) -> list[int]:
        """Return step 0 and the steps at which a term begins or ends, in ascending order."""
        terms = [getattr(self, name) for name in TERMS]
        return sorted({0, *(t.begin for t in terms), *(t.end for t in terms if t.end is not None)})


@dataclass(frozen=True)
class TemperatureSchedule:
    """Temperature for the choice of words: constant, then falling.

    Args:
        start: above 0, up to optimizer step `begin`.
        end: above 0, from optimizer step `until` on.
        begin: 0 or more.
        until: above `begin`.
        shape: of the fall: linear, half a cosine wave, or the same factor at each step.
        floor: 0 or more, lower bound of the temperature at all steps.
    """

    start: float = 1.0
    end: float = 0.5
    begin: int = 0
    until: int = 1000
    shape: Literal["linear", "cosine", "exponential"] = "linear"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if min(self.start, self.end) <= 0 or self.floor < 0 or not 0 <= self.begin < self.until:
            raise ValueError(
                "a temperature needs a start and an end above 0, a floor and a begin of 0 or more, "
                f"and the begin before until, got {self}."
            )

    def at(self, step: int) -> float:
        share = min(1.0, max(0.0, (step - self.begin) / (self.until - self.begin)))
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        if self.shape == "exponential":
            return max(self.floor, self.start * (self.end / self.start) ** share)
        return max(self.floor, self.start + (self.end - self.start) * share)


def squared_error(rebuilt: Tensor, activation: Tensor, variance: Tensor) -> Tensor:
    """Return the mean squared error over features [B], divided by the training part's variance, []
    or [B]."""
    return (in_float32(rebuilt) - in_float32(activation)).square().mean(-1) / variance


def text_nats(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the mean nats per word [B]. Args: logits [B, t, V], token_ids [B, t]."""
    nats = F.cross_entropy(logits.flatten(0, 1), token_ids.flatten(), reduction="none")
    return nats.view_as(token_ids).mean(-1)


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """Return the mean over words of KL(softmax(logits) || softmax(other)) [B], both [B, t, V].

    `other` is clamped per token, not the sum, whose gradient would vanish where both differ most.
    """
    own = logits.log_softmax(-1)
    against = other.log_softmax(-1).clamp(min=-MAX_NATS)
    return (own.exp() * (own - against)).sum(-1).mean(-1)


def effect(lens: Lens, batch: ActivationBatch, rebuilt: Tensor) -> Tensor:
    """Return the mean KL(true || changed) [B] of the subject's next tokens at the positions of
    `PatchedSubject`, with rebuilt activations [B, D] instead of the true ones."""
    with no_grad():
        patched = PatchedSubject(lens.subject, batch)
    own = in_float32(patched.true).log_softmax(-1)  # [B, P, V]
    nats = (own.exp() * (own - in_float32(patched.changed(rebuilt)).log_softmax(-1))).sum(-1)
    return (nats * patched.counts).sum(-1) / patched.counts.sum(-1)


def contrast(lens: Lens, batch: ActivationBatch, activation: Tensor) -> Tensor:
    """Return the negative mean reward [B] of K random readings of activations [B, D]; its gradient
    is the policy gradient.

    The reference's reconstructor, which knows the teacher's words and no code that the networks
    agree on later, rebuilds an activation from the words. The reward is its cosine with the right
    activation minus the mean cosine with the wrong ones, all relative to the training mean: -2 to
    2. Draws are keyed by sample; a reading's baseline is the sample's mean reward of the others.

    Source: Williams 1992, REINFORCE; Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for
    free!", equation 8.
    """
    drafts, rewards, layer = [], [], batch.get("layer")
    with no_grad():
        for draw in range(NUM_READINGS):
            key = mixed(batch["noise_key"], READING + draw)
            drafts.append(lens.verbalizer.explain(activation, key, layer=layer).token_ids)
            rewards.append(reward(lens, drafts[-1], activation, batch["wrong"], layer))
    words, gained = torch.cat(drafts), torch.stack(rewards)  # [K * B, t], [K, B]
    advantage = (gained - gained.mean(0)) * NUM_READINGS / (NUM_READINGS - 1)  # above the others
    layers = None if layer is None else layer.repeat(NUM_READINGS)
    logits = lens.verbalizer(activation.repeat(NUM_READINGS, 1), words, layers)
    nats = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none")  # [K * B * t]
    policy = (advantage * nats.view(*gained.shape, -1).sum(-1)).mean(0)
    return policy - policy.detach() - gained.mean(0)


def reward(
    lens: Lens, words: Tensor, activation: Tensor, wrong: Tensor, layer: Tensor | None = None
) -> Tensor:
    """Return the reward [B] of words [B, t]. Args: right activations [B, D], wrong [B, W, D]."""
    mean = of_layer(lens.mean, layer)
    rebuilt = in_float32(lens.reference["reconstructor"](lens.words(words), layer) - mean)
    candidates = in_float32(
        torch.cat([activation[:, None], wrong.to(activation)], 1) - mean[..., None, :]
    )
    cosines = F.cosine_similarity(rebuilt[:, None], candidates, dim=-1)  # [B, 1 + W]
    return cosines[:, 0] - cosines[:, 1:].mean(1)


@dataclass(frozen=True)
class TeacherText:
    """Choice of the teacher's words among those up to the position.

    The most recent words describe an activation best. The other words are those that it reveals
    most about, so that the verbalizer can learn them.

    Args:
        told: number of words that are rare and that the activation reveals, see `told_map`. They
            follow the most recent words, which make up the rest of the explanation.
    """

    told: int = 0

    def check(self, num_words: int) -> None:
        if not 0 <= self.told <= num_words:
            raise ValueError(
                f"teacher.told {self.told} must be 0 to {num_words}, the words of an explanation; "
                "lower it, or raise lens.num_words."
            )

    def of(self, lens: Lens, batch: ActivationBatch, activation: Tensor) -> Tensor:
        """Return the text [B, t] int64 of a batch with activations [B, D].

        Like the verbalizer, it uses only words: other tokens, such as a begin-of-text token, are
        skipped. If there are too few recent words, the earliest one is repeated; if there is none,
        the vocabulary's first word is used. If told words run out, the most recent word fills the
        rest.
        """
        ids, is_word = batch["input_ids"], lens.verbalizer.is_word
        num_recent, length = lens.verbalizer.num_words - self.told, ids.shape[1]
        age = batch["position"][:, None] - arange(length, device=ids.device)  # [B, T]
        counts = (age >= 0) & is_word[ids]
        places = age.where(counts, length).argsort(1)  # words first, the most recent one first
        steps = arange(max(1, num_recent), device=ids.device)
        last = counts.sum(1, keepdim=True) - 1  # [B, 1], -1 without any word
        recent = ids.gather(1, places.gather(1, torch.minimum(steps, last.clamp(min=0))))
        recent = recent.where(last >= 0, is_word.int().argmax())
        text = recent[:, :num_recent]
        if not self.told:
            return text
        # No matrix product, so that other rows of the batch do not change any bit.
        layer = batch.get("layer")
        table = lens.told_map[ids if layer is None else (layer[:, None], ids)]  # [B, T, D + 1]
        scores = (table[..., :-1] * activation[:, None]).sum(-1) + table[..., -1]
        is_free = (age >= 0) & (lens.token_counts[ids] > 0)
        is_free &= (ids[..., None] != text[:, None]).all(-1)
        told: list[Tensor] = []
        for _ in range(self.told):
            place = scores.where(is_free, -torch.inf).argmax(1, keepdim=True)
            has_any = is_free.any(1, keepdim=True)
            told.append(ids.gather(1, place).where(has_any, recent[:, :1]))
            is_free = is_free & (ids != told[-1])
        return torch.cat([text, *told], dim=1)


COUNTED_AT_ONCE = 1 << 22  # tokens


def word_counts(data: Any, is_word: Tensor) -> Tensor:
    """Return the occurrences of each word in the training part [V] int64; 0 for other tokens."""
    tokens, counts = data.store.stream(TRAIN).tokens, np.zeros(len(is_word), np.int64)
    for start in range(0, len(tokens), COUNTED_AT_ONCE):
        counts += np.bincount(tokens[start : start + COUNTED_AT_ONCE], minlength=len(is_word))
    return torch.from_numpy(counts).to(is_word.device) * is_word


MOST_SAMPLES = 1 << 16  # of the training part, to fit the map
RIDGE = 1e-3  # relative to each input's mean square
FEWEST = 1e-3  # minimum share of documents, as the map would overrate rarer words
POWER = 1.5  # 1 admits words of every second document; 2 drops words that the activation reveals


def told_map(lens: Lens, batches: Iterator[ActivationBatch]) -> Tensor:
    """Return weights and bias [V, D + 1] float32 that score, from an activation, each word's
    presence up to its position, in favour of rare words.

    They are a ridge regression of the words' presence on the activation, divided by (share of
    documents with the word) ** POWER, so that words which distinguish documents come first. Sums
    are in float64 on one thread, so that no bit depends on the number of devices.
    """
    width, vocab_size = lens.mean.shape[-1], len(lens.token_counts)
    squares = torch.zeros(width + 1, width + 1, dtype=torch.float64, device="cpu")
    products = torch.zeros(vocab_size, width + 1, dtype=torch.float64, device="cpu")
    held, count = torch.zeros(vocab_size, dtype=torch.float64, device="cpu"), 0
    with one_thread(), torch.no_grad():
        for batch in batches:
            activation = lens.activation(batch).cpu().double()
            one = torch.cat([activation, torch.ones_like(activation[:, :1])], dim=1)
            ids, places = batch["input_ids"], arange(batch["input_ids"].shape[1], device="cpu")
            rows = arange(len(ids), device="cpu")[:, None]
            keys = rows * vocab_size + ids
            pairs = keys[places <= batch["position"][:, None]].unique()  # [n]
            whole = keys[places < batch["lengths"][:, None]].unique() % vocab_size
            held += whole.bincount(minlength=vocab_size)
            products.index_add_(0, pairs % vocab_size, one[pairs // vocab_size])
            squares += one.T @ one
            count += len(ids)
        ridge = squares + RIDGE * squares.diag().diag()
        weights = torch.linalg.solve(ridge, products.T).T  # [V, D + 1]
    share = (held / count).clamp(min=FEWEST)[:, None]
    return (weights / share**POWER).float()


WARM = ("teacher_text", "teacher_reconstruction")


def lens_terms(
    lens: Lens,
    batch: ActivationBatch,
    activation: Tensor,
    names: set[str],
    temperature: float,
    teacher_text: TeacherText,
) -> dict[str, Tensor]:
    """Return name -> loss term [B] for these names, a batch and its activations [B, D]."""
    terms: dict[str, Tensor] = {}
    layer = batch.get("layer")
    variance = of_layer(lens.variance, layer)
    if names & set(WARM):
        teacher = teacher_text.of(lens, batch, activation)
    if "teacher_text" in names:
        terms["teacher_text"] = text_nats(lens.verbalizer(activation, teacher, layer), teacher)
    if "teacher_reconstruction" in names:
        rebuilt = lens.reconstructor(lens.words(teacher), layer)
        terms["teacher_reconstruction"] = squared_error(rebuilt, activation, variance)
    if "contrast" in names:
        terms["contrast"] = contrast(lens, batch, activation)
    if names - {*WARM, "contrast"}:
        own = lens.verbalizer.explain(activation, batch["noise_key"], temperature, layer=layer)
        rebuilt = lens.reconstructor(own.embeddings, layer)
        terms["reconstruction"] = squared_error(rebuilt, activation, variance)
        if "reference" in names:
            with no_grad():
                before = lens.reference["verbalizer"](activation, own.token_ids, layer)
            terms["reference"] = divergence(own.logits, before)
        if "fluency" in names:
            with no_grad():
                subject = lens.language_logits(own.token_ids)
            terms["fluency"] = divergence(own.logits, subject)
        if "effect" in names:
            terms["effect"] = effect(lens, batch, rebuilt)
    return {name: terms[name] for name in TERMS if name in names}


def leaves_one_idle(losses: LensLosses) -> bool:
    """Return whether one of the networks gets no gradient in some steps."""
    sets = [set(losses.at(step)) for step in losses.changes()]
    speaks, reads = set(TERMS) - {"teacher_reconstruction"}, {"teacher_reconstruction", *JOINT}
    return not all(names & speaks and names & reads for names in sets)


def check_phases(losses: LensLosses, num_steps: int | None) -> None:
    """Raise ValueError if some step of a run has no term, or a term that needs the reference before
    it is kept. Args: num_steps: optimizer steps of the run, `None` for no end."""
    for step in losses.changes():
        if (num_steps is None or step < num_steps) and not losses.at(step):
            raise ValueError(
                f"no term of losses counts from step {step} on, and the run has "
                f"{'no end' if num_steps is None else f'{num_steps} steps'}; give a term a later "
                "end, or end the run there with trainer.max_steps."
            )
    start = losses.joint_start
    for name in ("reference", "contrast"):
        begin = getattr(losses, name).begin
        if not getattr(losses, name).weight or (start is not None and begin >= start):
            continue
        when = "which they never do here" if start is None else f"at step {start}"
        raise ValueError(
            f"losses.{name} begins at step {begin}, but the reference is kept when the two "
            f"networks begin to learn together, {when} (losses.reconstruction or losses.effect); "
            "let it begin there or later, or leave it out."
        )
