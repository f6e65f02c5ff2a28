"""Counts, not seconds: modules imported at the start, collectives and fetches of a step.

Each count runs in a fork, so that the imports, which take seconds, happen once. Called as
`python -m tests.test_start_counts FOLDER`, the file prints one JSON object, question -> answer.
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
FITTED = ("causal_lm/debug", "occupation_coder/debug")  # their data is made quickly
PARSED = ("seo/ranker_debug", "seo/writer_debug", "consistency_lens/debug")
COUNTED_STEPS = range(3, 9)  # DDP rebuilds its buckets after the first step
# Each costs every process of every run up to a second, and no debug run needs one of them. Modules
# that `import lightning` imports itself, such as transformers, are not listed.
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
    """Counts calls of the process group's collectives in COUNTED_STEPS, which log nothing."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def start(self) -> None:
        self.profiler.start()

    def stop(self) -> None:
        self.profiler.stop()
        self.names.update(e.name for e in self.profiler.events() if e.name.startswith("c10d::"))


class Synchronisations(TorchDispatchMode):
    """Counts numbers fetched from a tensor: each fetch makes the host wait for the device."""

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
    """Returns the counts of a counter in a toy training."""
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

    # First and last in the list, so that the project's own callbacks are counted too.
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
    """Returns the modules imported after a run without loggers, or after its parsing only."""
    argv = ["fit", f"--config=configs/{config}.yaml", f"--trainer.default_root_dir={folder}"]
    argv += ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.logger=false"]
    if config == "causal_lm/debug":  # whose demo text has a million tokens
        folder.mkdir(parents=True)
        lines = [json.dumps({"text": f"{n} hens sat on a mat. " * 9}) + "\n" for n in range(40)]
        (folder / "hens.jsonl").write_text("".join(lines))
        argv.append(f"--data.train_files={folder / 'hens.jsonl'}")
    with contextlib.suppress(SystemExit):  # raised by --print_config
        run(argv if is_fitted else [*argv, "--print_config"])
    return sorted(sys.modules)


def forked(answer: Callable[[], Any], path: Path) -> int:
    """Starts a fork that writes an answer to a file; returns its process id."""
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
    os._exit(0)  # the missing answer shows the failure


def main(folder: Path) -> None:
    """Asks all questions, the cheap ones in parallel."""
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
    # On a CPU NonFinite reads the gradient's norm; a GPU's optimizer skips the step itself.
    # HostCopy fetches the ledger's numbers without waiting for a GPU.
    assert counts["synchronisations"] == {"item": NUM_STEPS}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
