"""Counts, not seconds: what a start imports, what a step exchanges and fetches.

What runs import and exchange is counted each in a fork: the imports, which take seconds, come once.
Called as `python -m tests.test_start_counts FOLDER`, it prints one JSON object, question -> answer.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from lit_models.__main__ import run
from tests.distributed.launch import PATIENCE_S, ROOT, free_port

pytestmark = pytest.mark.slow
FITTED = ("causal_lm/debug", "occupation_coder/debug")  # whose data is made quickly
PARSED = ("seo/ranker_debug", "seo/writer_debug", "consistency_lens/debug")
COUNTED_STEPS = range(3, 9)  # DDP builds its buckets anew after the first step
# Each costs every process of every run up to a second, and no debug run needs one of them; those
# that `import lightning` brings itself, such as transformers, are not listed.
NEEDLESS = (
    "IPython",
    "deepspeed",
    "matplotlib",
    "pandas",
    "peft",
    "sentence_transformers",
    "sklearn",
    "tensorboard",
    "wandb",
)
NUM_STEPS = len(COUNTED_STEPS)


class Collectives:
    """Counts what the process group is asked for in COUNTED_STEPS, in which nothing is logged."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def start(self) -> None:
        self.profiler.start()

    def stop(self) -> None:
        self.profiler.stop()
        self.names.update(e.name for e in self.profiler.events() if e.name.startswith("c10d::"))


class Synchronisations(TorchDispatchMode):
    """Counts the numbers that are fetched from a tensor: each lets the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            self.names["item"] += 1
        return func(*args, **(kwargs or {}))

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)


def of_training(folder: Path, counter: Any, **options: Any) -> dict[str, int]:
    """Returns what a counter found in a toy training."""
    from lightning.pytorch import Callback

    from lit_models.training import default_callbacks
    from tests.toy import LitToy, ToyData, toy_trainer

    class Counted(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == COUNTED_STEPS.start:
                counter.start()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == COUNTED_STEPS.stop:
                counter.stop()

    # First and last of all, so that what the project's callbacks do is counted as well.
    callbacks = [*default_callbacks(), Counted()]
    steps = {"max_steps": COUNTED_STEPS.stop + 3, "limit_val_batches": 0}
    quiet = {"log_every_n_steps": 1000, "callbacks": callbacks, "max_epochs": -1}
    trainer = toy_trainer(folder, **steps, **quiet, **options)
    trainer.fit(LitToy(partial(SGD, lr=1e-4)), ToyData(num_samples=200))
    return dict(counter.names)


def of_two_ranks(folder: Path, rank: int, port: int) -> dict[str, int]:
    """Returns the collectives of one of two ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return of_training(folder, Collectives(), devices=2, strategy="ddp")


def modules_of(config: str, folder: Path, is_fitted: bool) -> list[str]:
    """Returns the modules that are there after a run without loggers, or after its parsing."""
    argv = ["fit", f"--config=configs/{config}.yaml", f"--trainer.default_root_dir={folder}"]
    argv += ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.logger=false"]
    if config == "causal_lm/debug":  # whose demo text is a million tokens
        folder.mkdir(parents=True)
        lines = [json.dumps({"text": f"{n} hens sat on a mat. " * 9}) + "\n" for n in range(40)]
        (folder / "hens.jsonl").write_text("".join(lines))
        argv.append(f"--data.train_files={folder / 'hens.jsonl'}")
    with contextlib.suppress(SystemExit):  # which ends --print_config
        run(argv if is_fitted else [*argv, "--print_config"])
    return sorted(sys.modules)


def forked(answer: Callable[[], Any], path: Path) -> int:
    """Starts a fork that writes an answer to a file; returns its id."""
    process = os.fork()
    if process:
        return process
    signal.alarm(int(PATIENCE_S))
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = answer()
        path.write_text(json.dumps(found), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # who looks for the answer finds none


def main(folder: Path) -> None:
    """Asks all questions, the cheap ones side by side."""
    importlib.import_module("lit_models.cli")
    at_start = sorted(sys.modules)
    port = free_port()
    questions: dict[str, Callable[[], Any]] = {
        "synchronisations": lambda: of_training(folder / "toy", Synchronisations()),
        "rank 0": lambda: of_two_ranks(folder / "two", 0, port),
        "rank 1": lambda: of_two_ranks(folder / "two", 1, port),
    }
    for config in (*FITTED, *PARSED):
        is_fitted, place = config in FITTED, folder / config
        questions[config] = lambda c=config, p=place, f=is_fitted: modules_of(c, p, f)  # type: ignore[misc]
    paths = {name: folder / f"{name.replace('/', ' ')}.json" for name in questions}
    for process in [forked(question, paths[name]) for name, question in questions.items()]:
        os.waitpid(process, 0)
    answers = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    answers["launch"] = at_start
    print(json.dumps(answers))


def answered(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answered(
        "-W", "ignore", "-m", "tests.test_start_counts", str(tmp_path_factory.mktemp("x"))
    )


def test_help_imports_neither_torch_nor_any_other_package() -> None:
    code = "import lit_models.training, lit_models.occupation_coder, lit_models.causal_lm\n"
    code += "from lit_models.__main__ import run; run(['--help'])"
    show = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    names = answered("-c", f"{code}\n{show}")
    others = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert not others & {"torch", "numpy", "lightning", "jsonargparse", "torchmetrics", *NEEDLESS}
    assert len(names) < 250


@pytest.mark.parametrize("config", ["launch", *FITTED, *PARSED])
def test_a_run_imports_nothing_that_it_does_not_need(counts: dict, config: str) -> None:
    assert not set(NEEDLESS) & set(counts[config])


@pytest.mark.parametrize("config", [*FITTED, *PARSED])
def test_a_family_adds_few_modules_to_those_of_every_run(counts: dict, config: str) -> None:
    assert len(set(counts[config]) - set(counts["launch"])) < 200


def test_a_family_imports_no_other_but_the_one_it_builds_on(counts: dict) -> None:
    names = {n.split(".")[1] for n in counts["occupation_coder/debug"] if n.count(".") > 1}
    assert not names & {"causal_lm", "seo", "consistency_lens"}
    added = set(counts["occupation_coder/debug"]) - set(counts["launch"])
    assert not any(name.startswith("tokenizers") for name in added)


@pytest.mark.parametrize("rank", ["rank 0", "rank 1"])
def test_a_step_of_two_ranks_is_one_bucket_and_one_vector(counts: dict, rank: str) -> None:
    assert counts[rank] == {"c10d::allreduce_": 2 * NUM_STEPS}


def test_between_two_log_lines_a_step_fetches_its_gradient_norm_alone(counts: dict) -> None:
    # On a CPU NonFinite decides by it; a GPU's optimizer does so itself. The ledger's numbers come
    # by HostCopy, which no GPU is waited for.
    assert counts["synchronisations"] == {"item": NUM_STEPS}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
