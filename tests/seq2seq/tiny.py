"""Tiny sequence-to-sequence networks with random weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.core.batches import padded_texts
from datamodules.tokenizers.text import byte_tokenizer
from lit_models.seq2seq.network import Network, PretrainedSeq2Seq, Seq2SeqConfig, Seq2SeqNetwork
from tests.text_corpora import saved_tokenizer

VOCAB, START, END = 12, 0, 1
SIZES: dict[str, dict[str, Any]] = {
    "T5": {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2},
    "MT5": {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "UMT5": {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2},
    "Bart": {
        **{"d_model": 8, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
        **{"max_position_embeddings": 64},
    },
}
KINDS = ("own", *SIZES)


def model_of_transformers(
    kind: str, vocab_size: int = VOCAB, end_id: int = END, **options: Any
) -> Any:
    """Return a model whose weights are large enough to tell tokens apart. Args: options, of its
    configuration."""
    import transformers

    torch.manual_seed(0)
    ids = {"decoder_start_token_id": START, "eos_token_id": end_id, "pad_token_id": START}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab_size,
        bos_token_id=None,
        forced_eos_token_id=None,
        **ids,
        **SIZES[kind],
        **options,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def network(kind: str) -> Network:
    """Return a network in eval mode."""
    if kind != "own":
        model = model_of_transformers(kind)
        return PretrainedSeq2Seq(model, model.config.to_dict()).eval()
    torch.manual_seed(0)
    sizes = {"width": 16, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    own = Seq2SeqNetwork(Seq2SeqConfig(vocab_size=VOCAB, **sizes), START).eval()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_(std=0.4)
    return own


def saved(folder: Path, kind: str = "T5") -> Path:
    """Save a byte model with its tokenizer; return the folder."""
    model_of_transformers(kind, vocab_size=257, end_id=256).save_pretrained(folder)
    return saved_tokenizer(byte_tokenizer(), folder)


SOURCES = [[5, 3, 9, 1], [4, 1], [7, 7, 2, 8, 11, 6, 1]]


def batch_of(sources: list[list[int]]) -> dict[str, Tensor]:
    """Return sources as a batch."""
    rows = [torch.tensor(ids).numpy() for ids in sources]
    return {**padded_texts(rows), "sample_id": torch.arange(len(rows))}
