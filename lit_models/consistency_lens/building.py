"""How a lens comes about: its recipe, its subject, what is known of the training part.

A recipe is what a checkpoint keeps, in plain values. The subject's weights are not among them: it
is read from its folder again, and known by its digest. Shapes: B samples, D features.
"""

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from datamodules.activations.datamodule import ActivationDataModule
from datamodules.activations.statistics import (
    ActivationStatistics,
    Chunk,
    statistics_of,
    threads_pinned,
)
from datamodules.activations.store import ActivationStore, SubjectFacts
from datamodules.files.splitting import TRAIN
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from lit_models.causal_lm.lora import check_precision
from lit_models.causal_lm.pretrained import check_recipe, learned_positions
from lit_models.consistency_lens.lens import Lens, LensOptions
from lit_models.consistency_lens.subject import (
    Subject,
    SubjectOptions,
    load_subject,
    subject_facts,
    subject_recipe,
)

LENS_RECIPE_KEY = "lens_recipe"
TRAINED_ON = "trained_on"  # digests of training parts, of all runs that the weights went through
COUNTED_AT_ONCE = 1 << 22  # tokens
Recipe = dict[str, Any]


def recipe_of_run(options: SubjectOptions, lens: LensOptions, data: ActivationDataModule) -> Recipe:
    """Return the recipe of a run.

    Raises:
        FileNotFoundError: the subject's folder is missing.
        ValueError: the activations are not of this subject and layer, the documents or the
            explanations do not fit it, or the trainer's precision does not fit an adapter.
    """
    if data.trainer is not None:
        for part in (lens.verbalizer, lens.reconstructor):
            lora = vars(part.lora) if part.lora else None
            check_precision(lora, data.trainer.precision)
    assert data.store is not None
    tokenizer = data.store.tokenizer
    network = subject_recipe(options, tokenizer.vocab_size)
    check_recipe(network, data.longest, tokenizer.vocab_size)
    check_explanations(network, lens)
    facts = subject_facts(options, network)
    if isinstance(data.store, ActivationStore):
        check_store(data.store, facts)
    return {
        "tokenizer": tokenizer.to_dict(),
        "network": network,
        "subject": asdict(facts),
        "lens": asdict(lens),
        TRAINED_ON: [training_digest(data)],
    }


def check_explanations(recipe: Recipe, lens: LensOptions) -> None:
    """Refuse explanations that are longer than the subject's table of positions.

    Args:
        recipe: of the subject's network.
        lens: how the lens is built.

    Raises:
        ValueError: they are.
    """
    limit = learned_positions(recipe)
    # The last word is never read again; the reconstructor reads a start and all words.
    said = lens.num_prompt + 1 + lens.num_words - 1
    read = 1 + lens.gives_current_token + lens.num_words
    if limit is not None and max(said, read) > limit:
        raise ValueError(
            f"explanations of lens.num_words {lens.num_words} need {said} positions in the "
            f"verbalizer (lens.num_prompt {lens.num_prompt}, the marker, all words but the last) "
            f"and {read} in the reconstructor, and the subject has learnt {limit}; lower "
            "lens.num_words or lens.num_prompt, or take a subject with rotary positions."
        )


def training_digest(data: ActivationDataModule) -> str:
    """Return hex, equal for training parts of the same documents."""
    assert data.store is not None
    return hashlib.sha256(np.unique(data.store.hashes(TRAIN)).tobytes()).hexdigest()[:32]


def continued(trained: Recipe | None, recipe: Recipe, trainer: Trainer | None) -> Recipe:
    """Return the recipe of a run that goes on from another one, which it must fit: it was trained
    on what that was, and if it trains, on its own documents too.

    Raises:
        ValueError: see `check_same`.
    """
    if trained is None:
        return recipe
    check_same(trained, recipe)
    known = [*trained.get(TRAINED_ON, [])]  # none in older recipes
    if trainer is not None and trainer.state.fn == "fit":
        known += recipe[TRAINED_ON]
    return {**recipe, TRAINED_ON: list(dict.fromkeys(known))}


def check_store(store: ActivationStore, subject: SubjectFacts) -> None:
    """Refuse activations of another model or layer.

    Raises:
        ValueError: they are.
    """
    if store.subject == subject:
        return
    found, wanted = asdict(store.subject), asdict(subject)
    changed = [f"{n}: {found[n]} there, {wanted[n]} here" for n in found if found[n] != wanted[n]]
    raise ValueError(
        f"{store.folder} holds activations of another subject ({'; '.join(changed)}); name the "
        "model that was dumped with model.subject.path and its layer with model.subject.layer, or "
        "dump the activations of this one."
    )


