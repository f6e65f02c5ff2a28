"""Toy runs in float32 on several numbers of forked processes, for the test beside it.

python -m tests.distributed.bitwise_run FOLDER --devices 4 2 1 [--plain] [--resume_on 2]
"""

import argparse
from pathlib import Path

import torch

from lit_models.training.callbacks import BitwiseSum, LastCheckpoint, Ledger
from tests.toy import LitToy, ToyData, toy_trainer

STEPS, CHUNKS, SIZE = 20, 8, 16


def fit(folder: Path, devices: int, steps: int, plain: bool, ckpt_path: Path | None = None) -> None:
    """Train on some processes; every step has 8 chunks of 2 samples, 7 steps are an epoch."""
    callbacks = [Ledger(), LastCheckpoint(every_n_steps=10, every_epoch=False)]
    trainer = toy_trainer(
        folder,
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        precision=32,
        max_epochs=9,
        max_steps=steps,
        gradient_clip_val=0.5,
        limit_val_batches=0,
        callbacks=callbacks if plain else [*callbacks, BitwiseSum()],
    )
    data = ToyData(100, global_batch_size=SIZE, micro_batch_size=SIZE // CHUNKS)
    trainer.fit(LitToy(), data, ckpt_path=ckpt_path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, nargs="+")  # 1 last: a used process forks badly
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--resume_on", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for devices in args.devices:
        folder = args.folder / str(devices)
        if args.resume_on:
            fit(folder, devices, STEPS // 2, args.plain)
            last = folder / "checkpoints" / "last.ckpt"
            fit(folder, args.resume_on, STEPS, args.plain, last)
        else:
            fit(folder, devices, STEPS, args.plain)


if __name__ == "__main__":
    main()
