"""A run under torchrun whose nodes leave and come back, on loopback, beside one undisturbed."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from lit_models.commands.verify import verify_run
from tests.distributed.chaos import steps_of
from tests.distributed.launch import ended, finished, free_port, processes_of, started
from tests.distributed.test_matrix import weights

pytestmark = pytest.mark.slow
LIMIT_S = 120.0  # until something is seen
# Seconds to wait for one more node, and between signs of life, of which three make a dead node;
# torchrun's own are 30 and 5.
SOON = "--rdzv_conf=last_call_timeout=3,keep_alive_interval=1"
RUN = (
    *("-m", "lit_models", "fit", "--config=occupation_coder/debug.yaml"),
    *("--trainer.precision=64-true", "--trainer.limit_train_batches=600"),
    *("--trainer.limit_val_batches=0", "--trainer.strategy=ddp"),
)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, "it was not seen in time"
        time.sleep(0.1)


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

    def wait_for_world(size: int, attempt: int) -> None:
        """Waits until an attempt in a world of this size has made 20 steps."""

        def has_begun() -> bool:
            lines = steps_of(elastic)
            starts = [line for line in lines if "resumed_from_step" in line]
            steps = [line for line in lines if line["attempt"] == len(starts) and "digest" in line]
            sizes = [line["world_size"] for line in starts]
            return len(starts) >= attempt and sizes[-1] == size and len(steps) >= 20

        wait_until(has_begun)

    try:
        join()
        wait_for_world(1, 1)
        join()
        wait_for_world(2, 2)
        workers = processes_of(nodes[1][1])
        os.kill(max(workers), signal.SIGKILL)
        wait_for_world(2, 3)
        nodes[1][0].terminate()
        wait_for_world(1, 4)
        join()
        wait_for_world(2, 5)
        printed = nodes[0][0].communicate(timeout=LIMIT_S)[0]
        assert nodes[0][0].returncode == 0, printed
        statuses, outputs = finished(undisturbed)
        assert statuses == [0], outputs
    finally:
        ended(*undisturbed)
        for process, mark in nodes:
            ended(process, mark)
            process.stdout.close()
    proof = verify_run(elastic)
    assert proof.findings == verify_run(whole).findings
    torch.testing.assert_close(weights(elastic), weights(whole), rtol=1e-8, atol=1e-8)
