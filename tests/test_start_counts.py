"""Counts, not seconds: what a start imports, what a step exchanges and fetches."""

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.distributed.launch import ROOT
from tests.start_counts import COUNTED_STEPS, FITTED, PARSED

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
    begin = time.monotonic()
    names = answered("-c", f"{code}\n{show}")
    assert time.monotonic() - begin < 2
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
