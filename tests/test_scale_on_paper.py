"""The efficiency of many devices that the card shows, by hand for a network of round numbers."""

import pytest

from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.forecasting import prediction
from tests.benchmarks import scale_on_paper
from tests.benchmarks.gpu_sizes import Size
from tests.benchmarks.scale_on_paper import BFLOAT16, Way, compute_s, share, table

# 2^20 weights of the tied embedding, one layer of 4 x 64 x 64 + 3 x 64 x 64, three norms of 64
NUMBER = 2**20 + 7 * 64**2 + 3 * 64
SIZE = Size(
    DecoderConfig(2**14, 64, hidden_size=64, num_layers=1, num_heads=2, feed_forward=64), 2, 64
)


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "LOOP_S", 0.0)
    monkeypatch.setitem(scale_on_paper.LINKS, "Ethernet", 1.0)


def test_a_device_computes_its_part_at_45_percent_of_the_peak() -> None:
    flops = 2 * 64 * (6 * NUMBER + 12 * 64 * 64)
    assert compute_s(SIZE, 1) == pytest.approx(flops / (0.45 * 989.4e12))
    assert compute_s(SIZE, 3) == pytest.approx(3 * compute_s(SIZE, 1))


@pytest.mark.parametrize(
    ("way", "is_sharded", "sent"),
    [
        (Way("Ethernet"), False, 2 * 4),  # around the ring once to sum, once to tell
        (Way("Ethernet", BFLOAT16), False, 2 * 2),
        (Way("Ethernet"), True, 3 * 4),  # weights twice, gradients once
        (Way("Ethernet", accumulation=8), False, 2 * 4),  # once per step
        (Way("Ethernet", accumulation=8), True, 3 * 4 * 8),  # in each micro-batch
    ],
)
def test_the_share_of_computing(way: Way, is_sharded: bool, sent: int) -> None:
    exchange = sent * NUMBER * 15 / 16 / 2**30  # seconds at 1 GiB/s on 16 devices
    computing = compute_s(SIZE, way.accumulation)
    assert share(SIZE, way, 16, is_sharded) == pytest.approx(computing / (computing + exchange))


def test_the_table_has_a_cell_for_every_link_that_joins_so_many_devices() -> None:
    rows = [line.strip("|").split("|") for line in table().splitlines()[2:]]
    assert {len(row) for row in rows} == {9}
    empty = [row[0] for row in rows if any(not cell.strip() for cell in row)]
    assert all("NVLink" in name for name in empty)
    assert len(empty) == 2
