"""Tiny language models with random weights, what they write, and short trainings."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from datamodules.files.splitting import TextSplit
from datamodules.text.prompts import FINISH_REASONS, completion_text
from datamodules.text.texts import TextDataModule
from datamodules.tokenizers.text import byte_tokenizer
from lit_models.causal_lm.generation import generate
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.pretrained import PretrainedDecoder
from lit_models.training import default_callbacks
from tests.toy import toy_trainer

TOKENIZER = byte_tokenizer()
TEXT = "the cat sat on the mat and the dog sat on the log, so they sat and sat. " * 20
SHAPE = {"vocab_size": 257, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
PROMPTS = [[7], list(range(60, 71)), [256, 40, 41], [256], [100, 3, 99, 200, 17, 5]]


def own(max_positions: int = 64, **shape) -> nn.Module:
    torch.manual_seed(0)
    network = Decoder(DecoderConfig(max_positions=max_positions, **SHAPE, **shape)).double().eval()
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)  # far from uniform, so that texts differ
    return network


def own_gpt2(max_positions: int = 64) -> nn.Module:
    shape = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}
    return own(max_positions, **shape)


def own_llama(max_positions: int = 64) -> nn.Module:
    return own(max_positions, num_kv_heads=2)


def transformers_llama(max_positions: int = 64) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.4,
    )
    return PretrainedDecoder(LlamaForCausalLM(config), config.to_dict()).double().eval()


def transformers_gpt2(max_positions: int = 64) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": max_positions}
    config = GPT2Config(vocab_size=257, initializer_range=0.4, **shape)
    return PretrainedDecoder(GPT2LMHeadModel(config), config.to_dict()).double().eval()


@torch.no_grad()
def next_logits(network: nn.Module, ids: list[int]) -> Tensor:
    """What follows one text, without any cache."""
    row = torch.tensor([ids])
    if isinstance(network, Decoder):
        positions = torch.arange(len(ids))[None]
        return network.head(network(row, positions, torch.zeros_like(row)))[0, -1]
    return network.model(row, use_cache=False).logits[0, -1]


def completed(network, prompts, options, keys=None, tokenizer=TOKENIZER):
    """Return (ids, reason, text) of each prompt, generated together."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    keys = range(len(rows)) if keys is None else keys
    done = generate(network, tokenizer, input_ids, lengths, list(keys), options)
    assert done.completion_ids.shape == (len(rows), options.max_new_tokens)
    assert done.completion_ids.dtype == torch.int64
    assert ((done.completion_ids >= 0).sum(1) == done.num_tokens).all()
    return [
        (
            ids[ids >= 0].tolist(),
            FINISH_REASONS[reason],
            completion_text(tokenizer, ids.numpy(), characters),
        )
        for ids, reason, characters in zip(
            done.completion_ids, done.finish_reason, done.num_characters, strict=True
        )
    ]


def trained_on_blocks(
    folder: Path, module: Any, data: Any = None, ckpt_path: Any = None, **options: Any
) -> Any:
    """Train a module on blocks of TEXT; `options` are the trainer's."""
    folder.mkdir(exist_ok=True)
    text = folder.parent / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    seed_everything(1, verbose=False)
    sizes = {"context_length": 16, "global_batch_size": 8, "micro_batch_size": 4, **(data or {})}
    blocks = TextDataModule(str(text), layout="blocks", split=TextSplit(by="tail"), **sizes)
    trainer = toy_trainer(folder, **{"callbacks": default_callbacks(), **options})
    trainer.fit(module, blocks, ckpt_path=ckpt_path)
    return module
