"""Runs of language models as the command line makes them, and their peers: a plain loop, and the
Trainers of transformers."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage
from datamodules.files.splitting import TRAIN
from datamodules.text.packing import TokenDataset
from datamodules.text.store import TokenStream, token_dtype
from datamodules.text.texts import LanguageModelDataModule
from datamodules.tokenizers.text import TextTokenizer, byte_tokenizer
from lit_models import LitCausalLM
from lit_models.causal_lm.export import equivalent
from lit_models.causal_lm.network import Decoder, DecoderConfig, Documents, rotations
from lit_models.training import default_callbacks
from lit_models.training.run import ProgressLine, default_loggers
from tests.text_corpora import StreamStore

WARM_UP = 3
RAGGED = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "feed_forward": 688}
VOCABULARY, LONGEST, BATCH = 8000, 512, 8


def ragged_documents(number: int, seed: int) -> list[np.ndarray]:
    """Return documents of log-normal lengths, mean 180 and sigma 0.8, cut at 512 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(180) - 0.8**2 / 2, 0.8, number).astype(int).clip(2, LONGEST)
    # Token frequencies fall with their rank, as word frequencies do.
    ranks = 1 / np.arange(1, VOCABULARY + 1)
    return [rng.choice(VOCABULARY, n, p=ranks / ranks.sum()) for n in lengths]


def plain_logits(network: Decoder, input_ids: Tensor) -> Tensor:
    """Return the logits of rows of one document each, as a plain script would compute them."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device).expand(1, -1)
    config, rotation = network.config, None
    hidden = network.embedding(input_ids)
    if network.positions is not None:
        hidden = hidden + network.positions(places)
    else:
        rotation = rotations(places, config.head_size, config.rope_theta, hidden.dtype)
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
        loss.item()  # as a loop that prints its loss
        ends.append(time.perf_counter())
    return [after - before for before, after in pairwise(ends)]


def of_transformers(config: DecoderConfig, vocab_size: int, length: int) -> Any:
    """Return a network's shape as a configuration of transformers, as an export writes it."""
    from transformers import AutoConfig

    config = replace(config, vocab_size=vocab_size, max_positions=length)
    with torch.device("meta"):
        network, _ = equivalent(config, Decoder(config).state_dict())
    content = dict(network.content)
    return AutoConfig.for_model(content.pop("model_type"), **content)


def trainer_speed(
    model: Any,
    data: list[dict[str, Any]],
    collate: Callable[[list[Any]], tuple[dict[str, Any], int]],
    folder: Path,
    steps: int,
    is_grouped: bool,
    batch_size: int = BATCH,
    kind: str = "",
) -> float:
    """Return the useful tokens per second of a Trainer of transformers.

    Args:
        model: of transformers.
        data: examples, each with its `length`.
        collate: examples -> batch and its number of useful tokens.
        folder: of the Trainer.
        steps: how many; the first ones do not count.
        is_grouped: whether texts of similar lengths share a batch.
        batch_size: examples of a step.
        kind: `Seq2Seq` for the Seq2SeqTrainer.
    """
    import transformers

    ends, useful = [], []

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def collated(examples: list[Any]) -> dict[str, Any]:
        batch, num_tokens = collate(examples)
        useful.append(num_tokens)
        return batch

    arguments = getattr(transformers, f"{kind}TrainingArguments")(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
        use_cpu=True,
        **({"train_sampling_strategy": "group_by_length"} if is_grouped else {}),
    )
    options = {"train_dataset": data, "data_collator": collated, "callbacks": [Ends()]}
    getattr(transformers, f"{kind}Trainer")(model=model, args=arguments, **options).train()
    return float(np.sum(useful[WARM_UP:steps]) / (ends[-1] - ends[WARM_UP - 1]))


FAMILY = "causal_lm"
ROUNDS = 3
adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)


class Clock(Callback):
    """Notes when each step ended, and how many tokens it trained on."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, _: Any):
        self.ends.append(time.perf_counter())
        self.tokens.append(int((batch["labels"] != -100).sum()))


class RaggedData(LanguageModelDataModule):
    """The documents, each a sample."""

    def __init__(self, documents: list[np.ndarray], longest: int = LONGEST, **options: Any) -> None:
        super().__init__(**options)
        self.context_length = longest
        ids = np.concatenate(documents)
        tokens = ids.astype(token_dtype(int(ids.max()) + 1))
        sizes = np.array([len(ids) for ids in documents])
        self.stream = TokenStream(
            tokens, np.cumsum(sizes) - sizes, sizes - 1, np.arange(len(sizes))
        )

    @property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer that only the checkpoint reads."""
        return byte_tokenizer()

    def prepare_data(self) -> None:
        """Do nothing: the tokens exist already."""

    def setup(self, stage: str) -> None:
        """Build the datasets."""
        PlannedDataModule.setup(self, stage)

    def build(self, stage: Stage) -> PlannedDataset:
        digest = hashlib.sha256(self.stream.tokens.tobytes()).hexdigest()
        store: Any = StreamStore(self.stream, self.tokenizer, digest)
        return TokenDataset(store, TRAIN, self.context_length, "documents")


def trainer_of(folder: Path, callbacks: list[Callback], **options: Any) -> Trainer:
    """Return a Trainer as on the command line: loggers, no validation, and these callbacks."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": -1,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1.0,
        "logger": default_loggers(str(folder), None),
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    return Trainer(**{**defaults, **options}, callbacks=callbacks)


def fit(
    folder: Path, module: LitCausalLM, data: PlannedDataModule, steps: int, *callbacks: Callback
) -> Clock:
    """Train as the command line does: ledger, checkpoints, loggers, progress."""
    clock = Clock()
    on = [*default_callbacks(), ProgressLine(), clock, *callbacks]
    trainer_of(folder, on, max_steps=steps).fit(module, data)
    return clock
