"""Runs on Ray workers: the command line's options, and a world that grows and loses a worker."""

import os
import signal
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

pytest.importorskip("ray", reason="extra: ray")
import ray
from ray.cluster_utils import Cluster

from lit_models.cli import chosen_run
from lit_models.config_files import find_config
from lit_models.engines import on_ray
from lit_models.engines.jobs import world_sizes
from lit_models.engines.on_ray import launch, space
from lit_models.errors import UsageError
from tests.distributed.launch import PATIENCE_S, ended, run, started
from tests.engines.worlds import assert_undisturbed, wait_for_world

RUN = (
    *("-m", "lit_models", "fit", "--config=occupation_coder/debug.yaml"),
    *("--trainer.precision=64-true", "--trainer.limit_train_batches=600"),
    *("--trainer.limit_val_batches=0", "--trainer.strategy=ddp"),
)


def test_workers_are_a_number_or_two():
    assert world_sizes("4", "--engine.workers") == (4, 4)
    assert world_sizes("1:8", "--engine.workers") == (1, 8)
    for text in ("", "0", "3:2", "1:", "a"):
        with pytest.raises(UsageError, match="--engine.workers"):
            world_sizes(text, "--engine.workers")


def test_values_to_try_are_those_of_ray_tune():
    rate = space("model.optimizer.lr", "loguniform(1e-4, 1e-2)")
    assert all(1e-4 <= rate.sample() <= 1e-2 for _ in range(20))
    assert set(space("data.global_batch_size", "choice(8, 16)").sample(size=50)) == {8, 16}
    with pytest.raises(UsageError, match="model.optimizer.lr must be one of"):
        space("model.optimizer.lr", "exec(1)")


@pytest.mark.parametrize(
    ("word", "message"),
    [("--engine.wokers=2", "there is no option"), ("--ckpt_path=a", "goes on from the newest")],
)
def test_a_wrong_command_line_is_refused_before_ray_starts(word, message):
    with pytest.raises(UsageError, match=message):
        launch(["fit", "--config=occupation_coder/debug.yaml", "--engine=ray", word])
    assert not ray.is_initialized()


def test_an_evaluation_is_of_the_run_whose_config_is_given_and_of_no_later_namesake(
    own_folder, monkeypatch
):
    for folder in (Path("debug"), Path("debug-2")):
        (folder / "checkpoints").mkdir(parents=True)
        torch.save({"state_dict": {}}, folder / "checkpoints" / "last.ckpt")
        (folder / "ledger.jsonl").touch()
    Path("debug/config.yaml").write_text(find_config("occupation_coder/debug.yaml").read_text())
    for name in ("ray", "DataParallelTrainer"):
        monkeypatch.setattr(on_ray, name, asked := mock.MagicMock())
    launch(["test", "--config=debug/config.yaml", "--ckpt_path=auto", "--engine=ray"])
    argv = asked.call_args.kwargs["train_loop_config"]["argv"]
    assert chosen_run(argv).ckpt_path == str(own_folder / "debug/checkpoints/last.ckpt")


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_of_its_trials_of_words_too(tmp_path, toy_config):
    tune = '{"model.optimizer.lr": "choice(0.01)", "model.optimizer": "choice(torch.optim.SGD)"}'
    options = (f"--config={toy_config}", f"--trainer.default_root_dir={tmp_path / 'runs'}")
    done = run("-m", "lit_models", "fit", *options, "--engine=ray", f"--engine.tune={tune}")
    row = "model.optimizer.lr=0.01  model.optimizer=torch.optim.SGD\n"
    assert (done.returncode, row in done.stdout) == (0, True), done.stdout


@pytest.mark.slow
def test_workers_join_and_one_is_killed_without_a_trace(tmp_path):
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    undisturbed = started(*RUN, f"--trainer.default_root_dir={whole}")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    process, mark = started(
        *RUN,
        *(f"--trainer.default_root_dir={elastic}", "--engine=ray", "--engine.workers=1:2"),
        *("--engine.resize_s=2", f"--engine.address={cluster.address}"),
        is_fork=False,
    )
    try:
        wait_for_world(elastic, 1, 1)
        cluster.add_node(num_cpus=1)
        wait_for_world(elastic, 2, 2)
        named = [p for p in psutil.process_iter() if "RayTrainWorker" in " ".join(p.cmdline())]
        os.kill(max(p.pid for p in named), signal.SIGKILL)
        wait_for_world(elastic, 2, 3)
        printed = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 0, printed
        assert_undisturbed(elastic, whole, undisturbed)
    finally:
        ended(*undisturbed)
        ended(process, mark)
        process.stdout.close()
        cluster.shutdown()
