"""One rank of a short run: `python -m lit_models.commands._short_run FILE`, an `Order` in JSON."""

import json
import logging
import sys
from pathlib import Path

from lightning.pytorch import seed_everything

from lit_models.commands._run_config import built
from lit_models.forecasting.short_run import Order, train
from lit_models.launch import silence_noise
from lit_models.training.local_ranks import leave_group


def main(path: Path) -> None:
    """Train, and print the mean seconds of a step as the last line."""
    silence_noise()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    order = Order(**json.loads(path.read_text("utf-8")))
    seed_everything(order.seed, verbose=False)
    seconds = train(order, *built({"model": order.model, "data": order.data}))
    leave_group()
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
