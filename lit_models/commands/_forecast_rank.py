"""One rank of what a plan tries: `python -m lit_models.commands._forecast_rank FILE`, where the
file is an `Order` in JSON."""

import json
import logging
import os
import sys
from pathlib import Path

from lit_models.errors import run_guarded, say, screen
from lit_models.training.local_ranks import end_with_parent


def main(path: Path) -> int:
    """Return the exit status of a rank, one of its own where memory was refused."""
    end_with_parent(os.environ)
    try:
        carry_out(path)
    except (MemoryError, RuntimeError) as error:
        from lit_models.forecasting.orders import OUT_OF_MEMORY, is_want_of_memory

        if not is_want_of_memory(error):
            raise
        say(screen(str(error) or type(error).__name__))
        return OUT_OF_MEMORY
    return 0


def carry_out(path: Path) -> None:
    """Build what a config names, rehearse or train it, and write the answer into its folder."""
    from lightning.pytorch import seed_everything

    from lit_models.commands._run_config import built
    from lit_models.forecasting import isolated, short_run
    from lit_models.forecasting.orders import Order, write_answer
    from lit_models.launch import silence_noise
    from lit_models.training.local_ranks import leave_group

    silence_noise()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    order = Order(**json.loads(path.read_text("utf-8")))
    seed_everything(order.seed, verbose=False)
    answers = short_run.train if order.strategy else isolated.rehearse
    answer = answers(order, *built({"model": order.model, "data": order.data}))
    leave_group()
    write_answer(order, answer)


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(Path(sys.argv[1]))))
