"""The fixed summation tree: one expression for any replicas; what cannot keep it is refused."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from datamodules.core.plan import Batching, deal
from lit_models.training import BitwiseSum, ExactDropout, LastCheckpoint, Ledger
from lit_models.training.bitwise import TreeSum, check_cut, check_run, pinned
from tests.toy import LitToy, ToyData, ledger_lines, toy_trainer

CHUNKS = 16
EPOCH = r"epoch 7 steps, 50 samples, plan [0-9a-f]{12}"


def joined(parts: list) -> frozenset:
    """Return the expression that a binary counter builds: a sum is the set of its two parts."""
    if len(parts) == 1:
        return parts[0]
    return joined([frozenset(parts[i : i + 2]) for i in range(0, len(parts), 2)])


def expression(num_replicas: int) -> frozenset:
    ids, sums = np.arange(CHUNKS), []
    for replica in range(num_replicas):  # each sample is a chunk of its own
        dealt = deal(ids, CHUNKS - ids, num_replicas, replica, CHUNKS // num_replicas)
        sums.append(joined([int(chunk[0]) for chunk, _ in dealt]))
    while len(sums) > 1:  # ranks swap partial sums with their mirror image
        last = len(sums) - 1
        sums = [frozenset([sums[i], sums[last - i]]) for i in range(len(sums) // 2)]
    return sums[0]


@pytest.mark.parametrize("num_replicas", [2, 4, 8, 16])
def test_chunks_are_added_in_one_expression_on_any_number_of_replicas(num_replicas):
    assert expression(num_replicas) == expression(1)


def test_a_parameter_that_some_micro_batches_do_not_reach_keeps_its_gradient():
    tree = TreeSum()
    for gradient in (None, torch.tensor([2.0]), None, torch.tensor([3.0])):
        tree.push([gradient])
    assert tree.pop()[0].tolist() == [5.0]


def test_threads_and_kernels_are_as_before_when_the_run_is_over(tmp_path):
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pinned():
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (1, True)
    fit(tmp_path, max_steps=1)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def fit(folder, callbacks=None, module=None, micro_batch_size=2, ckpt_path=None, **options):
    defaults = {"max_steps": 3, "precision": 32, "enable_checkpointing": False}
    callbacks = [Ledger(), *([BitwiseSum()] if callbacks is None else callbacks)]
    trainer = toy_trainer(folder, **{**defaults, **options}, callbacks=callbacks)
    module = module or LitToy()
    trainer.fit(module, ToyData(micro_batch_size=micro_batch_size), ckpt_path=ckpt_path)
    return module


def test_the_ledger_reads_the_norm_of_the_whole_sum(tmp_path):
    fit(tmp_path / "tree")
    fit(tmp_path / "plain", callbacks=[])
    for a, b in zip(ledger_lines(tmp_path / "tree"), ledger_lines(tmp_path / "plain"), strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def data_of(batching, devices, micro_batch_size="auto", given_accumulation=1):
    return SimpleNamespace(
        batching=batching,
        num_replicas=devices,
        micro_batch_size=micro_batch_size,
        given_accumulation=given_accumulation,
    )


@pytest.mark.parametrize(
    ("total", "devices", "accumulation", "size", "message"),
    [
        (12, 2, 3, 2, "2 devices x 3 accumulated are 6, .* micro-batches of 2 makes 6; change"),
        (8, 8, 1, 2, "8 devices x 1 accumulated are 8, and .* 8 in .* of 2 makes 4"),
    ],
)
def test_a_cut_that_follows_the_devices_is_refused(total, devices, accumulation, size, message):
    with pytest.raises(ValueError, match=message):
        check_cut(data_of(Batching(total, 1, accumulation), devices, size))
    check_cut(data_of(Batching(64, 8, 4), 2, given_accumulation=4))
    check_cut(data_of(Batching(64, 8, 2), 4, 8))


def test_a_run_that_cannot_keep_bits_is_refused(tmp_path):
    words = "nothing says how: give data.micro_batch_size, for example 1 for 8 chunks"
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, micro_batch_size=None)
    with pytest.raises(ValueError, match="32-true or 64-true, got bf16-mixed"):
        fit(tmp_path, precision="bf16-mixed")
    with pytest.raises(ValueError, match="needs trainer.strategy ddp or ddp_spawn, got fsdp"):
        check_run("fsdp", None, 2)
    check_run("ddp_spawn", "64-true", 8)
    module = LitToy()
    module.norm = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match=r"norm \(BatchNorm1d\) keeps running stat.*LayerNorm"):
        fit(tmp_path, module=module)


def test_random_numbers_that_each_process_draws_itself_are_refused(tmp_path):
    class Drawing(LitToy):
        def forward(self, batch):
            return nn.functional.dropout(super().forward(batch), 0.1)

    for callback in (BitwiseSum(), ExactDropout()):
        words = "drew random numbers that belong to no sample.*add --exact_dropout=true"
        with pytest.raises(RuntimeError, match=words):
            fit(tmp_path, [callback], Drawing())


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_micro_batch_without_a_loss_is_refused(tmp_path):
    class Skipping(LitToy):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    with pytest.raises(RuntimeError, match="a step ended after 3 of 4 micro-batches"):
        fit(tmp_path, module=Skipping())


def test_a_resume_with_another_cut_is_refused(tmp_path):
    fit(tmp_path, [BitwiseSum(), LastCheckpoint(every_n_steps=2, every_epoch=False)], max_steps=2)
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match="had 4 chunks, this one 2"):
        fit(tmp_path, micro_batch_size=4, ckpt_path=last)


def test_an_option_turns_it_on_and_topology_and_banner_say_so(done, toy_config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    options = ["--exactness=bitwise", "--data.micro_batch_size=2", "--model.dropout=0.2"]
    options += ["--exact_dropout=true", "--trainer.default_root_dir=run"]
    output = done("fit", "--config", "toy.yaml", *options)
    facts = json.loads((toy_config.parent / "run" / "topology.json").read_text())["exactness"]
    assert facts == {
        "level": "bitwise",
        "exact_dropout": True,
        "num_chunks": 4,
        "gradient_copies": 3,
    }
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for line in (
        "run run",
        "devices 1 (single_device, 32-true)",
        "visible GPUs 2,3",
        "parameters 13, all of them learn",
        "global batch 8 = 1 device x 2 x 4 accumulated",
        "exactness bitwise: 4 chunks a step, 3 x the gradients",
        "dropout keyed by seed, epoch and sample",
        "learning rate 0.01 at this step",
    ):
        assert line in lines
    assert any(re.fullmatch(EPOCH, line) for line in lines)
