"""The chain for GPT-2: submitted with each stage's devices, and run on a small random GPT-2."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.causal_lm.folders import saved_with_bytes

CHAIN = "--config=consistency_lens/gpt2_chain.yaml"
MODEL = {
    "lr_scheduler.restarts": [2],
    "lr_scheduler.warmup": 1,
    "losses.teacher_text.end": 2,
    "losses.teacher_reconstruction.end": 2,
    "losses.reconstruction.begin": 2,
    "losses.reference.begin": 2,
    "temperature": "{begin: 2, until: 4}",
}
TRAINER = {"max_steps": 4, "val_check_interval": 2, "limit_test_batches": 1}
OF_ALL = {"accelerator": "cpu", "enable_progress_bar": "false", "enable_model_summary": "false"}


@pytest.mark.slow
def test_each_stage_is_submitted_with_its_own_devices(done, own_folder):
    saved_with_bytes(Path("gpt2"), "GPT2", n_layer=7)
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("a story\n")
    counts = ["--change.dump.devices=8", "--change.lens.devices=1", "--change.tested.devices=2"]
    done("submit", CHAIN, *counts, "--gpus-per-node=4", "--dry-run")
    jobs = [path.read_text() for path in sorted(Path("jobs/consistency_lens").iterdir())]
    asked = [("--nodes=2", "-node=4"), ("--nodes=1", "node=1"), ("--nodes=1", "node=2")]
    for job, words in zip(jobs, [*asked, asked[1]], strict=True):
        assert all(word in job for word in words), job


@pytest.mark.slow
def test_a_small_gpt2_passes_through_the_chain(done, own_folder):
    saved_with_bytes(Path("gpt2"), "GPT2", n_layer=7, n_positions=128)
    Path("texts").mkdir()
    random = np.random.default_rng(0)
    for number in range(60):
        words = " ".join(random.choice(["owl", "cat", "at", "the"], 12))
        Path(f"texts/{number}.txt").write_text(f"{words}\n")
    given = {f"lens.options.model.{name}": value for name, value in MODEL.items()}
    for stage in ("dump", "lens", "tested", "explained"):
        of_stage = {"data.loader.num_workers": 0, "data.global_batch_size": 8}
        of_stage |= {f"trainer.{name}": value for name, value in OF_ALL.items()}
        of_stage |= {f"trainer.{n}": v for n, v in TRAINER.items() if stage != "dump"}
        given |= {f"{stage}.options.{name}": value for name, value in of_stage.items()}
        given[f"{stage}.devices"] = 1
    changes = [f"--change.{name}={value}" for name, value in given.items()]
    done("chain", CHAIN, *changes)
    folder = Path("runs/gpt2-lens-1")
    rows = json.loads((folder / "tested/controls.json").read_text())["rows"]["all"]
    assert rows["greedy"]["count"] == 8
    lines = (folder / "explained/explanations.jsonl").read_text().splitlines()
    assert len(lines) == len(np.load(folder / "dump/activations/test.position.npy")) > 4
    assert done("chain", CHAIN, *changes).count("is complete: skipped") == 4