def stored_recipe(checkpoint: dict[str, Any]) -> Recipe:
    """Return the recipe that a checkpoint keeps.

    Raises:
        ValueError: it keeps none.
    """
    if LENS_RECIPE_KEY not in checkpoint:
        raise ValueError(
            "the checkpoint holds no lens recipe: it is of another family; give one of "
            "LitConsistencyLens."
        )
    recipe = checkpoint[LENS_RECIPE_KEY]
    options = LensOptions(**recipe["lens"])  # with the defaults of whatever came later
    return {**recipe, "lens": asdict(options)}


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
    found = asdict(subject_facts(options, subject_recipe(options, size)))
    wanted = recipe["subject"]
    changed = [f"{n}: {wanted[n]} then, {found[n]} now" for n in found if found[n] != wanted[n]]
    if changed:
        place = "model.subject" if options.path is None else options.path
        raise ValueError(
            f"{place} is another subject than this lens was trained with ({'; '.join(changed)}); "
            "give the model and the layer of its training with model.subject."
        )


def check_same(trained: Recipe, recipe: Recipe) -> None:
    """Refuse a checkpoint whose words would mean something else here.

    Raises:
        ValueError: subject, layer, tokenizer or the lens's shape differ.
    """
    kept = [name for name in recipe if name != TRAINED_ON]
    changed = [name for name in kept if trained.get(name) != recipe[name]]
    if changed:
        raise ValueError(
            f"the checkpoint was trained with another {' and '.join(changed)} than this run has; "
            "give the model.subject, model.lens and data of its training, or begin a new run."
        )


def subject_of(options: SubjectOptions, recipe: Recipe, context_length: int) -> Subject:
    """Return the subject with its weights, in the precision of what is built around it."""
    size = TextTokenizer.from_dict(recipe["tokenizer"]).vocab_size
    network = load_subject(options, recipe["network"], context_length, size)
    return Subject(network.to(torch.get_default_dtype()), options.layer)


def lens_of(subject: Subject, recipe: Recipe) -> Lens:
    """Return a lens that has learnt nothing."""
    tokenizer = TextTokenizer.from_dict(recipe["tokenizer"])
    with next(subject.parameters()).device:
        return Lens(subject, tokenizer, LensOptions(**recipe["lens"]))


def statistics_for(subject: Subject, data: ActivationDataModule) -> ActivationStatistics:
    """Return what is known of the training part: from the store, or from its first documents."""
    if isinstance(data.store, ActivationStore):
        return data.store.statistics
    return statistics_of(_computed(subject, data))


def word_counts(data: ActivationDataModule, is_word: Tensor) -> Tensor:
    """Return [V] int64: how often each word occurs in the training part; 0 for what is none."""
    assert data.store is not None
    tokens, counts = data.store.stream(TRAIN).tokens, np.zeros(len(is_word), np.int64)
    for start in range(0, len(tokens), COUNTED_AT_ONCE):
        counts += np.bincount(tokens[start : start + COUNTED_AT_ONCE], minlength=len(is_word))
    return torch.from_numpy(counts).to(is_word.device) * is_word


@torch.no_grad()
def _computed(subject: Subject, data: ActivationDataModule) -> Iterator[Chunk]:
    device = next(subject.parameters()).device
    for batch in data.training_sample():
        ids, position = batch["input_ids"], batch["position"]
        with threads_pinned():
            found = subject.activations(ids.to(device)).cpu().double()
        rows = torch.arange(len(ids), device="cpu")
        yield found[rows, position].numpy(), ids[rows, position].numpy(), position.numpy()


def expect_in_evaluation_mode(module: nn.Module) -> None:
    """Keep Lightning from warning of the networks that stand still, and of exactly so many."""
    number = sum(not part.training for part in module.modules())
    message = rf"Found {number} module\(s\) in eval mode at the start of training"
    warnings.filterwarnings("ignore", message=message)


def leave_out(module: nn.Module, names: set[str]) -> None:
    """Keep parameters and buffers out of a module's state dict, by their exact names.

    What is loaded must hold all others, and these stay as they are.
    """

    def forget(owner: nn.Module, content: dict[str, Any], prefix: str, facts: Any) -> None:
        for name in names:
            content.pop(prefix + name, None)

    def remember(owner: nn.Module, content: dict[str, Any], prefix: str, *rest: Any) -> None:
        own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
        for name in names & own.keys():
            content.setdefault(prefix + name, own[name].detach())

    module.register_state_dict_post_hook(forget)
    module.register_load_state_dict_pre_hook(remember)
