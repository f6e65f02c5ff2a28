"""Tiny random models in folders, made by transformers."""

from pathlib import Path
from typing import Any

import torch

from datamodules.tokenizers.text import byte_tokenizer
from lit_models.causal_lm.pretrained import PretrainedDecoder
from tests.text_corpora import saved_tokenizer

VOCAB = 29
GPT2 = {"vocab_size": VOCAB, "n_positions": 12, "n_embd": 8, "n_layer": 2, "n_head": 2}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def made(kind: str, **options: Any) -> Any:
    """Return a transformers model whose weights are large enough to tell models apart."""
    import transformers

    torch.manual_seed(0)
    sizes = GPT2 if kind == "GPT2" else LLAMA
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def saved(folder: Path, kind: str, max_shard_size: str = "1GB", **options: Any) -> Any:
    """Return such a model after saving it into a folder."""
    model = made(kind, **options)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def of_transformers(kind: str, **options: Any) -> PretrainedDecoder:
    """Return such a model as one of our networks."""
    model = made(kind, **options)
    return PretrainedDecoder(model, model.config.to_dict())


def saved_with_bytes(folder: Path, kind: str, **options: Any) -> Path:
    """Save such a model with a byte tokenizer; return the folder."""
    saved(folder, kind, vocab_size=257, **options)
    return saved_tokenizer(byte_tokenizer(), folder)


def saved_canine(folder: Path) -> Path:
    """Write a CANINE with random weights."""
    import transformers

    config = transformers.CanineConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=256,
        num_hash_buckets=512,
        num_hash_functions=4,
    )
    torch.manual_seed(0)
    transformers.CanineModel(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def ragged_logits(model: Any, lengths: tuple[int, ...] = (5, 12, 1)) -> list[torch.Tensor]:
    """Return the logits of transformers, document by document."""
    return [model(tokens[None]).logits[0] for tokens in ragged_tokens(lengths)]


def ragged_tokens(lengths: tuple[int, ...] = (5, 12, 1)) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    return [torch.randint(VOCAB, (length,), generator=random) for length in lengths]


@torch.no_grad()
def packed_logits(network: Any, lengths: tuple[int, ...] = (5, 12, 1)) -> list[torch.Tensor]:
    """Return the logits of a network, all documents in one row, with padding."""
    tokens = torch.cat([*ragged_tokens(lengths), torch.zeros(2, dtype=torch.long)])
    places = torch.cat([*(torch.arange(n) for n in lengths), torch.zeros(2, dtype=torch.long)])
    ids = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)] + [-1, -1])
    hidden = network.eval()(tokens[None], places[None], ids[None])
    return list(network.head(hidden)[0].split([*lengths, 2]))[: len(lengths)]


def worst_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)
