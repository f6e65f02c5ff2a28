"""The plan of ten million samples, and the packing of as many documents: seconds and memory.

pytest -m benchmark tests/benchmarks/test_plan_speed.py; each in a process of its own.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.benchmarks.figures import Aim, Figures

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
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds = []
for epoch in range(3):
    begin = time.perf_counter()
    made = work(epoch)
    seconds.append(time.perf_counter() - begin)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "made": made, "peak_gib": peak / 2**20,
                  "above_start_gib": (peak - before) / 2**20}))
"""


def measured(script: str) -> dict[str, Any]:
    code = f"import numpy as np\nNUMBER = {NUMBER}\n{script}\n{MEASURE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def add(figures: Figures, what: str, found: dict[str, Any]) -> None:
    figures.add("shared", what, "s", found["seconds"], aim=Aim(20.0, of="value"))
    figures.add("shared", what, "GiB at most", [found["peak_gib"]], aim=Aim(1.0, of="value"))


@pytest.mark.benchmark
def test_plan_of_ten_million_samples(figures: Figures) -> None:
    found = measured(PLANNED)
    assert found["made"] == 156_250
    add(figures, "plan of 10⁷ samples", found)


@pytest.mark.benchmark
def test_packing_of_ten_million_lengths(figures: Figures) -> None:
    found = measured(PACKED)
    assert found["made"] > NUMBER * 100 / 1024
    add(figures, "packing of 10⁷ lengths", found)
