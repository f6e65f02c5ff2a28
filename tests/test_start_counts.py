"""Counts, not seconds: modules imported at the start, collectives and fetches of a step."""

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from lit_models.training import default_callbacks
from tests.distributed.launch import in_world, run
from tests.toy import LitToy, ToyData, toy_trainer

pytestmark = pytest.mark.slow
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
    """Return the counts of a counter in a toy training."""

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


def of_two_ranks(folder: Path) -> None:
    print(f"collectives: {of_training(folder, Collectives(), devices=2, strategy='ddp')}")


def imported_by(code: str) -> list[str]:
    """Return the modules that a new interpreter has imported after this code."""
    done = run("-c", f"{code}\nimport json; print(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_help_imports_neither_torch_nor_any_other_package() -> None:
    code = "import lit_models.training, lit_models.occupation_coder, lit_models.causal_lm, sys\n"
    names = imported_by(f"{code}from lit_models.__main__ import run; run(['--help'])")
    others = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert not others & {"torch", "numpy", "lightning", "jsonargparse", "torchmetrics", *NEEDLESS}
    assert len(names) < 250


RUNS = """
import contextlib, sys
from lit_models.__main__ import run
options = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.logger=false"]
options.append("--trainer.default_root_dir=FOLDER")
run(["fit", "--config=occupation_coder/debug.yaml", *options])
for name in ("causal_lm/debug", "consistency_lens/debug", "seo/ranker_debug", "seo/writer_debug"):
    with contextlib.suppress(SystemExit):
        run(["fit", f"--config={name}.yaml", *options, "--print_config"])
"""


def test_a_run_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    names = imported_by(RUNS.replace("FOLDER", str(tmp_path)))
    assert "lit_models.consistency_lens.module" in names
    assert not {*NEEDLESS} & {*names}


def test_a_command_that_only_reads_a_run_imports_no_lightning(tmp_path: Path) -> None:
    toy_trainer(tmp_path, max_epochs=1).fit(LitToy(), ToyData())
    code = f"from lit_models.__main__ import run; run(['verify', '{tmp_path}'])"
    names = imported_by(f"import sys; {code}")
    assert "lit_models.run_files" in names
    assert "lightning" not in {name.partition(".")[0] for name in names}


def test_a_step_of_two_ranks_is_one_bucket_and_one_vector(tmp_path: Path) -> None:
    printed = in_world(2, of_two_ranks, tmp_path)
    assert printed.count(f"collectives: {{'c10d::allreduce_': {2 * NUM_STEPS}}}") == 2


def test_between_two_log_lines_a_step_fetches_its_gradient_norm_alone(tmp_path: Path) -> None:
    # On a CPU NonFinite reads the gradient's norm; a GPU's optimizer skips the step itself.
    # HostCopy fetches the ledger's numbers without waiting for a GPU.
    assert of_training(tmp_path, Synchronisations()) == {"item": NUM_STEPS}
