"""The arithmetic of `unisono plan` beside runs in which exchange of gradients is most of a step.

pytest -m benchmark tests/benchmarks/test_scale.py; on a machine that does nothing else.
Ten million weights and little compute, 1, 2 and 4 processes of one thread on loopback, as ddp and
as fsdp. Predicted seconds of a step follow from the compute of one process alone, the gradients'
bytes, the bandwidth of gloo and the slow-down of shared cores, all measured before the runs; where
there are more processes than cores they count as so many times slower. Constants are the plan's,
none was chosen on these runs.
"""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from lit_models.forecasting import exchange
from lit_models.forecasting.prediction import exchange_s, measured_gib_s, slowdown, step_s
from lit_models.forecasting.probe import Forecast, Probe, World, forecast
from lit_models.training.optim import configured, parameter_groups
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.test_forecast import trained
from tests.benchmarks.test_training_overhead import INPUTS, Ours, RowsData

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.filterwarnings("ignore:.*have no `validation_step`"),
]
WIDTH, NUM_BLOCKS, ROWS = 1600, 4, 16
STEPS, ROUNDS = 24, 3
WORLDS = ((1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp"))
RUN = [
    *("--model=tests.benchmarks.test_scale.LitWide", f"--trainer.max_steps={STEPS}"),
    *("--data=tests.benchmarks.test_training_overhead.RowsData", "--trainer.accelerator=cpu"),
    *(f"--data.global_batch_size={ROWS}", "--seed_everything=0"),
]


class WideBlock(nn.Module):
    """A square layer and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.layer(x))


class LitWide(Ours):
    """Ten million weights in blocks."""

    def __init__(self) -> None:
        super().__init__(width=1, num_layers=1)
        self.network = None  # fsdp wants it built in `configure_model`

    def blocks(self) -> list[nn.Module]:
        return [part for part in self.network if isinstance(part, WideBlock)]

    def configure_model(self) -> None:
        if self.network is None:
            blocks = (WideBlock() for _ in range(NUM_BLOCKS))
            self.network = nn.Sequential(nn.Linear(INPUTS, WIDTH), *blocks, nn.Linear(WIDTH, 1))

    def configure_optimizers(self) -> Any:
        """Return the optimizer whose update takes least: under fsdp each rank makes its share of
        it, and the plan counts it whole."""
        return configured(self, torch.optim.SGD(parameter_groups(self), lr=1e-3), None)


def foretold() -> Forecast:
    """Return what is measured before any run, on all numbers of processes."""
    counts = sorted({count for count, _ in WORLDS})
    options = {"accelerator": "cpu", "max_steps": STEPS}
    seed_everything(0, verbose=False)
    data = RowsData(global_batch_size=ROWS)
    found = forecast(LitWide(), data, options, Probe(counts, rehearses=True))
    for count in counts[1:]:
        found.exchanges[count] = exchange.measured(count, found.state, threads=1)
    return found


def seconds(found: Forecast, world: World, strategy: str) -> float:
    predicted = step_s(found, world, strategy == "fsdp", None)
    assert predicted is not None
    return predicted


def parts(found: Forecast, world: World, strategy: str) -> str:
    """Return what the prediction is made of."""
    assert world.rehearsed is not None
    computing = 1e3 * world.rehearsed.step_s
    if world.num_devices == 1:
        return f"{computing:.0f} ms of computing"
    exchanging = 1e3 * exchange_s(found, world, strategy == "fsdp", None)
    bandwidth = measured_gib_s(found, world.num_devices)
    return (
        f"{computing:.0f} ms of computing x {slowdown(found, world.num_devices):.2f} of sharing "
        f"+ {exchanging:.0f} ms of exchange at {bandwidth:.2f} GiB/s"
    )


def test_steps_of_1_2_and_4_processes(
    tmp_path: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    predicted, measured, notes = defaultdict(list), defaultdict(list), {}
    for turn in range(ROUNDS):
        found = foretold()
        worlds = {world.num_devices: world for world in found.worlds}
        for count, strategy in WORLDS:
            place = (count, strategy)
            predicted[place].append(seconds(found, worlds[count], strategy))
            folder = tmp_path / f"{turn}-{count}-{strategy}"
            measured[place].append(trained(folder, RUN, count, strategy)[1])
            notes[place] = parts(found, worlds[count], strategy)
    for place, before in predicted.items():
        after = measured[place]
        apart = [abs(a / b - 1) for a, b in zip(before, after, strict=True)]
        a, b = (1e3 * statistics.median(values) for values in (before, after))
        note = f"predicted {a:.0f} ms ({notes[place]}), measured {b:.0f} ms"
        name = f"{place[0]} {place[1]}" if place[0] > 1 else "1 process"
        what = f"seconds of a step predicted apart from measured, 10.4M weights, {name}"
        figures.add("forecast", what, "share", apart, aim=Aim(0.25, of="value"), note=note)
