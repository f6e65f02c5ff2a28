"""Plan of ten million samples, and packing of as many documents: seconds and memory.

pytest -m benchmark tests/benchmarks/test_plan_speed.py; each in a process of its own.
"""

import json

import pytest

from tests.benchmarks.figures import Aim, Figures
from tests.distributed.launch import run

NUMBER = 10_000_000
PLANNED = """
from datamodules.core.plan import PlanRequest, make_plan
lengths = np.random.default_rng(0).integers(5, 40, NUMBER).astype(np.int32)
def work(epoch):
    return make_plan(PlanRequest("f", len(lengths), 64, 0, 50), lengths, epoch).num_steps
"""
PACKED = """
from datamodules.text.packing import best_fit
drawn = np.random.default_rng(0).lognormal(np.log(180) - 0.32, 0.8, NUMBER)
lengths = drawn.astype(np.int32).clip(2, 1024)
del drawn
def work(epoch):
    return len(best_fit(lengths, 1024)[1]) - 1
"""
MEASURE = """
import json, resource, time
seconds = []
for epoch in range(3):
    begin = time.perf_counter()
    made = work(epoch)
    seconds.append(time.perf_counter() - begin)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "made": made, "peak_gib": peak / 2**20}))
"""


def measured(figures: Figures, what: str, script: str) -> int:
    """Run a script in a process of its own, add its figures, and return what it made."""
    done = run("-c", f"import numpy as np\nNUMBER = {NUMBER}\n{script}\n{MEASURE}")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    figures.add("shared", what, "s", found["seconds"], aim=Aim(20.0, of="value"))
    figures.add("shared", what, "GiB at most", [found["peak_gib"]], aim=Aim(1.0, of="value"))
    return found["made"]


@pytest.mark.benchmark
def test_plan_of_ten_million_samples(figures: Figures) -> None:
    assert measured(figures, "plan of 10⁷ samples", PLANNED) == 156_250


@pytest.mark.benchmark
def test_packing_of_ten_million_lengths(figures: Figures) -> None:
    assert measured(figures, "packing of 10⁷ lengths", PACKED) > NUMBER * 100 / 1024
