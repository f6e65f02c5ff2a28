"""The terms of a lens's loss for a batch, computed only where they count.

Shapes: B samples, D features.
"""

from torch import Tensor, no_grad

from datamodules.batches import ActivationBatch
from lit_models.consistency_lens import loss
from lit_models.consistency_lens.lens import Lens
from lit_models.consistency_lens.teacher import TeacherText, current_token
from lit_models.consistency_lens.verbalizer import Explanation

WARM = ("teacher_text", "teacher_reconstruction")


def lens_terms(
    lens: Lens,
    batch: ActivationBatch,
    activation: Tensor,
    names: set[str],
    temperature: float,
    teacher_text: TeacherText,
) -> dict[str, Tensor]:
    """Return the terms that are asked for, name -> [B].

    Args:
        lens: in training mode.
        batch: planned.
        activation: [B, D].
        names: of the terms.
        temperature: of the choice of words.
        teacher_text: what the teacher's text is made of.
    """
    found: dict[str, Tensor] = {}
    current = current_token(batch)
    if names & set(WARM):
        place = (batch["input_ids"], batch["position"], lens.verbalizer.num_words)
        teacher = teacher_text.words(*place, lens.token_counts)
    if "teacher_text" in names:
        found["teacher_text"] = loss.text_nats(lens.verbalizer(activation, teacher), teacher)
    if "teacher_reconstruction" in names:
        rebuilt = lens.reconstructor(lens.words(teacher), current)
        found["teacher_reconstruction"] = loss.squared_error(rebuilt, activation, lens.variance)
    if names - set(WARM):
        own = lens.verbalizer.explain(activation, batch["noise_key"], temperature)
        rebuilt = lens.reconstructor(own.embeddings, current)
        found["reconstruction"] = loss.squared_error(rebuilt, activation, lens.variance)
        found |= _of_choices(lens, activation, own, names)
        if "effect" in names:
            found["effect"] = _effect(lens, batch, rebuilt)
    return {name: found[name] for name in loss.TERMS if name in names}


def _of_choices(
    lens: Lens, activation: Tensor, own: Explanation, names: set[str]
) -> dict[str, Tensor]:
    found = {}
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
    return found


def _effect(lens: Lens, batch: ActivationBatch, rebuilt: Tensor) -> Tensor:
    ids, position = batch["input_ids"], batch["position"]
    with no_grad():
        true = lens.subject.logits(ids, position, None)
    changed = lens.subject.logits(ids, position, rebuilt)
    return loss.effect(true, changed, position, batch["lengths"])
