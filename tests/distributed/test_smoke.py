"""The command line as users start it: each debug.yaml on one and two CPU devices.

One config is started with all its processes as a user does; ranks of the others are forks.
"""

from pathlib import Path

import pytest

from lit_models.config_files import shipped_configs
from tests.distributed.launch import in_world, run, unisono_here

DEBUG = [name for name in shipped_configs() if name.endswith("debug.yaml")]
STARTED = ("occupation_coder/debug.yaml", 2)
# tests/test_configs.py runs all of them on one device; three of seo share the retriever's base.
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
    command = [
        *("fit", "--config", name, "--test_after_fit=true", "--trainer.accelerator=cpu"),
        *(f"--trainer.devices={devices}", f"--trainer.default_root_dir={tmp_path / 'run'}"),
    ]
    if (name, devices) == STARTED:
        done = run("-m", "lit_models", *command)
        assert done.returncode == 0, done.stdout
        printed = done.stdout
    else:
        printed = in_world(devices, unisono_here, *command)
    assert "test/" in printed
    assert f"= {devices} device{'s' * (devices > 1)} x" in printed
    assert (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()
