"""Keyed dropout: rate and scale of nn.Dropout; masks depend on the sample and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_models.run_files import read_checkpoint
from lit_models.training import ExactDropout, LastCheckpoint, Ledger
from lit_models.training.dropout import KeyedDropout, SampleKeys, key_dropout, release_dropout
from lit_models.training.metrics import hash_ids
from tests.toy import LitToy, ToyData, losses, toy_trainer

SHAPE = (12, 32)  # positions, channels


def network(rate: float = 0.25, count: int = 2) -> tuple[nn.Sequential, SampleKeys]:
    keys, net = SampleKeys(), nn.Sequential(*(nn.Dropout(rate) for _ in range(count)))
    key_dropout(net, keys)
    return net, keys


def noise(
    ids: Tensor, shape: tuple[int, ...] = SHAPE, key: int = 7, module: int = 0, rate: float = 0.25
) -> Tensor:
    """Return the masks times the scale, [len(ids), *shape]."""
    net, keys = network(rate)
    keys.begin(key, ids)
    return net[module](torch.ones(len(ids), *shape))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_scale_are_those_of_dropout(rate):
    values = noise(torch.arange(500), rate=rate)
    assert values.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
    deviation = (rate * (1 - rate) / values.numel()) ** 0.5
    assert float((values == 0).double().mean()) == pytest.approx(rate, abs=4 * deviation)
    assert noise(torch.arange(3), rate=1.0).eq(0).all()
    assert noise(torch.arange(3), rate=0.0).eq(1).all()


def test_no_axis_prefers_an_index():
    dropped = (noise(torch.arange(2000)) == 0).double() - 0.25
    for axis in range(3):
        others = [a for a in range(3) if a != axis]
        num_others = dropped.numel() / dropped.shape[axis]
        chi2 = (dropped.mean(others) ** 2 / (0.25 * 0.75 / num_others)).sum()
        freedom = dropped.shape[axis]
        assert abs(float(chi2) - freedom) < 5 * (2 * freedom) ** 0.5


def correlation(left: Tensor, right: Tensor) -> float:
    """Return the correlation of two masks, in standard deviations of independent masks."""
    a, b = ((side == 0).double() - 0.25 for side in (left, right))
    return float((a * b).mean() / (0.25 * 0.75)) * a.numel() ** 0.5


def test_samples_modules_calls_epochs_and_positions_are_independent():
    ids = torch.arange(500)
    base = noise(ids)
    net, keys = network()
    keys.begin(7, ids)
    net[0](torch.ones(500, *SHAPE))
    others = {
        "next sample": noise(ids + 1),
        "epoch": noise(ids, key=8),
        "module": noise(ids, module=1),
        "second call": net[0](torch.ones(500, *SHAPE)),
        "next position": base.roll(1, 1),
        "next channel": base.roll(1, 2),
    }
    for name, other in others.items():
        assert abs(correlation(base, other)) < 4.5, name
    assert correlation(base, noise(ids)) == pytest.approx(base.numel() ** 0.5, rel=0.02)


def test_a_mask_is_the_hash_that_its_description_says():
    net, keys = network(0.5, count=1)
    keys.begin(3, torch.tensor([11]))

    def mixed(*parts: int) -> int:
        key = 0
        for part in parts:
            key = int(hash_ids(torch.tensor(key) + part))
        return key

    def table(axis: int, index: int) -> int:
        return mixed(mixed(0, 0, axis), index)

    def word(position: int, channel: int) -> bool:
        row = torch.tensor(mixed(3, 11)) + table(0, 0) + table(1, position)
        bits = (int(hash_ids(row)) ^ table(-1, channel)) & 0xFFFFFFFF
        bits = bits * 2654435761 & 0xFFFFFFFF
        bits = (bits ^ bits >> 15) * 2246822519 & 0xFFFFFFFF
        return (bits - 2**32 if bits >= 2**31 else bits) >= 0

    expected = [[word(position, channel) for channel in range(5)] for position in range(4)]
    assert net[0](torch.ones(1, 4, 5)).gt(0)[0].tolist() == expected


def test_compiled_code_draws_the_same_masks_and_is_one_for_all_modules() -> None:
    graphs: list[int] = []
    backend, (net, keys) = lambda graph, inputs: graphs.append(1) or graph, network(count=3)
    torch._dynamo.reset()
    for samples, length in ((4, 12), (5, 7), (3, 9)):
        for module in net:
            found = []
            for call in (module, torch.compile(module, backend=backend, fullgraph=True)):
                keys.begin(7, torch.arange(samples))
                found.append(call(torch.ones(samples, length, 33)))
            assert torch.equal(*found)
    assert len(graphs) == 2  # one for the first size, one for all others


@given(order=st.permutations(range(6)), cut=st.integers(1, 5), padding=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_masks_do_not_depend_on_batch_order_batch_split_or_padding(order, cut, padding):
    ids = torch.tensor([3, 14, 15, 92, 65, 2**40])
    base, order = noise(ids), torch.tensor(order)
    assert torch.equal(noise(ids[order]), base[order])
    assert torch.equal(torch.cat([noise(ids[:cut]), noise(ids[cut:])]), base)
    padded = noise(ids, (SHAPE[0] + padding, SHAPE[1] + padding))
    assert torch.equal(padded[:, : SHAPE[0], : SHAPE[1]], base)


def test_several_rows_of_a_sample_lie_side_by_side_and_differ():
    net, keys = network()
    keys.begin(7, torch.arange(4))
    rows = net[0](torch.ones(12, *SHAPE)).view(4, 3, *SHAPE)
    assert torch.equal(rows[:, 0], noise(torch.arange(4)))
    assert abs(correlation(rows[:, 0], rows[:, 1])) < 4.5


def test_tensors_of_two_axes_and_of_one_have_masks_too():
    assert noise(torch.arange(50), (9,)).unique().numel() == 2
    assert noise(torch.arange(50), ()).shape == (50,)
    assert torch.equal(noise(torch.arange(50), (9,))[:9], noise(torch.arange(9), (9,)))


def test_evaluation_is_untouched_and_modules_are_plain_again_afterwards():
    net, _ = network(0.5)
    assert type(net[0]) is KeyedDropout
    net.eval()
    assert net(torch.ones(3, 4)).eq(1).all()
    release_dropout(net)
    assert type(net[0]) is nn.Dropout
    assert net.train()(torch.ones(100, 4)).eq(0).any()


def test_a_repeated_call_in_the_backward_pass_draws_the_same_mask_or_is_refused():
    net, keys = network()
    gradients = []
    for repeats in (False, True):
        keys.begin(7, torch.arange(4))
        values = torch.ones(4, *SHAPE, requires_grad=True)
        out = checkpoint(net, values, use_reentrant=False) if repeats else net(values)
        keys.is_backward = True
        out.square().sum().backward()
        gradients.append(values.grad)
    assert torch.equal(*gradients)
    keys.begin(7, torch.arange(4))
    values = torch.ones(4, *SHAPE, requires_grad=True)
    out = checkpoint(lambda x: net[0](net[0](x) * 2), values, use_reentrant=False)
    keys.is_backward = True
    with pytest.raises(RuntimeError, match="0 was called 2 times.*its own nn.Dropout"):
        out.square().sum().backward()


def test_a_tensor_that_does_not_hold_the_samples_is_refused():
    net, keys = network()
    with pytest.raises(RuntimeError, match=r"0 ran in training mode outside a training step"):
        net(torch.ones(4, 3))
    keys.begin(7, torch.arange(4))
    with pytest.raises(ValueError, match=r"1 got a tensor of shape \[6, 3\].* 4 samples"):
        net[1](torch.ones(6, 3))


def fit(folder, micro=None, ckpt_path=None, is_exact=True, **options):
    callbacks = [Ledger(), LastCheckpoint(every_n_steps=5, every_epoch=False)]
    callbacks += [ExactDropout()] if is_exact else []
    trainer = toy_trainer(folder, callbacks=callbacks, enable_checkpointing=False, **options)
    torch.manual_seed(len(folder.name))
    module = LitToy(dropout=0.3)
    trainer.fit(module, ToyData(micro_batch_size=micro), ckpt_path=ckpt_path)
    return module.state_dict()


def test_a_run_with_dropout_does_not_depend_on_the_micro_batches(tmp_path):
    for name, micro in (("one", None), ("four", 2)):
        fit(tmp_path / name, micro)
        fit(tmp_path / f"{name}, off", micro, is_exact=False)
    assert len(losses(tmp_path / "one")) == 14
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "four"), rel=1e-10)
    off, other = losses(tmp_path / "one, off"), losses(tmp_path / "four, off")
    assert off != pytest.approx(other, rel=1e-3)


def test_a_run_with_dropout_goes_on_in_the_middle_of_an_epoch_as_if_it_had_not_stopped(tmp_path):
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "cut", max_steps=10)
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["global_step"] == 10  # of 7 in an epoch
    resumed = fit(tmp_path / "cut", 2, last)
    torch.testing.assert_close(whole, resumed, rtol=1e-10, atol=1e-12)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)
