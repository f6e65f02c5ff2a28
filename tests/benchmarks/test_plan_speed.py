"""The plan of ten million samples: seconds and memory, in a process of its own.

pytest -m benchmark tests/benchmarks/test_plan_speed.py -s
"""

import json
import subprocess
import sys

import pytest

from tests.benchmarks.figures import Aim, Figures

SCRIPT = """
import json, resource, time
import numpy as np
from datamodules.plan import PlanRequest, make_plan
lengths = np.random.default_rng(0).integers(5, 40, 10_000_000).astype(np.int32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds = []
for epoch in range(3):
    begin = time.perf_counter()
    plan = make_plan(PlanRequest("f", len(lengths), 64, 0, 50), lengths, epoch)
    seconds.append(time.perf_counter() - begin)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": sorted(seconds)[1], "steps": plan.num_steps,
                  "peak_gib": peak / 2**20, "above_start_gib": (peak - before) / 2**20}))
"""


@pytest.mark.benchmark
def test_plan_of_ten_million_samples(figures: Figures):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["steps"] == 156_250
    limits = {"seconds": ("s", 20.0), "peak_gib": ("GiB at most", 1.0)}
    for name, (unit, limit) in limits.items():
        aim = Aim(limit, of="value")
        figures.add("shared", "plan of 10⁷ samples", unit, [found[name]], aim=aim)
