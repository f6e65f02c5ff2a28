"""Recipe of a lens: what a checkpoint keeps of it besides weights, in plain values.

The subject's weights are not among them: it is read from its folder again, and known by its digest.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from datamodules.activations.datamodule import ActivationDataModule
from datamodules.activations.store import ActivationStore
from datamodules.files.splitting import TRAIN
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.pretrained import check_recipe, most_positions
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.subject import (
    TRAINED_ON,
    SubjectOptions,
    subject_facts,
    subject_recipe,
    training_digest,
)

LENS_RECIPE_KEY = "lens_recipe"
Recipe = dict[str, Any]


def recipe_of_run(options: SubjectOptions, lens: LensOptions, data: ActivationDataModule) -> Recipe:
    """Return the recipe of a run.

    Raises:
        FileNotFoundError: the subject's folder is missing.
        ValueError: the activations are not of this subject and layer, or the documents or
            the explanations do not fit it.
    """
    store = data.store
    assert store is not None
    network = subject_recipe(options, store.tokenizer.vocab_size)
    check_recipe(network, data.context_length, store.tokenizer.vocab_size)
    check_explanations(network, lens)
    facts = subject_facts(options, network)
    if isinstance(store, ActivationStore) and store.subject != facts:
        changed = differences(asdict(store.subject), asdict(facts), "there", "here")
        raise ValueError(
            f"{store.folder} holds activations of another subject ({changed}); name the model that "
            "was dumped with model.subject.path and its layer with model.subject.layer, or dump "
            "the activations of this one."
        )
    return {
        "tokenizer": store.tokenizer.to_dict(),
        "network": network,
        "subject": asdict(facts),
        "lens": asdict(lens),
        TRAINED_ON: [training_digest(data.store.hashes(TRAIN))],
    }


def check_explanations(recipe: Recipe, lens: LensOptions) -> None:
    """Refuse explanations that are longer than the table of positions of the subject's network.

    Raises:
        ValueError: they are.
    """
    limit = most_positions(recipe)
    # Prompt, marker and all words but the last, which is never read again; the reconstructor's
    # start and all words are no more.
    needed = lens.num_prompt + lens.num_words
    if limit is not None and needed > limit:
        raise ValueError(
            f"explanations of lens.num_words {lens.num_words} after lens.num_prompt "
            f"{lens.num_prompt} need {needed} positions, and the subject has learnt {limit}; lower "
            "one of the two, or take a subject with rotary positions."
        )


def differences(first: dict[str, Any], second: dict[str, Any], one: str, other: str) -> str:
    """Return the values in which two descriptions differ, for a message."""
    changed = [n for n in first if first[n] != second[n]]
    return "; ".join(f"{n}: {first[n]} {one}, {second[n]} {other}" for n in changed)


def continued(trained: Recipe | None, recipe: Recipe, trainer: Trainer | None) -> Recipe:
    """Return the recipe of a run that goes on from another one: it was trained on what that was,
    and if it trains, on its own documents too.

    Raises:
        ValueError: subject, layer, tokenizer or the lens's shape differ, so that the checkpoint's
            words would mean something else here.
    """
    if trained is None:
        return recipe
    changed = [name for name in recipe if name != TRAINED_ON and trained.get(name) != recipe[name]]
    if changed:
        raise ValueError(
            f"the checkpoint was trained with another {' and '.join(changed)} than this run has; "
            "give the model.subject, model.lens and data of its training, or begin a new run."
        )
    known = [*trained.get(TRAINED_ON, [])]  # none in older recipes
    if trainer is not None and trainer.state.fn == "fit":
        known += recipe[TRAINED_ON]
    return {**recipe, TRAINED_ON: list(dict.fromkeys(known))}


def check_subject(options: SubjectOptions, recipe: Recipe) -> None:
    """Refuse a subject that is not the one that a lens was trained with.

    Raises:
        FileNotFoundError: its folder is not there.
        ValueError: it is another model, or another layer is asked for.
    """
    if options.path is not None and not Path(options.path).expanduser().is_dir():
        raise FileNotFoundError(
            f"this lens explains the model in {options.path}, which is not there, and a lens holds "
            "no copy of it; put the folder back, or name its new place with model.subject.path."
        )
    size = TextTokenizer.from_dict(recipe["tokenizer"]).vocab_size
    facts = asdict(subject_facts(options, subject_recipe(options, size)))
    changed = differences(recipe["subject"], facts, "then", "now")
    if changed:
        place = "model.subject" if options.path is None else options.path
        raise ValueError(
            f"{place} is another subject than this lens was trained with ({changed}); give the "
            "model and the layer of its training with model.subject."
        )
