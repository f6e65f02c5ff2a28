"""Tiny random subjects of all kinds, and lenses on them."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from datamodules.activations.store import statistics_of
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.pretrained import Network
from lit_models.consistency_lens.controls import Baselines, Case, tuned_map
from lit_models.consistency_lens.lens import (
    Explanation,
    Lens,
    LensOptions,
    Verbalizer,
    gumbel_noise,
    only_words,
    straight_through,
)
from lit_models.consistency_lens.loss import TeacherText
from lit_models.consistency_lens.subject import Subject, embedded, read
from tests.causal_lm.folders import VOCAB, of_transformers

SHAPE = {"vocab_size": VOCAB, "max_positions": 16, "hidden_size": 16, "num_layers": 3}
OWN_GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}

NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}  # as loaded models have it


class Tokenizer:
    """The tokenizer methods that a lens needs; the last token is not a word."""

    begin_id = None

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.end_id, self.vocab_size = vocab_size - 1, vocab_size
        self.special_ids = np.array([vocab_size - 1])


def own(**shape: Any) -> Decoder:
    torch.manual_seed(0)
    network = Decoder(DecoderConfig(**{**SHAPE, "num_heads": 4, **shape}))
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network


NETWORKS = {
    "own GPT-2": partial(own, **OWN_GPT2),
    "own Llama": partial(own, num_kv_heads=2),
    "GPT-2": partial(of_transformers, "GPT2", n_layer=3, n_embd=16, **NO_DROPOUT),
    "Llama": partial(of_transformers, "Llama", num_hidden_layers=3),
    "Qwen2": partial(of_transformers, "Qwen2", num_hidden_layers=3, tie_word_embeddings=True),
    "Gemma": partial(of_transformers, "Gemma", num_hidden_layers=3, head_dim=4),
}


def network_of(kind: str) -> Network:
    """Return a network in float64."""
    return NETWORKS[kind]().double()


def lens_of(kind: str = "own GPT-2", layer: int = 1, **options: Any) -> Lens:
    """Return a float64 lens whose maps and prompt have left their initial values."""
    given = LensOptions(**{"num_words": 4, "num_prompt": 2, **options})
    torch.set_default_dtype(torch.float64)
    try:
        lens = Lens(Subject(network_of(kind), layer), Tokenizer(), given)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)
    return lens


def moved(lens: Lens, std: float = 0.1) -> Lens:
    """Return the lens with all trainable weights moved at random, as if trained."""
    torch.manual_seed(1)
    for parameter in lens.parameters():
        if parameter.requires_grad:
            parameter.data += std * torch.randn_like(parameter)
    return lens


def activations(number: int = 3, width: int = 16) -> Tensor:
    return torch.randn(number, width, dtype=torch.float64, generator=torch.manual_seed(5))


def documents(lengths: tuple[int, ...] = (9, 12, 7)) -> tuple[Tensor, Tensor]:
    """Return padded tokens [B, T] and lengths [B]."""
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB - 1, (len(lengths), max(lengths)), generator=random)
    sizes = torch.tensor(lengths)
    return ids * (torch.arange(ids.shape[1]) < sizes[:, None]), sizes


def plain_forward(
    network: Any, ids: Tensor, layer: int, position: Any = None, replacement: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a block's activations [B, T, D] and the logits [B, T, V] of a network that is called
    in the usual way, with activations [B, D] in place of the true ones."""
    found, rows = [], torch.arange(len(ids))

    def hook(block: nn.Module, given: object, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if replacement is not None:
            hidden = hidden.index_put((rows, position), replacement)
        found.append(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = network.blocks()[layer].register_forward_hook(hook)
    if isinstance(network, Decoder):
        places, documents = torch.arange(ids.shape[1]).expand_as(ids), rows[:, None].expand_as(ids)
        logits = network.head(network(ids, places, documents))
    else:
        logits = network.model(input_ids=ids, use_cache=False).logits
    handle.remove()
    return found[0], logits


def effects(subject: Subject, ids: Tensor, position: Tensor, replacement: Tensor) -> Tensor:
    """Return KL(true || changed) [B, T] of the next word at every place, for the whole subject."""
    where = (subject.network, ids, subject.layers[0], position)
    own, other = (plain_forward(*where, x)[1].log_softmax(-1) for x in (None, replacement))
    return (own.exp() * (own - other)).sum(-1)


def explained_without_cache(
    verbalizer: Verbalizer, activation: Tensor, keys: Tensor, temperature: float
) -> Explanation:
    """Return what `Verbalizer.explain` returns, but read everything again for each word."""
    network, place = verbalizer.network, len(verbalizer.prompt)
    maps = zip(verbalizer.map_weight, verbalizer.map_bias, strict=True)
    entering = [activation @ weight.T + bias for weight, bias in maps]

    def entered(layer: int) -> Any:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> Any:
            hidden = (args[0] if args else kwargs["hidden_states"]).clone()
            hidden[:, place] = entering[layer].to(hidden.dtype)
            if args:
                return (hidden, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": hidden}

        return hook

    blocks = enumerate(network.blocks())
    hooks = [b.register_forward_pre_hook(entered(i), with_kwargs=True) for i, b in blocks]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    marker = torch.zeros_like(verbalizer.prompt[:1])
    prompt = torch.cat([verbalizer.prompt, marker]).expand(len(activation), -1, -1)
    while len(found) < verbalizer.num_words:
        words = [embedding[:, None] for _, embedding, _ in found]
        hidden = read(network, None, torch.cat([prompt, *words], dim=1))
        logits = only_words(network.head(hidden[:, -1]), verbalizer.is_word)
        noise = gumbel_noise(keys, len(found), logits.shape[1])
        word = straight_through(logits, noise, temperature)
        found.append((word.argmax(-1), embedded(network, word), logits))
    for hook in hooks:
        hook.remove()
    return Explanation(*(torch.stack(each, 1) for each in zip(*found, strict=True)))


V, D, LENGTH = 12, 16, 10  # sizes of the cases


def batch_of(number=6, seed=0):
    """Return documents of several lengths, with a position in each."""
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


def statistics(subject):
    """Return statistics of another hundred documents, for each layer."""
    batch, found = batch_of(100, seed=1), []
    rows, place = torch.arange(100), batch["position"]
    current = batch["input_ids"][rows, place]
    keep = current != 3  # a token that training never sees
    for hidden in subject.of_layers(batch["input_ids"]):
        chunk = (x[keep].numpy() for x in (hidden[rows, place], current, place))
        found.append(statistics_of([tuple(chunk)]))
    return found


@torch.no_grad()
def lens_and_baselines(*layers, is_moved=False):
    """Return a lens with the statistics of a hundred documents, and its baselines."""
    subject = Subject(own(vocab_size=V, num_heads=2), *layers)
    lens = Lens(subject, Tokenizer(V), LensOptions(num_words=4)).eval()
    lens.token_counts.copy_(torch.arange(V) * (torch.arange(V) < V - 1))
    if is_moved:  # else verbalizer and reconstructor equal the subject
        moved(lens, 0.02)
    found = statistics(subject)
    lens.mean.copy_(torch.from_numpy(np.stack([one.mean for one in found])).view_as(lens.mean))
    lens.variance.copy_(torch.tensor([one.variance for one in found]).view_as(lens.variance))
    baselines = [Baselines(one, V) for one in found]
    for index, one in enumerate(baselines):
        one.tuned = tuned_map(subject, [batch_of(50, seed=2)], index)  # type: ignore[list-item]
    return lens, baselines


@torch.no_grad()
def case_of(batch=None, kind=Case, is_moved=True, told=0):
    """Return a case whose partners are the batch shifted by one row."""
    batch = batch or batch_of()
    lens, baselines = lens_and_baselines(1, is_moved=is_moved)
    activation = lens.activation(batch)
    lens.told_map = torch.zeros(V, activation.shape[1] + 1)
    lens.told_map[:, -1] = -torch.arange(V)  # favours words of low numbers
    return kind(lens, baselines, batch, activation, activation.roll(1, 0), TeacherText(told))


def part_of(batch, rows):
    return {name: values[rows] for name, values in batch.items()}
