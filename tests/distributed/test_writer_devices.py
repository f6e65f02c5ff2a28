"""What a writer writes, and what is said of it, does not depend on the number of devices."""

import json

import pytest

from tests.distributed.launch import run

pytestmark = pytest.mark.slow


def test_two_devices_write_and_measure_what_one_does(tmp_path):
    for name, options in (("one", ()), ("two", ("--devices", "2", "--strategy", "fsdp"))):
        done = run("-m", "tests.distributed.writer_run", str(tmp_path / name), *options)
        assert done.returncode == 0, done.stdout[-4000:]
    one, two = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two")
    )
    assert {"val/rougeL", "val/lead_rougeL", "test/duplicates", "test/query_coverage"} <= set(one)
    assert two == pytest.approx(one, rel=1e-9)
    assert one["test/rouge1"] > 0
    # The page's place in its file is named by the folder of the run.
    written = [
        (tmp_path / name / "out.jsonl").read_text().replace(f"{tmp_path}/{name}", "")
        for name in ("one", "two")
    ]
    assert written[0] == written[1]
    assert len(written[0].splitlines()) == 11
