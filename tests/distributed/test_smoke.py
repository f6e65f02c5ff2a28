"""The command line as its users start it: each debug.yaml on one and two CPU devices."""

from pathlib import Path

import pytest

from lit_models.config_files import shipped_configs
from tests.distributed.launch import run

DEBUG = [name for name in shipped_configs() if name.endswith("debug.yaml")]


# On one device tests/test_configs.py runs them all; three of seo share the retriever's base.
REPEATED = ("seo/scorer_debug.yaml", "seo/ranker_debug.yaml", "seo/writer_debug.yaml")
CASES = [
    pytest.param(
        name,
        devices,
        marks=pytest.mark.soak if devices == 1 or name in REPEATED else pytest.mark.slow,
    )
    for name in DEBUG
    for devices in (1, 2)
]


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "devices"), CASES)
def test_a_debug_config_runs(tmp_path: Path, name: str, devices: int) -> None:
    done = run(
        "-m", "lit_models", "fit", "--config", name, "--test_after_fit=true",
        f"--trainer.devices={devices}", "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={tmp_path / 'run'}", timeout_s=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "test/" in done.stdout
    assert f"= {devices} devices x" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()
