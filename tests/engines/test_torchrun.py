"""A run under torchrun whose nodes come and go, on loopback, beside an undisturbed run."""

import os
import signal

import pytest

from lit_models.commands.submit import Resources, submit
from tests.distributed.launch import PATIENCE_S, ended, free_port, processes_of, started
from tests.engines.worlds import assert_undisturbed, wait_for_world

pytestmark = pytest.mark.slow
# Seconds to wait for another node, and between heartbeats, three of which missing make a node dead;
# torchrun's defaults are 30 and 5.
SOON = "last_call_timeout=3,keep_alive_interval=1"
OPTIONS = (
    *("--data.num_samples=8000", "--trainer.precision=64-true", "--trainer.strategy=ddp"),
    *("--trainer.limit_val_batches=0", "--trainer.logger=false"),
)
PATIENT = "--trainer.callbacks+=tests.engines.worlds.Patient"


def test_nodes_come_and_go_and_a_rank_is_killed_without_a_trace(tmp_path, toy_config):
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    options = [f"--config={toy_config}", *OPTIONS]
    root = "--trainer.default_root_dir="
    undisturbed = started("-m", "lit_models", "fit", *options, f"{root}{whole}")
    options += [PATIENT, f"{root}{elastic}"]
    asked = Resources("torchrun", "1:2", rendezvous=f"127.0.0.1:{free_port()}")
    submit(resources=asked, name="job", run_options=options)
    job, nodes = tmp_path / "jobs/job/job.sh", []
    job.write_text(job.read_text().replace("--rdzv_conf=", f"--rdzv_conf={SOON},"))

    def join() -> None:
        nodes.append(started("-c", f"import os; os.execvp('bash', ['bash', {str(job)!r}])"))

    try:
        join()
        wait_for_world(elastic, 1, 1)
        join()
        wait_for_world(elastic, 2, 2)
        os.kill(max(processes_of(nodes[1][1])), signal.SIGKILL)
        wait_for_world(elastic, 2, 3)
        nodes[1][0].terminate()
        wait_for_world(elastic, 1, 4)
        (elastic / "over").touch()
        printed = nodes[0][0].communicate(timeout=PATIENCE_S)[0]
        assert nodes[0][0].returncode == 0, printed
        assert_undisturbed(elastic, whole, undisturbed)
    finally:
        ended(*undisturbed)
        for process, mark in nodes:
            ended(process, mark)
            process.stdout.close()
