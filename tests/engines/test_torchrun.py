"""A run under torchrun whose nodes leave and come back, on loopback, beside one undisturbed."""

import os
import signal

import pytest

from lit_models.commands.submit import submit
from tests.distributed.launch import ended, free_port, processes_of, started
from tests.engines.worlds import LIMIT_S, RUN, assert_undisturbed, wait_for_world

pytestmark = pytest.mark.slow
# Seconds to wait for one more node, and between signs of life, of which three make a dead node;
# torchrun's own are 30 and 5.
SOON = "last_call_timeout=3,keep_alive_interval=1"


def test_nodes_come_and_go_and_a_rank_is_killed_without_a_trace(tmp_path, monkeypatch):
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    undisturbed = started(*RUN, f"--trainer.default_root_dir={whole}")
    monkeypatch.chdir(tmp_path)
    options = [*RUN[3:], f"--trainer.default_root_dir={elastic}"]
    meeting = f"127.0.0.1:{free_port()}"
    submit(target="torchrun", name="job", nodes="1:2", rendezvous=meeting, run_options=options)
    job, nodes = tmp_path / "jobs/job/job.sh", []
    job.write_text(job.read_text().replace("--rdzv_conf=", f"--rdzv_conf={SOON},"))

    def join() -> None:
        nodes.append(started("-c", f"import os; os.execvp('bash', ['bash', {str(job)!r}])"))

    try:
        join()
        wait_for_world(elastic, 1, 1)
        join()
        wait_for_world(elastic, 2, 2)
        workers = processes_of(nodes[1][1])
        os.kill(max(workers), signal.SIGKILL)
        wait_for_world(elastic, 2, 3)
        nodes[1][0].terminate()
        wait_for_world(elastic, 1, 4)
        join()
        wait_for_world(elastic, 2, 5)
        printed = nodes[0][0].communicate(timeout=LIMIT_S)[0]
        assert nodes[0][0].returncode == 0, printed
        assert_undisturbed(elastic, whole, undisturbed)
    finally:
        ended(*undisturbed)
        for process, mark in nodes:
            ended(process, mark)
            process.stdout.close()
