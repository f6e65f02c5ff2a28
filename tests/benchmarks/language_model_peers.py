"""What language models are measured against: a plain loop, and the Trainer of transformers.

python -m tests.benchmarks.language_model_peers DOCUMENTS.npz pad|group STEPS prints its speed; it
runs by itself, with the one package that only this peer needs on PYTHONPATH.
"""

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.causal_lm.network import Decoder, Documents, frequencies, rotations

WARM_UP = 3
RAGGED = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "feed_forward": 688}
VOCABULARY, LONGEST, BATCH = 8000, 512, 8


def ragged_documents(number: int, seed: int) -> list[np.ndarray]:
    """Return documents of log-normal lengths, mean 180 and sigma 0.8, cut at 512 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(180) - 0.8**2 / 2, 0.8, number).astype(int).clip(2, LONGEST)
    # Token frequencies fall with their rank, as those of words do.
    ranks = 1 / np.arange(1, VOCABULARY + 1)
    return [rng.choice(VOCABULARY, n, p=ranks / ranks.sum()) for n in lengths]


def plain_logits(network: Decoder, input_ids: Tensor) -> Tensor:
    """Return the logits of rows that each hold one document: what a plain script would compute."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device).expand(1, -1)
    config, rotation = network.config, None
    hidden = network.embedding(input_ids)
    if network.positions is not None:
        hidden = hidden + network.positions(places)
    else:
        frequency = frequencies(config.head_size, config.rope_theta, places.device)
        rotation = rotations(places, frequency, hidden.dtype)
    for layer in network.layers:
        hidden = layer(hidden, rotation, Documents())
    return network.head(network.norm(hidden))


def plain_loop(
    network: Decoder,
    text: Tensor,
    rows: int,
    width: int,
    steps: int,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
) -> list[float]:
    """Train on random windows of a text; return the seconds of each step.

    Args:
        network: changed by the training.
        text: [n] int64 tokens.
        rows: windows of a step.
        width: positions of a window.
        steps: how many.
        make_optimizer: given the parameter groups.
    """
    matrices = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() < 2]
    optimizer = make_optimizer([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    ends = [time.perf_counter()]
    for _ in range(steps):
        starts = torch.randint(len(text) - width, (rows,), generator=generator).tolist()
        inputs = torch.stack([text[s : s + width] for s in starts])
        labels = torch.stack([text[s + 1 : s + 1 + width] for s in starts])
        loss = F.cross_entropy(plain_logits(network, inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss.item()  # as whoever prints it does
        ends.append(time.perf_counter())
    return [after - before for before, after in pairwise(ends)]


def llama() -> Any:
    """Return the network of the ragged benchmark, by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=RAGGED["hidden_size"],
            num_hidden_layers=RAGGED["num_layers"],
            num_attention_heads=RAGGED["num_heads"],
            intermediate_size=RAGGED["feed_forward"],
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    )


def padded(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest of the batch, as DataCollatorForLanguageModeling does."""
    width = max(len(example["input_ids"]) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        size = len(example["input_ids"])
        ids[row, :size] = torch.from_numpy(example["input_ids"])
        mask[row, :size] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def hugging_face_trainer(documents: list[np.ndarray], is_grouped: bool, steps: int) -> float:
    """Return the useful tokens per second of the Trainer of transformers on a Llama."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends, useful = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = padded(examples)
        # The first token of each is no target.
        useful.append(int(batch["attention_mask"].sum()) - len(examples))
        return batch

    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
        use_cpu=True,
        **({"train_sampling_strategy": "group_by_length"} if is_grouped else {}),
    )
    data = [{"input_ids": ids, "length": len(ids)} for ids in documents]
    options = {"train_dataset": data, "data_collator": collate, "callbacks": [Clock()]}
    Trainer(model=llama(), args=arguments, **options).train()
    return float(np.sum(useful[WARM_UP:steps]) / (ends[-1] - ends[WARM_UP - 1]))


def main() -> None:
    path, way, steps = sys.argv[1:]
    with np.load(path) as content:
        ends = np.cumsum(content["lengths"])[:-1]
        documents = np.split(content["tokens"], ends)
    torch.set_num_threads(2)
    speed = hugging_face_trainer(documents, way == "group", int(steps))
    print(json.dumps({"tokens_per_second": speed}))


if __name__ == "__main__":
    main()
