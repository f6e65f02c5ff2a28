"""The terms of a lens's loss for a batch, computed only where they count.

Shapes: B samples, D features, K explanations of a group.
"""

from typing import Any

import torch
from torch import Tensor, no_grad

from datamodules.core.batches import ActivationBatch
from lit_models.consistency_lens import loss
from lit_models.consistency_lens.lens import Lens
from lit_models.consistency_lens.patching import PatchedSubject
from lit_models.consistency_lens.teacher import TeacherText, current_token
from lit_models.consistency_lens.verbalizer import Explanation
from lit_models.training.keyed_dropout import mixed

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
        found["teacher_text"] = loss.text_nats(lens.verbalizer(activation, teacher), teacher)
    if "teacher_reconstruction" in names:
        rebuilt = lens.reconstructor(lens.words(teacher), current_token(batch))
        found["teacher_reconstruction"] = loss.squared_error(rebuilt, activation, lens.variance)
    if names - set(WARM):
        if group_size:
            found |= group_terms(lens, batch, activation, names, group_size)
        else:
            own = lens.verbalizer.explain(activation, batch["noise_key"], temperature)
            found |= _of_words(lens, batch, activation, names, own)
    return {name: found[name] for name in loss.TERMS if name in names}


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
    nats = loss.text_nats(logits, token_ids).unflatten(0, (-1, group_size))
    policy = loss.advantages(-grouped["reconstruction"].detach()) * nats  # [B, K]
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
    found = {"reconstruction": loss.squared_error(rebuilt, activation, lens.variance)}
    if "entropy" in names:
        found["entropy"] = loss.entropy(own.logits)
    if "reference" in names:
        with no_grad():
            before = lens.reference["verbalizer"](activation, own.token_ids)
        found["reference"] = loss.divergence(own.logits, before)
    if "fluency" in names:
        with no_grad():
            subject = lens.language_logits(own.token_ids)
        found["fluency"] = loss.divergence(own.logits, subject)
    if "effect" in names:
        found["effect"] = _effect(lens, batch, rebuilt)
    return found


def _effect(lens: Lens, batch: ActivationBatch, rebuilt: Tensor) -> Tensor:
    with no_grad():
        patched = PatchedSubject(lens.subject, batch)
    return loss.effect(patched.true, patched.changed(rebuilt), patched.counts)
