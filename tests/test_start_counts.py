"""Counts, not seconds: what a start imports, what a step exchanges and fetches."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import ROOT
from tests.start_counts import COUNTED_STEPS, FITTED, PARSED

# Each costs every process of every run up to a second, and no debug run needs one of them.
NEEDLESS = (
    "IPython",
    "deepspeed",
    "matplotlib",
    "pandas",
    "peft",
    "scipy",
    "sentence_transformers",
    "sklearn",
    "tensorboard",
    "torchmetrics.functional",
    "transformers",
    "wandb",
)
NUM_STEPS = len(COUNTED_STEPS)


def answered(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answered("-W", "ignore", "-m", "tests.start_counts", str(tmp_path_factory.mktemp("x")))


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
    assert not any(n.startswith("tokenizers") for n in counts["occupation_coder/debug"])


@pytest.mark.parametrize("rank", ["rank 0", "rank 1"])
def test_a_step_of_two_ranks_is_one_bucket_and_one_vector(counts: dict, rank: str) -> None:
    assert counts[rank] == {"c10d::allreduce_": 2 * NUM_STEPS}


def test_between_two_log_lines_a_step_fetches_its_gradient_norm_alone(counts: dict) -> None:
    # On a CPU NonFinite decides by it; a GPU's optimizer does so itself. The ledger's numbers come
    # by HostCopy, which no GPU is waited for.
    assert counts["synchronisations"] == {"item": NUM_STEPS}


def test_all_of_torchmetrics_is_there_for_whoever_asks(counts: dict) -> None:
    late = {"early": False, "there": True, "one": True, "missing": []}
    assert counts["torchmetrics"] == late


def test_another_torchmetrics_is_imported_as_without_the_hook(tmp_path: Path) -> None:
    package = tmp_path / "torchmetrics"
    package.mkdir()
    (package / "__init__.py").write_text("from torchmetrics.other import Metric\n")
    (package / "other.py").write_text("class Metric: pass\n")
    install = "from lit_models import late_torchmetrics; late_torchmetrics.install()"
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    ask = "import torchmetrics; print('\"' + torchmetrics.Metric.__module__ + '\"')"
    assert answered("-c", f"{install}\n{path}\n{ask}") == "torchmetrics.other"


def questions_of(folder: Path, init: str, questions: str) -> Any:
    """Returns the answer of a program in which torchmetrics is small, and late."""
    package = folder / "torchmetrics"
    (package / "utilities").mkdir(parents=True)
    (package / "utilities" / "__init__.py").write_text("")
    (package / "__about__.py").write_text("__version__ = '0'\n")
    (package / "metric.py").write_text("class Metric: pass\n")
    (package / "collections.py").write_text("class MetricCollection: pass\n")
    (package / "__init__.py").write_text(init)
    install = "from lit_models import late_torchmetrics; late_torchmetrics.install()"
    first = f"import json, sys, threading; sys.path.insert(0, {str(folder)!r}); import torchmetrics"
    return answered("-c", f"{install}\n{first}\n{questions}")


def test_an_init_of_torchmetrics_that_fails_says_why_each_time(tmp_path: Path) -> None:
    init = "from torchmetrics.metric import Metric\nraise OSError('no disk')\n"
    ask = """
said = []
for _ in range(2):
    try:
        torchmetrics.Accuracy
    except Exception as error:
        said.append(str(error))
print(json.dumps(said))"""
    assert questions_of(tmp_path, init, ask) == ["no disk", "no disk"]


def test_a_second_thread_waits_for_the_names_of_torchmetrics(tmp_path: Path) -> None:
    init = "import time\nnum = globals().get('num', 0) + 1\ntime.sleep(0.3)\nAccuracy = num\n"
    ask = """
said = []
threads = [threading.Thread(target=lambda: said.append(torchmetrics.Accuracy)) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
said.append(hasattr(torchmetrics, 'Nothing'))
print(json.dumps(said))"""
    assert questions_of(tmp_path, init, ask) == [1, 1, 1, False]
