"""What the GPU rows stand beside: a loop as nanoGPT has it, and transformers with accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.causal_lm.network import Decoder
from tests.benchmarks.gpu_rows import CLIP, STEPS, Found, Rounds, device
from tests.benchmarks.gpu_sizes import Size
from tests.benchmarks.language_model_peers import plain_logits
from tests.benchmarks.language_model_runs import adamw

LossOf = Callable[[Tensor, Tensor], Tensor]  # inputs, labels -> mean loss


def nanogpt_loop(size: Size, folder: Path) -> Found:
    """Train the same network as nanoGPT does: all of it compiled, autocast, full logits."""
    torch.manual_seed(0)
    with device():
        network = Decoder(size.config)

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(plain_logits(network, inputs).flatten(0, 1), labels.flatten())

    return steps(size, torch.compile(loss_of), list(network.parameters()))


def transformers_loop(size: Size, folder: Path) -> Found:
    """Train the same shape of transformers under accelerate."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device():
        model = AutoModelForCausalLM.from_config(_config(size), dtype=torch.float32)
    model = Accelerator(mixed_precision="bf16").prepare(model.train())

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return steps(size, loss_of, list(model.parameters()))


def _config(size: Size) -> Any:
    """Return the network's shape as transformers has it; without dropout, as ours."""
    from transformers import GPT2Config, LlamaConfig

    c = size.config
    if c.positions == "learned":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(
            vocab_size=c.vocab_size, n_positions=size.length, n_embd=c.hidden_size,
            n_layer=c.num_layers, n_head=c.num_heads, **dropout,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.kv_heads,
        intermediate_size=c.inner_size, tie_word_embeddings=c.tied,
        max_position_embeddings=size.length,
    )  # fmt: skip


def steps(size: Size, loss_of: LossOf, parameters: list[Any]) -> Found:
    """Return what a loop finds that trains on random rows, which lie on the device already."""
    rounds, optimizer = Rounds(), adamw(parameters)
    shape = (size.rows, size.length + 1)
    for _ in range(STEPS):
        ids = torch.randint(size.config.vocab_size, shape, device=device())
        with torch.autocast(device().type, torch.bfloat16):
            loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        rounds.note(size.rows * size.length)
    return rounds.found(size.flops_per_token)
