"""A short run of a language model with samples, and its completions of prompts.

python -m tests.distributed.generation_run FOLDER --devices 2 --strategy fsdp
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from datamodules.files.splitting import TextSplit
from datamodules.text.texts import TextDataModule
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.module import LitCausalLM, Samples
from lit_models.causal_lm.network import DecoderConfig
from lit_models.errors import run_guarded
from lit_models.training import default_callbacks
from tests.toy import toy_trainer

PROMPTS = ["a", "", "longer than the others", "a", "b c", "d e f", "ghi", "abc", "x", "a b"]
# Some of them end early: ranks make different numbers of steps.
OPTIONS = GenerationOptions(12, 1.0, seed=3, stop=["e", "a "])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    text, prompts = folder / "text.txt", folder / "prompts.jsonl"
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 30, encoding="utf-8")
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), "utf-8")
    seed_everything(1)
    shape = {"max_positions": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    module = LitCausalLM(optimizer, network=DecoderConfig(**shape), generation=OPTIONS)
    data = TextDataModule(
        str(text),
        context_length=32,
        layout="blocks",
        split=TextSplit(by="tail"),
        global_batch_size=8,
        predict_files=str(prompts),
        predict_output=str(folder / "out.jsonl"),
    )
    trainer = toy_trainer(
        folder,
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=2,
        logger=TensorBoardLogger(folder, name="board", version=""),
        callbacks=[*default_callbacks(), Samples(["the", "d"], 3, OPTIONS, prints_last=True)],
    )
    trainer.fit(module, data)
    data.global_batch_size = 2  # several batches for each rank
    trainer.predict(module, data, return_predictions=False)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
