"""Toy runs in float32 with dropout on several numbers of processes, for the test beside it.

python -m tests.distributed.bitwise_run FOLDER
"""

import sys
from pathlib import Path

import torch

from lit_models.training import BitwiseSum, ExactDropout, LastCheckpoint, Ledger
from tests.toy import LitToy, ToyData, toy_trainer

STEPS, CHUNKS, SIZE = 20, 8, 16


def fit(
    folder: Path,
    devices: int,
    steps: int = STEPS,
    is_bitwise: bool = True,
    ckpt_path: Path | None = None,
) -> None:
    """Train; every step has 8 chunks of 2 samples, 7 steps are an epoch."""
    callbacks = [Ledger(), LastCheckpoint(every_n_steps=10, every_epoch=False), ExactDropout()]
    trainer = toy_trainer(
        folder,
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        precision=32,
        max_epochs=9,
        max_steps=steps,
        gradient_clip_val=0.5,
        limit_val_batches=0,
        enable_checkpointing=False,
        callbacks=[*callbacks, BitwiseSum()] if is_bitwise else callbacks,
    )
    data = ToyData(100, global_batch_size=SIZE, micro_batch_size=SIZE // CHUNKS)
    trainer.fit(LitToy(dropout=0.3), data, ckpt_path=ckpt_path)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for devices in (4, 2):
        fit(folder / f"{devices} devices", devices)
    fit(folder / "2, then 4 devices", 2, STEPS // 2)
    last = folder / "2, then 4 devices" / "checkpoints" / "last.ckpt"
    fit(folder / "2, then 4 devices", 4, ckpt_path=last)
    fit(folder / "plain, 2 devices", 2, is_bitwise=False)
    fit(folder / "plain, 1 device", 1, is_bitwise=False)  # a used process forks badly: 1 comes last
    fit(folder / "1 device", 1)


if __name__ == "__main__":
    main()
