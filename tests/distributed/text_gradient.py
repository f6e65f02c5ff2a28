"""One step of plain gradient descent on ragged documents: what it took off is the gradient.

[torchrun --nproc_per_node=2] -m tests.distributed.text_gradient FOLDER DOCUMENTS MICRO_BATCH…
"""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything

from datamodules import TextDataModule
from datamodules.core.planned import LoaderOptions
from lit_models import LitCausalLM
from lit_models.causal_lm.network import DecoderConfig
from tests.toy import toy_trainer

SMALL = DecoderConfig(max_positions=64, hidden_size=16, num_layers=2, num_heads=2)
WORDS = ("the", "old", "baker", "sold", "bread", "and", "salt", "by", "weight")


def write_documents(path: Path, number: int = 8, seed: int = 0) -> None:
    """Write documents of 1 to 60 characters."""
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, rng.integers(1, 10))) + f" {n}" for n in range(number)]
    rows = ['{"text": "' + line[:60] + '"}' for line in lines]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def gradient(folder: Path, documents: str, micro_batch_size: int) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter over 8 documents, as the first step takes it."""
    seed_everything(1, verbose=False)
    module = LitCausalLM(partial(torch.optim.SGD, lr=1.0), network=SMALL)
    data = TextDataModule(
        train_files=documents,
        validation_files=documents,
        layout="documents",
        context_length=64,
        global_batch_size=8,
        micro_batch_size=micro_batch_size,
        loader=LoaderOptions(num_workers=0),
    )
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = toy_trainer(
        folder,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision=32,
        max_steps=1,
        limit_val_batches=0,
    )
    before: dict[str, torch.Tensor] = {}
    built = module.configure_model

    def noting() -> None:
        built()
        before.update({name: p.detach().clone() for name, p in module.named_parameters()})

    module.configure_model = noting  # type: ignore[method-assign]
    trainer.fit(module, data)
    assert trainer.accumulate_grad_batches == 8 // (micro_batch_size * devices)
    return {name: before[name] - p.detach() for name, p in module.named_parameters()}


def main() -> None:
    torch.set_num_threads(1)
    folder, documents = Path(sys.argv[1]), sys.argv[2]
    for micro in map(int, sys.argv[3:]):
        name = f"{os.environ.get('WORLD_SIZE', '1')}-{micro}"
        found = gradient(folder / name, documents, micro)
        if os.environ.get("RANK", "0") == "0":
            torch.save(found, folder / f"{name}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
