"""Tiny language models with random weights, their generated texts, and short trainings."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from datamodules.files.splitting import TextSplit
from datamodules.text.prompts import FINISH_REASONS, completion_text
from datamodules.text.texts import TextDataModule
from datamodules.tokenizers.text import byte_tokenizer
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.generation import generate
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.training.ledger import Ledger
from tests.causal_lm.folders import of_transformers
from tests.toy import toy_trainer


class Made(TorchDispatchMode):
    """Keeps (name, size of its largest tensor, arguments) of each operation except views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.seen.append((func.name(), max(sizes, default=0), args))
        return result

    def largest(self) -> int:
        return max(size for _, size, _ in self.seen)


TOKENIZER = byte_tokenizer()
SENTENCE = "the cat sat on the mat and the dog sat on the log, so they sat and sat. "
TEXT = SENTENCE * 20
SHAPE = {"vocab_size": 257, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
SMALL = {"max_positions": 16, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
LORA = LoraOptions(["q_proj"], 2, 16.0)
BLOCKS = {"layout": "blocks", "micro_batch_size": 4, "split": TextSplit(by="tail")}
SGD = partial(torch.optim.SGD, lr=0.05)
# Options of a small model that reads FOLDER/text.txt.
MODEL_OPTIONS = [
    *("--model=lit_models.LitCausalLM", "--model.optimizer=torch.optim.SGD"),
    "--model.optimizer.lr=0.01",
]
SHAPE_OPTIONS = [f"--model.network.{name}={value}" for name, value in SMALL.items()]
DATA_OPTIONS = [
    *("--data=datamodules.TextDataModule", "--data.train_files=text.txt", "--data.split.by=tail"),
    *("--data.context_length=16", "--data.global_batch_size=8"),
    *("--trainer.accelerator=cpu", "--trainer.devices=1"),
    *(f"--trainer.enable_{name}=false" for name in ("progress_bar", "model_summary")),
]
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
    sizes = {"vocab_size": 257, "max_position_embeddings": max_positions}
    return of_transformers("Llama", **sizes).double().eval()


def transformers_gpt2(max_positions: int = 64) -> nn.Module:
    return of_transformers("GPT2", vocab_size=257, n_positions=max_positions).double().eval()


@torch.no_grad()
def next_logits(network: nn.Module, ids: list[int]) -> Tensor:
    """Return the logits of the token after a text, computed without a cache."""
    row = torch.tensor([ids])
    if isinstance(network, Decoder):
        positions = torch.arange(len(ids))[None]
        return network.head(network(row, positions, torch.zeros_like(row)))[0, -1]
    return network.model(row, use_cache=False).logits[0, -1]


def completed(network, prompts, options, keys=None, tokenizer=TOKENIZER):
    """Return (ids, reason, text) of each prompt, generated in one batch."""
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


def model(lora: LoraOptions | None = None, **options: Any) -> LitCausalLM:
    own = {key: options.pop(key) for key in list(options) if key in DecoderConfig.__match_args__}
    return LitCausalLM(SGD, network=DecoderConfig(**{**SMALL, **own}), lora=lora, **options)


def run(
    folder: Path,
    module: LitCausalLM,
    verb: str = "fit",
    steps: int = 1,
    ckpt_path: Any = None,
    is_known: bool = True,
    limits: dict[str, Any] | None = None,
    content: str = TEXT,
    **data: Any,
) -> Path:
    """Train or evaluate, and return a checkpoint.

    Args:
        is_known: set the trainer's ckpt_path before the call, as the command line does; else pass
            it to the call, as a script does.
        limits: trainer options that replace `steps` and the single ledger callback.
    """
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(content, encoding="utf-8")
    seed_everything(1, verbose=False)
    options = {"context_length": 16, "global_batch_size": 8, "micro_batch_size": 8}
    options |= {"split": TextSplit(by="tail", test_share=0.1), **data}
    read = TextDataModule(str(folder / "text.txt"), **options)
    if limits is None:
        limits = {"max_steps": steps, "callbacks": [], "enable_checkpointing": False}
        limits |= {"callbacks": [Ledger()], "limit_val_batches": 0} if verb == "fit" else {}
    trainer = toy_trainer(folder, **limits)
    path = None if ckpt_path is None else str(ckpt_path)
    if is_known:
        trainer.ckpt_path = path
    call = {} if is_known else {"ckpt_path": path}
    getattr(trainer, verb)(module, datamodule=read, weights_only=True, **call)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def texts_of(folder: Path) -> dict[tuple[str, int], str]:
    """Return (tag, step) -> text of the TensorBoard events in FOLDER/board."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "board"), size_guidance={"tensors": 0}).Reload()
    return {
        (tag, event.step): event.tensor_proto.string_val[0].decode()
        for tag in board.Tags()["tensors"]
        for event in board.Tensors(tag)
    }
