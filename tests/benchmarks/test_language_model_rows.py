"""Language models beside the Trainer of transformers: ragged documents, and full rows."""

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_models import LitCausalLM
from lit_models.causal_lm.network import Decoder, DecoderConfig
from tests.benchmarks.figures import Aim
from tests.benchmarks.language_models import (
    BATCH,
    FAMILY,
    LONGEST,
    RAGGED,
    ROUNDS,
    VOCABULARY,
    WARM_UP,
    RaggedData,
    adamw,
    fit,
    of_transformers,
    plain_loop,
    ragged_documents,
    trainer_speed,
)

pytestmark = pytest.mark.benchmark
RAGGED_STEPS = 25
WAYS = {"pad": "padding", "group": "grouped by length"}


def unisono_speed(folder: Path, documents: list[np.ndarray]) -> float:
    """Return the useful tokens per second of our run."""
    seed_everything(0, verbose=False)
    config = DecoderConfig(vocab_size=VOCABULARY, max_positions=LONGEST, **RAGGED)
    data = RaggedData(documents, global_batch_size=BATCH)
    clock = fit(folder, LitCausalLM(adamw, network=config), data, RAGGED_STEPS)
    return sum(clock.tokens[WARM_UP:]) / (clock.ends[-1] - clock.ends[WARM_UP - 1])


def padded(examples: list[dict[str, Any]]) -> tuple[dict[str, Tensor], int]:
    """Pad to the longest of the batch, as DataCollatorForLanguageModeling does; the first token of
    each document is no target."""
    rows = [torch.from_numpy(example["input_ids"]) for example in examples]
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
    ids, mask = labels.clamp(min=0), (labels >= 0).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return batch, int(mask.sum()) - len(examples)


def peer_speed(folder: Path, documents: list[np.ndarray], way: str) -> float:
    """Return the same for transformers' Trainer on a Llama, in a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(speed_here, (folder, documents, way))


def speed_here(folder: Path, documents: list[np.ndarray], way: str) -> float:
    from transformers import LlamaForCausalLM

    torch.set_num_threads(2)
    model = LlamaForCausalLM(of_transformers(DecoderConfig(**RAGGED), VOCABULARY, LONGEST))
    data = [{"input_ids": ids, "length": len(ids)} for ids in documents]
    return trainer_speed(model, data, padded, folder, RAGGED_STEPS, way == "group")


def test_ragged_documents_beside_the_trainer_of_transformers(tmp_path, figures):
    pytest.importorskip("accelerate", reason="the peer needs accelerate")
    torch.set_num_threads(2)
    documents = ragged_documents(2000, seed=0)
    speeds: dict[str, list[float]] = {"pad": [], "group": [], "unisono": []}
    for turn in range(ROUNDS):
        for way in ("pad", "group"):
            speeds[way].append(peer_speed(tmp_path / way, documents, way))
        speeds["unisono"].append(unisono_speed(tmp_path / str(turn), documents))
    for way, aim in (("pad", 3.5), ("group", 1.1)):
        figures.add(
            *(FAMILY, "ragged documents", "useful tokens/s", speeds["unisono"]),
            *(f"transformers' Trainer, {WAYS[way]}", speeds[way], Aim(aim, is_least=True)),
        )


def plain_speed(documents: list[np.ndarray]) -> float:
    """Return tokens per second of a loop over random windows, as nanoGPT has it."""
    torch.manual_seed(0)
    network = Decoder(DecoderConfig(vocab_size=VOCABULARY, max_positions=LONGEST, **RAGGED))
    text = torch.from_numpy(np.concatenate(documents).astype(np.int64))
    width = LONGEST - 1
    seconds = plain_loop(network, text, BATCH, width, RAGGED_STEPS, adamw)[WARM_UP:]
    return BATCH * width * len(seconds) / sum(seconds)


def test_full_rows_beside_a_plain_loop_and_transformers_trainer(tmp_path, figures):
    pytest.importorskip("accelerate", reason="the peer needs accelerate")
    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    documents = [rng.integers(VOCABULARY, size=LONGEST) for _ in range(400)]
    speeds: dict[str, list[float]] = {"trainer": [], "loop": [], "unisono": []}
    for turn in range(ROUNDS):
        speeds["trainer"].append(peer_speed(tmp_path / "pad", documents, "pad"))
        speeds["loop"].append(plain_speed(documents))
        speeds["unisono"].append(unisono_speed(tmp_path / str(turn), documents))
    for who, peer in (("trainer", "transformers' Trainer"), ("loop", "plain loop")):
        figures.add(
            *(FAMILY, "rows without padding", "tokens/s", speeds["unisono"]),
            *(peer, speeds[who], Aim(1.0, is_least=True)),
        )
