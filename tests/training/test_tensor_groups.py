"""The devices of a tensor group begin equal, and one of them tells of the samples."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from datamodules.core.planned import share_seed
from lit_models.training.callbacks import ExactDropout
from lit_models.training.ledger import tells_samples
from lit_models.training.lineage import LedgerStep
from lit_models.training.replay import follow_one_device
from lit_models.training.strategies import FullyShardedStrategy, equal_weights

CPU = torch.device("cpu")


class Drawn(nn.Module):
    """Tensors of all kinds, as one rank draws them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 2, generator=drawn).t())  # not contiguous
        self.frozen = nn.Parameter(torch.randn(4, generator=drawn).bfloat16(), requires_grad=False)
        self.scale = nn.Parameter(torch.randn((), generator=drawn, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(5, generator=drawn) > 0.5)
        self.register_buffer("count", torch.tensor(seed), persistent=False)
        self.register_buffer("empty", torch.zeros(0))


def all_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_every_rank_begins_with_the_bits_of_rank_0(monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "broadcast", lambda bits, src: sent.append(bits.clone()))
    first, other = Drawn(0), Drawn(7)
    assert not any(
        torch.equal(a, b) for a, b in zip(all_of(first)[:5], all_of(other), strict=False)
    )
    equal_weights(first, CPU)
    on_the_way = iter(sent)
    monkeypatch.setattr(dist, "broadcast", lambda bits, src: bits.copy_(next(on_the_way)))
    equal_weights(other, CPU)
    assert next(on_the_way, None) is None
    for expected, got in zip(all_of(Drawn(0)), all_of(other), strict=True):
        assert expected.dtype == got.dtype
        assert expected.requires_grad == got.requires_grad
        assert expected.stride() == got.stride()
        assert torch.equal(expected, got)


@pytest.mark.parametrize("own", [{}, {"PL_GLOBAL_SEED": "7"}], ids=["none", "own"])
@pytest.mark.parametrize("first", [None, "3"])
def test_every_rank_plans_with_the_seed_of_rank_0(own, first):
    environ = dict(own)
    share_seed(lambda seed: first, environ)
    assert environ.get("PL_GLOBAL_SEED") == first


def set_up(rate: float, function: TrainerFn, *callbacks: ExactDropout, size: int = 2) -> None:
    """Begin to set up; what comes after the check needs a process group."""
    strategy = FullyShardedStrategy(tensor_parallel_size=size)
    strategy._lightning_module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate))
    strategy._precision_plugin = SimpleNamespace(convert_module=reached)
    state = SimpleNamespace(fn=function)
    strategy.setup(SimpleNamespace(callbacks=callbacks, strategy=strategy, state=state))


class ReachedError(Exception):
    """The check let it pass."""


def reached(module: nn.Module) -> None:
    raise ReachedError


def test_dropout_that_a_group_draws_apart_is_refused():
    words = "tensor_parallel_size is 2, .*dropout 0.1, whose masks.*exact_dropout to true.*or drop"
    with pytest.raises(ValueError, match=words):
        set_up(0.1, TrainerFn.FITTING)


@pytest.mark.parametrize(
    ("rate", "function", "callbacks", "size"),
    [
        (0.1, TrainerFn.FITTING, [ExactDropout()], 2),
        (0.1, TrainerFn.TESTING, [], 2),
        (0.0, TrainerFn.FITTING, [], 2),
        (0.1, TrainerFn.FITTING, [], 1),
    ],
    ids=["keyed", "not trained", "rate 0", "no groups"],
)
def test_dropout_that_is_equal_or_off_is_not(rate, function, callbacks, size):
    with pytest.raises(ReachedError):
        set_up(rate, function, *callbacks, size=size)


def test_one_rank_of_a_group_tells_of_its_samples():
    strategy = FullyShardedStrategy(tensor_parallel_size=2)
    assert tells_samples(SimpleNamespace(strategy=strategy))
    strategy.repeats_samples = True
    assert not tells_samples(SimpleNamespace(strategy=strategy))
    assert tells_samples(SimpleNamespace(strategy=object()))


@pytest.mark.parametrize(
    ("start", "micro"),
    [({"world_size": 4, "num_replicas": 2}, 4), ({"world_size": 4}, 2)],
    ids=["two groups of two", "ledger without groups"],
)
def test_a_replay_has_the_micro_batch_of_a_group(tmp_path, start, micro):
    (tmp_path / "plan.json").write_text(json.dumps({"request": {"global_batch_size": 16}}))
    data = SimpleNamespace(batch_size=None, micro_batch_size="auto", global_batch_size=None)
    found = LedgerStep({}, start, False)
    follow_one_device(data, found, tmp_path, {"accumulate_grad_batches": 2})
    assert (data.global_batch_size, data.micro_batch_size) == (16, micro)
