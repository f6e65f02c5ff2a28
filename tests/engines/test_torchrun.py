"""A run under torchrun whose nodes leave and come back, on loopback, beside one undisturbed."""

import os
import signal

import pytest

from tests.distributed.launch import ended, free_port, processes_of, started
from tests.engines.worlds import LIMIT_S, RUN, assert_undisturbed, wait_for_world

pytestmark = pytest.mark.slow
# Seconds to wait for one more node, and between signs of life, of which three make a dead node;
# torchrun's own are 30 and 5.
SOON = "--rdzv_conf=last_call_timeout=3,keep_alive_interval=1"


def test_nodes_come_and_go_and_a_rank_is_killed_without_a_trace(tmp_path):
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    undisturbed = started(*RUN, f"--trainer.default_root_dir={whole}")
    port, nodes = free_port(), []

    def join() -> None:
        nodes.append(
            started(
                *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1"),
                *("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--max-restarts=9"),
                *(SOON, *RUN),
                *(f"--trainer.default_root_dir={elastic}", "--ckpt_path=auto"),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )
        )

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
