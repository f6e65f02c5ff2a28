"""A plain loop on one network, run twice side by side: what two unconnected processes train.

python -m tests.benchmarks.two_plain_loops STEPS waits for a line, then prints samples per second.
"""

import sys
import time
from functools import partial

import torch

from lit_models.causal_lm.network import Decoder, DecoderConfig
from tests.benchmarks.language_model_peers import plain_loop

SHAPE = {"vocab_size": 2000, "hidden_size": 256, "num_layers": 4, "num_heads": 4}
WIDTH, ROWS, WARM_UP = 256, 8, 4


def main() -> None:
    """Train after the word to start, so that both loops share the cores all the time."""
    steps = int(sys.argv[1])
    torch.set_num_threads(1)
    network = Decoder(DecoderConfig(max_positions=WIDTH, **SHAPE))
    text = torch.randint(SHAPE["vocab_size"], (200_000,))
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    seconds = plain_loop(network, text, ROWS, WIDTH, steps, adamw)[WARM_UP:]
    print(ROWS * len(seconds) / sum(seconds), time.perf_counter() - begun, flush=True)


if __name__ == "__main__":
    main()
