"""The command `evaluate`: lm-eval's tasks on a checkpoint, on any number of devices."""

from __future__ import annotations

import functools
import importlib
import json
import os
from pathlib import Path


def evaluate(
    *,
    checkpoint: str,
    tasks: list[str],
    to: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    run_options: list[str] | None = None,
) -> int:
    """Run tasks of lm-eval on a language model, and write a table and results.json.

    The figures are those of lm-eval's own `hf` model on the exported folder, on any number of
    devices. Nothing is fetched: tasks read files of this machine (`dataset_path: json`), unless
    HF_HUB_OFFLINE=0 allows the network. A task may name functions of Python files beside it; these
    are executed. The same command resumes an interrupted evaluation.

    Args:
        checkpoint: a checkpoint, an exported folder, or a Hugging Face model folder.
        tasks: a folder of task files (.yaml), such a file, or a name that lm-eval knows;
            repeatable.
        to: folder of results.json and the answers; by default `evaluation` in the run's folder.
        num_fewshot: number of examples before each question, except in tasks that set 0.
        limit: use only so many first questions of each task, for a trial.
        chat: put questions into the chat template of the model's tokenizer.
        run_options: options of the trainer and the data, such as --trainer.devices=2
            --trainer.strategy=ddp --trainer.precision=bf16-true --data.global_batch_size=64.
    """
    # The libraries read these at import.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", os.environ["HF_HUB_OFFLINE"])
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from lit_models.errors import UsageError

    try:
        harness = importlib.import_module("lit_models.evaluate.harness")
    except ImportError as error:
        raise UsageError(f"{error}: pip install 'unisono[eval]'.") from error
    from lit_models.cli import launch

    argv = ["predict", "--data=lit_models.evaluate.harness.RequestDataModule"]
    config = Path(checkpoint).expanduser() / "config.json"
    if config.exists() and "class_path" not in json.loads(config.read_text(encoding="utf-8")):
        argv += ["--model=lit_models.LitCausalLM", "--model.optimizer=torch.optim.SGD"]
        argv += [f"--model.pretrained={checkpoint}"]
    else:
        argv += [f"--ckpt_path={checkpoint}"]
    how = {"num_fewshot": num_fewshot, "limit": limit, "apply_chat_template": chat}
    kind = functools.partial(harness.EvaluationCLI, tasks=tasks, to=to, **how)
    return launch([*argv, "--trainer.enable_progress_bar=false", *(run_options or [])], kind)
