"""One rank of what a plan tries: `python -m lit_models.commands._forecast_rank FILE`, where the
file is an `Order` in JSON."""

import atexit
import gc
import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path

from lit_models.__main__ import no_collections  # torchmetrics comes late with it, as in a run
from lit_models.cli_errors import run_guarded


def main(path: Path) -> None:
    """Build what a config names, rehearse or train it, and print the answer as the last line."""
    atexit.register(gc.freeze)  # as `lit_models.__main__.main` does
    # As `unisono fit` begins: what it imports is in its memory, and how threads wait in its time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with no_collections():
        from lightning.pytorch import seed_everything

        from lit_models.commands._run_config import built
        from lit_models.forecasting import apart, short_run
        from lit_models.forecasting.orders import Order
        from lit_models.launch import silence_noise
        from lit_models.training.local_ranks import leave_group
    silence_noise()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    order = Order(**json.loads(path.read_text("utf-8")))
    seed_everything(order.seed, verbose=False)
    answers = short_run.train if order.strategy else apart.rehearse
    answer = answers(order, *built({"model": order.model, "data": order.data}))
    leave_group()
    print(json.dumps(asdict(answer)))


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(Path(sys.argv[1]))))
