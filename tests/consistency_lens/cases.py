"""A tiny lens on a tiny subject, batches for it, and runs of both on a few stories."""

import json
from functools import partial

import numpy as np
import torch
from torch import nn

from datamodules.activations.datamodule import ActivationDataModule
from datamodules.activations.store import statistics_of
from datamodules.tokenizers.text import TokenizerOptions
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.consistency_lens.controls import Baselines, Case, EvaluationOptions
from lit_models.consistency_lens.lens import Lens, LensOptions
from lit_models.consistency_lens.loss import LensLosses, LossWeight, TeacherText
from lit_models.consistency_lens.module import LitConsistencyLens
from lit_models.consistency_lens.subject import Subject, SubjectOptions
from lit_models.training import default_callbacks
from tests.toy import toy_trainer

V, D, LENGTH = 12, 16, 10
PETS, PLACES = ["owl", "fox", "cat"], ["den", "hut", "inn", "bay"]
SHAPE = {"max_positions": 32, "hidden_size": D, "num_layers": 3, "num_heads": 2}


class Tokenizer:
    """What a lens asks of a tokenizer: the last token is no word."""

    begin_id, end_id, vocab_size, special_ids = None, V - 1, V, np.array([V - 1])


def subject(layer=1):
    torch.manual_seed(0)
    network = Decoder(DecoderConfig(vocab_size=V, **SHAPE))
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return Subject(network, layer)


def batch_of(number=6, seed=0):
    """Documents of several lengths, a position in each."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, LENGTH + 1, (number,), generator=random)
    ids = torch.randint(V - 1, (number, LENGTH), generator=random)
    return {
        "input_ids": ids * (torch.arange(LENGTH) < lengths[:, None]),
        "lengths": lengths,
        "position": (torch.rand(number, generator=random) * (lengths - 3)).long() + 2,
        "noise_key": torch.arange(number) + 100,
        "document": torch.arange(number) + 7,
        "weight": torch.ones(number),
    }


def activations_of(network, batch):
    rows = torch.arange(len(batch["position"]))
    return network.activations(batch["input_ids"])[rows, batch["position"]]


def statistics():
    """Of another hundred documents."""
    network, batch = subject(), batch_of(100, seed=1)
    found = activations_of(network, batch)
    current = batch["input_ids"].gather(1, batch["position"][:, None])[:, 0]
    keep = current != 3  # a token that training has never seen
    chunk = (x[keep].detach().numpy() for x in (found, current, batch["position"]))
    return statistics_of([tuple(chunk)])


@torch.no_grad()
def case_of(batch=None, kind=Case, moved=True, rare=0, **options):
    """A case, with the batch turned round as the partners."""
    batch = batch or batch_of()
    lens = Lens(subject(), Tokenizer(), LensOptions(num_words=4))
    lens.eval()
    lens.token_counts.copy_(torch.arange(V) * (torch.arange(V) < V - 1))
    if moved:  # else verbalizer and reconstructor are the subject
        torch.manual_seed(1)
        for parameter in lens.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)
    found = statistics()
    lens.mean.copy_(torch.from_numpy(found.mean))
    lens.variance.fill_(found.variance)
    activation = activations_of(lens.subject, batch)
    other = activation.roll(1, 0)
    pair, teacher = (activation, other), TeacherText(rare)
    return kind(lens, Baselines(found, V), batch, *pair, teacher, EvaluationOptions(**options))


def part_of(batch, rows):
    return {name: values[rows] for name, values in batch.items()}


def stories(folder, number=60, name="stories"):
    """A file of stories with two attributes each."""
    path = folder / f"{name}.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in range(number):
            pet, place = PETS[i % 3], PLACES[i // 3 % 4]
            text = f"number {i // 8} {i % 8} : the {pet} in the {place} saw <b> & left it at once ."
            row = {"text": text, "attributes": {"pet": pet, "place": place}}
            file.write(json.dumps(row) + "\n")
    return path


def data_of(folder, **options):
    options = {"context_length": 24, "global_batch_size": 16, **options}
    tokenizer = options.pop("tokenizer", TokenizerOptions("words"))
    files = options.pop("train", None) or str(stories(folder))
    return ActivationDataModule(
        train_files=files, tokenizer=tokenizer, documents_by="line", **options
    )


def module_of(**options):
    return LitConsistencyLens(
        partial(torch.optim.AdamW, lr=0.01),
        SubjectOptions(layer=1, network=DecoderConfig(**SHAPE)),
        LensLosses(reconstruction=LossWeight(1.0)),
        lens=LensOptions(num_words=3),
        **options,
    )


def trainer_of(folder, callbacks=(), **options):
    folder.mkdir(exist_ok=True)
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, **options}
    return toy_trainer(folder, callbacks=[*default_callbacks(), *callbacks], **options)
