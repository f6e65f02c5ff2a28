"""A short run of a writer, its test and its prediction.

python -m tests.distributed.writer_run FOLDER --devices 2 --strategy fsdp
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lit_models.cli_errors import run_guarded
from tests.seo.pages import pages_of, write_pages, writer
from tests.toy import toy_trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = write_pages(folder / "pages.jsonl", 11)
    given = {"predict_files": path, "predict_output": str(folder / "out.jsonl")}
    data, module = pages_of(path, **given), writer(onpage=True)
    trainer = toy_trainer(folder, devices=args.devices, strategy=args.strategy, max_epochs=12)
    trainer.fit(module, data)
    validated = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val/")}
    [tested] = trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    if trainer.is_global_zero:
        (folder / "metrics.json").write_text(json.dumps({**validated, **tested}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
