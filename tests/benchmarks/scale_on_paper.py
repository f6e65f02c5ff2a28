"""124M and 1B weights on 8 to 64 devices: the share of computing, by `unisono plan`'s arithmetic.

python -m tests.benchmarks.scale_on_paper prints it; nothing is measured.
Assumed: a device computes its part of a step at 45 % of an H200's dense bfloat16 peak, with the
tokens of the GPU benchmark; a ring, whose slowest link counts; nothing hides behind computing.
"""

from dataclasses import dataclass
from typing import Any

from lit_models.forecasting.exchange import State
from lit_models.forecasting.prediction import efficiency
from lit_models.forecasting.probe import Forecast, World
from lit_models.forecasting.rehearsal import Rehearsed
from lit_models.training.memory import StateSize
from lit_models.training.throughput.peaks import peak_of
from tests.benchmarks.gpu_sizes import SIZES, Size, num_weights

MFU, DEVICE = 0.45, "NVIDIA H200"
NETWORKS, COUNTS = ("gpt2-124m", "1b"), (8, 16, 32, 64)
# GiB/s of each device: inside a node of eight; 200 Gb/s; 25 Gb/s.
LINKS = {"NVLink": 400.0, "InfiniBand": 25.0, "Ethernet": 3.0}
NODE = 8  # devices that NVLink joins
FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True)
class Way:
    """How gradients, and under fsdp weights, go from device to device.

    Args:
        link: of LINKS.
        bytes_per_parameter: of gradients, and of gathered weights.
        accumulation: micro-batches of a step on one device.
    """

    link: str
    bytes_per_parameter: int = FLOAT32
    accumulation: int = 1

    def __str__(self) -> str:
        number = {FLOAT32: "float32", BFLOAT16: "bfloat16"}[self.bytes_per_parameter]
        return f"{self.link}, {LINKS[self.link]:g} GiB/s, {number}, {self.accumulation}"


WAYS = (
    Way("NVLink"),
    *(Way("InfiniBand"), Way("InfiniBand", BFLOAT16), Way("InfiniBand", FLOAT32, 8)),
    *(Way("Ethernet"), Way("Ethernet", FLOAT32, 8)),
)


def compute_s(size: Size, accumulation: int) -> float:
    """Return the seconds in which a device computes its part of a step."""
    peak = peak_of(DEVICE, "bf16-mixed")
    assert peak is not None
    return accumulation * size.rows * size.length * size.flops_per_token / (MFU * peak)


def share(size: Size, way: Way, num_devices: int, is_sharded: bool) -> float:
    """Return the share of a step that is computing."""
    number, _ = num_weights(size.config)
    size_of_state = StateSize(number, number, 0, bytes_per_parameter=way.bytes_per_parameter)
    sent = State(number * way.bytes_per_parameter, [])
    rows = size.rows * way.accumulation
    numbers: Any = (num_devices, rows * num_devices, size.rows, way.accumulation)
    rehearsed = Rehearsed(compute_s(size, way.accumulation), 0, 0)
    world = World(*numbers, 1, 1, None, 1e-3, None, rehearsed)
    run = Forecast(num_samples=1, size=size_of_state, state=sent, rule="none", on_cpu=False)
    found = efficiency(run, world, is_sharded, LINKS[way.link])
    assert found is not None
    return found


def table() -> str:
    """Return the shares in Markdown."""
    columns = [(name, count) for name in NETWORKS for count in COUNTS]
    head = ["link, of each device, numbers, micro-batches", *(f"{n}, {c}" for n, c in columns)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for way in WAYS:
        for strategy in ("ddp", "fsdp"):
            cells = [
                f"{share(SIZES[name], way, count, strategy == 'fsdp'):.2f}"
                if way.link != "NVLink" or count <= NODE
                else ""
                for name, count in columns
            ]
            lines.append(f"| {way}, {strategy} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
