"""Rows of the GPU benchmark: each trains or uses one network at one size and measures its speed.

The peers are a loop in the style of nanoGPT, and transformers with accelerate.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from datamodules.core.planned import PlannedDataset, Stage
from datamodules.demo import demo_occupations, demo_text
from datamodules.files.splitting import TRAIN
from datamodules.text.packing import BlockDataset
from datamodules.tokenizers.text import byte_tokenizer
from lit_models import LitCausalLM
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.generation import GenerationOptions, generate
from lit_models.causal_lm.loss import PADDED_TO_ON_GPU
from lit_models.causal_lm.module import ComputationOptions
from lit_models.causal_lm.network import PRESETS, Decoder, DecoderConfig
from lit_models.cli import built
from lit_models.config_files import find_config
from lit_models.seo.nearest import ExactSearch
from lit_models.training import LastCheckpoint, default_callbacks
from lit_models.training.checkpoints import SAVES
from lit_models.training.strategies import FullyShardedStrategy
from lit_models.training.throughput import FILE_NAME
from tests.benchmarks.figures import Aim, Figure
from tests.benchmarks.language_models import (
    RaggedData,
    adamw,
    of_transformers,
    plain_logits,
    trainer_of,
)
from tests.distributed.launch import ROOT
from tests.text_corpora import StreamStore
from tests.toy import ledger_lines

# The warm-up absorbs compilation and the allocator's growth; a round is one interval of the logs.
WARM_UP, ROUNDS, STEPS_OF_ROUND = 10, 3, 10
STEPS = WARM_UP + ROUNDS * STEPS_OF_ROUND
CLIP = 1.0
GPU, TRACE = "GPU", "GPU_TRACE"  # family of figures; variable with a profile's path
LOADS = {"tokens/s": "tokens", "rows/s": "samples"}  # unit -> key of a batch's load
MOST_OVERHEAD, MOST_WAIT, MOST_GRAPHS, MOST_STALL_S = 1.01, 0.01, 3, 0.5
OF_LINES = (  # keys of `throughput.jsonl`: key, what, unit, aim
    ("mfu", "", "MFU", None),
    ("padding_share", ", positions of padding", "share", Aim(0.02, of="value")),
)
SHAKESPEARE_NATS = 1.47  # loss that nanoGPT reports for this size
MOST_APART = 0.01  # largest gap, in nats
LEAST_SHOWN = 0.001  # least share of the time that is shown
PROMPT, WRITTEN = 64, 128  # tokens of a prompt, tokens generated
COPIED_FLOATS, FEW_FLOATS = 2**30, 2**20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DATA = ROOT.parent / "shared" / "data"
SHAKESPEARE, OCCUPATIONS = DATA / "shakespeare" / "input.txt", DATA / "occupations"
HISCO = "occupation_coder/hisco.yaml"
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_positions": 64}
ONE_B = DecoderConfig(
    vocab_size=128_256,
    max_positions=2048,
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    feed_forward=8192,
    rope_theta=500_000.0,
)
SEVEN_B = replace(
    ONE_B,
    **{"vocab_size": 32_000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32},
    **{"num_kv_heads": 32, "feed_forward": 11_008, "tied": False, "rope_theta": 10_000.0},
)


@dataclass(frozen=True)
class Size:
    """One shape of a language model, and the size of its steps.

    Args:
        config: of the network.
        rows: of a step, in one micro-batch, all of `length` positions.
        length: positions of a row.
        lora: train adapters on a bfloat16 base.
    """

    config: DecoderConfig
    rows: int
    length: int
    lora: bool = False

    def small(self) -> Size:
        """Return the same at a toy size, for a machine without a GPU."""
        heads = {"num_kv_heads": None, "feed_forward": None}
        return replace(self, config=replace(self.config, **SMALL, **heads), rows=2, length=64)

    @property
    def filled_vocabulary(self) -> int:
        """V as nanoGPT and our loss pad it: products with a multiple of 128 are faster."""
        return -(-(self.config.vocab_size or 0) // PADDED_TO_ON_GPU) * PADDED_TO_ON_GPU


SIZES = {
    "gpt2-124m": Size(PRESETS["gpt2-124m"], rows=32, length=1024),
    "1b": Size(ONE_B, rows=8, length=2048),
    "7b, LoRA": Size(SEVEN_B, rows=4, length=2048, lora=True),
}
ENCODER, DECODER = (f"model.init_args.{part}.init_args" for part in ("encoder", "decoder"))
BASE = {"width": 768, "num_heads": 12, "feed_forward": 3072}
CODER: dict[str, Any] = {ENCODER: {"num_layers": 12, **BASE}, DECODER: {"num_layers": 6, **BASE}}
MINI = {"width": 384, "num_layers": 6, "num_heads": 12, "feed_forward": 1536}
RETRIEVER: dict[str, Any] = {ENCODER: MINI}


class Rounds(Callback):
    """Notes the seconds of each round of steps and the GPU's clocks, and waits for the GPU only
    between rounds; afterwards a plain loop trains on the batches of each round again.

    Args:
        unit: of the rate, such as tokens/s.
        warm_up: steps before the first round.
        of_round: steps of a round.
    """

    def __init__(
        self, unit: str = "tokens/s", warm_up: int = WARM_UP, of_round: int = STEPS_OF_ROUND
    ) -> None:
        self.unit, self.warm_up, self.of_round = unit, warm_up, of_round
        self.seconds: list[float] = []
        self.amounts: list[float] = []
        self.loop_seconds: list[float] = []
        self.clocks: list[str] = []
        self.peak_bytes = 0
        self._batches: list[Any] = []
        self._began, self._steps, self._amount = 0.0, 0, 0.0
        self._profiler = profiler(warm_up)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, _: Any):
        if self._steps >= self.warm_up:
            self._batches.append(batch)
        self.note(batch["load"][LOADS[self.unit]])

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.peak_bytes = peak_bytes()
        if isinstance(trainer.strategy, FullyShardedStrategy):
            return  # the plain loop cannot gather shards
        for start in range(0, len(self._batches), self.of_round):
            batches = self._batches[start : start + self.of_round]
            self.loop_seconds.append(loop_seconds(trainer, module, batches))

    def note(self, amount: float) -> None:
        """Count a step that trained on so much."""
        if self._profiler is not None:
            self._profiler.step()
        self._steps, self._amount = self._steps + 1, self._amount + amount
        if self._steps < self.warm_up or (self._steps - self.warm_up) % self.of_round:
            return
        now = clock()
        if self._steps > self.warm_up:
            self.seconds.append(now - self._began)
            self.amounts.append(self._amount)
            self.clocks.append(clock_state())
        elif torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # building a network may take more than a step
        self._began, self._amount = clock(), 0.0

    def figures(self, name: str = "", lines: Sequence[dict[str, Any]] = ()) -> list[Figure]:
        """Return all figures, the speed first.

        Args:
            name: of the quantity, if the row measures more than one.
            lines: of `throughput.jsonl`, one for each round.
        """
        rates = [amount / s for amount, s in zip(self.amounts, self.seconds, strict=True)]
        memory = ((self.peak_bytes or peak_bytes()) / 2**30,) * 2
        options = {"note": "; ".join(filter(None, [*self.clocks, split(lines)]))}
        options["memory_gib"] = memory if memory[0] else None
        found = [Figure(GPU, name, self.unit, rates, **options)]
        if self.loop_seconds:
            ours, theirs = (
                [1e3 * s / self.of_round for s in seconds]
                for seconds in (self.seconds, self.loop_seconds)
            )
            beside = ("plain loop over its module and batches", theirs, Aim(MOST_OVERHEAD))
            found.append(Figure(GPU, ", a step, all on", "ms", ours, *beside))
        for column, what, unit, aim in OF_LINES:
            if values := [line[column] for line in lines if column in line]:
                found.append(Figure(GPU, what, unit, values, aim=aim))
        if lines:
            waits = [_share([line], "data") for line in lines]
            aim = Aim(MOST_WAIT, of="value")
            found.append(Figure(GPU, ", time waited for data", "share", waits, aim=aim))
        return found


def profiler(warm_up: int) -> Any:
    """Return a started profiler of three late steps of the warm-up if the environment names a file
    for it; else `None`, also if the warm-up is too short to hold them."""
    path = os.environ.get(TRACE)
    if path is None or warm_up < 5:
        return None
    plan = torch.profiler.schedule(wait=warm_up - 5, warmup=1, active=3, repeat=1)
    found = torch.profiler.profile(
        schedule=plan, on_trace_ready=lambda made: made.export_chrome_trace(path)
    )
    found.start()
    return found


def split(lines: Sequence[dict[str, Any]]) -> str:
    """Return the shares of time, the longest first, such as `time: steps 99 %, data 1 %`."""
    if not lines:
        return ""
    shares = {phase: _share(lines, phase) for phase in lines[0]["split"]}
    shown = sorted((s, name) for name, s in shares.items() if s >= LEAST_SHOWN)
    return "time: " + ", ".join(f"{name} {100 * s:.1f} %" for s, name in reversed(shown))


def _share(lines: Sequence[dict[str, Any]], phase: str) -> float:
    spent = sum(line["split"][phase] for line in lines)
    return spent / sum(line["seconds"] for line in lines)


def clock() -> float:
    """Return the time in seconds, once the GPU has finished all work in its queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def clock_state() -> str:
    """Return the GPU's clock rate and power draw; "" if NVML does not give them."""
    try:
        return f"{torch.cuda.clock_rate()} MHz, {torch.cuda.power_draw() / 1e3:.0f} W"
    except (AssertionError, ModuleNotFoundError, RuntimeError):  # no GPU, package or permission
        return ""


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def looped(step: Callable[[], Any], amount: float, unit: str, *sizes: int) -> Rounds:
    """Return the rounds of a step that handles `amount` of a unit. Args: sizes, as of `Rounds`."""
    rounds = Rounds(unit, *sizes)
    for _ in range(rounds.warm_up + ROUNDS * rounds.of_round):
        step()
        rounds.note(amount)
    return rounds


def loop_seconds(trainer: Trainer, module: Any, batches: list[Any]) -> float:
    """Return the seconds that a hand-written loop takes for a round: the same network, compiled or
    not, the same loss, precision, clipping and optimizer, on batches already on the device."""
    (optimizer,) = trainer.optimizers
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    begun = clock()
    for batch in batches:
        optimizer.zero_grad()
        with trainer.precision_plugin.forward_context():
            terms = module.training_terms(batch)
            loss = sum(t.total / t.count for t in terms.values() if t.total.requires_grad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
    return clock() - begun


def quiet_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """Return a Trainer on the GPU in bfloat16, with all features but checkpoints."""
    # Checkpoints of a billion weights would take longer than the steps.
    saves = (Checkpoint, LastCheckpoint)
    usual = [c for c in default_callbacks() if not isinstance(c, saves)]
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False}
    given = {"accelerator": "auto", "devices": 1, "precision": "bf16-mixed", **quiet, **options}
    return trainer_of(folder, [*usual, *callbacks], log_every_n_steps=STEPS_OF_ROUND, **given)


def trained(folder: Path, module: Any, data: Any, unit: str, **options: Any) -> list[Figure]:
    """Train for the rounds; return the figures. Args: options, of the Trainer."""
    rounds = Rounds(unit)
    quiet_trainer(folder, rounds, max_steps=STEPS, **options).fit(module, data)
    written = (folder / FILE_NAME).read_text("utf-8").splitlines()
    lines = [line for line in map(json.loads, written) if line["step"] > WARM_UP]
    found = rounds.figures(lines=lines)
    if (compiler := sys.modules.get("torch._dynamo.utils")) and (
        graphs := compiler.counters["stats"]["unique_graphs"]
    ):
        aim = Aim(MOST_GRAPHS, of="value")
        found.append(Figure(GPU, ", compiled", "graphs", [graphs], aim=aim))
    return found


class EqualBlocks(RaggedData):
    """A text in blocks of equal length, one a row: `layout: blocks` without the short last block,
    so that all steps have one shape and none is compiled anew.

    Args:
        size: of the rows.
        steps: that the text suffices for; it is random tokens, or the demo text's bytes,
            repeated.
    """

    def __init__(self, size: Size, steps: int = STEPS, is_random: bool = True) -> None:
        number = size.rows * steps * size.length + 1
        text = np.random.default_rng(0).integers(size.config.vocab_size, size=number)
        if not is_random:
            text = np.resize(np.frombuffer(demo_text().read_bytes(), np.uint8), number)
        batch = {"global_batch_size": size.rows, "micro_batch_size": size.rows}
        super().__init__([text], longest=size.length, **batch)

    def build(self, stage: Stage) -> PlannedDataset:
        store: Any = StreamStore(self.stream, self.tokenizer, "random")
        return BlockDataset(store, TRAIN, self.context_length, seed=None)


def model_of(size: Size, compiles: bool) -> LitCausalLM:
    """Return a model to pre-train, or one whose adapters are trained."""
    seed_everything(0, verbose=False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraOptions(targets, 16, 32.0, base_dtype="bfloat16") if size.lora else None
    computation = ComputationOptions(compile=compiles)
    return LitCausalLM(adamw, network=size.config, lora=lora, computation=computation)


def language_model(size: Size, compiles: bool, folder: Path, **options: Any) -> list[Figure]:
    """Train as the command line does. Args: options, of the Trainer."""
    return trained(folder, model_of(size, compiles), EqualBlocks(size), "tokens/s", **options)


def curves(size: Size, compiles: bool, steps: int, folder: Path) -> list[Figure]:
    """Train in bfloat16 and in float32 on the same plan; return the gap between the mean losses of
    the last steps."""
    ends = []
    for precision in ("bf16-mixed", "32-true"):
        trainer = quiet_trainer(folder / precision, max_steps=steps, precision=precision)
        trainer.fit(model_of(size, compiles), EqualBlocks(size, steps, is_random=False))
        losses = [line["loss"] for line in ledger_lines(folder / precision)]
        ends.append(statistics.mean(losses[-steps // 10 :]))
    note = "nats at the end: " + ", ".join(f"{end:.4f}" for end in ends)
    aim = Aim(MOST_APART, of="value")
    return [Figure(GPU, "", "nats", [abs(ends[0] - ends[1])], aim=aim, note=note)]


class Timed(LastCheckpoint):
    """Measures how long training stops for a checkpoint, and when the file is written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every_n_minutes=None, every_epoch=False, **options)
        self.stalls: list[float] = []
        self.whole: list[float] = []

    def _save(self, trainer: Trainer) -> None:
        begin = clock()
        super()._save(trainer)
        self.stalls.append(clock() - begin)
        SAVES.settle()
        self.whole.append(clock() - begin)


def stalls(size: Size, is_sharded: bool, folder: Path, **options: Any) -> list[Figure]:
    """Save after each of three steps; return how long training stops, and how long it would stop if
    it waited for the file. Args: options, of the Trainer."""
    timed = Timed(every_n_steps=1)
    strategy = FullyShardedStrategy(sharded_checkpoint=True) if is_sharded else "auto"
    trainer = quiet_trainer(folder, timed, max_steps=ROUNDS, strategy=strategy, **options)
    trainer.fit(model_of(size, False), EqualBlocks(size, ROUNDS))
    stall = Figure(GPU, "", "s", timed.stalls, aim=Aim(MOST_STALL_S, of="value"))
    return [stall, Figure(GPU, ", until it is written", "s", timed.whole)]


def writing(size: Size, number: int, folder: Path) -> list[Figure]:
    """Generate texts with bfloat16 weights; return tokens/s, and GB/s of weights read."""
    torch.manual_seed(0)
    with DEVICE:
        network = Decoder(size.config).to(torch.bfloat16).eval()
    prompts = torch.randint(256, (number, PROMPT), device=DEVICE)
    lengths = torch.full((number,), PROMPT, device=DEVICE)
    options = GenerationOptions(max_new_tokens=WRITTEN, temperature=0.0)
    rounds = Rounds("tokens/s", 1, 1)
    for _ in range(1 + ROUNDS):
        made = generate(network, byte_tokenizer(), prompts, lengths, range(number), options)
        rounds.note(int(made.num_tokens.sum()))
    found = rounds.figures()
    num_bytes = sum(p.nbytes for p in network.parameters())
    read = [rate / number * num_bytes / 1e9 for rate in found[0].ours]
    return [*found, Figure(GPU, "", "GB/s", read)]


def searching(number: int, is_ours: bool, folder: Path) -> list[Figure]:
    """Search `number` vectors of 384 numbers for 256 queries: exactly, or in plain float32."""
    torch.manual_seed(0)
    documents, queries = (torch.randn(n, 384, device=DEVICE) for n in (number, 256))

    def search_once() -> Any:
        if is_ours:
            return ExactSearch(documents, DEVICE).search(queries, 100)
        parts = [(queries @ part.T).topk(100) for part in documents.split(2**20)]
        return torch.cat([part.values for part in parts], 1).topk(100)

    return looped(search_once, len(queries), "searches/s", 1, 1).figures()


def built_from(name: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Return module and data of a shipped config with changes, dotted key -> value."""
    config = yaml.safe_load(find_config(name).read_text("utf-8"))
    for key, value in changes.items():
        *groups, last = key.split(".")
        node = config
        for group in groups:
            node = node[group]
        node[last] = value
    seed_everything(0, verbose=False)
    return built(config, "model"), built(config, "data")


def of_config(name: str, changes: dict[str, Any], rows: int, folder: Path) -> list[Figure]:
    """Train the model of a shipped config at another size, on the data that it generates, with so
    many rows in a step of one micro-batch."""
    batch = {f"data.init_args.{key}_batch_size": rows for key in ("global", "micro")}
    return trained(folder, *built_from(name, changes | batch), "rows/s")


def prediction(name: str, changes: dict[str, Any], number: int, folder: Path) -> list[Figure]:
    """Code the demo's texts with a coder that has trained one step; return rows/s from table to
    table, and the minutes for ten million rows. Texts are repeated and numbered: equal ones are
    coded once."""
    header, *texts = demo_occupations().read_text("utf-8").splitlines()
    texts = itertools.cycle(text for text in texts if not text.startswith('"'))
    table = folder / "texts.csv"
    table.write_text("\n".join([header, *(f"{n} {next(texts)}" for n in range(number)), ""]))
    files = {"predict_files": str(table), "predict_output": str(folder / "coded.csv")}
    asked = {f"data.init_args.{key}": value for key, value in files.items()}
    module, data = built_from(name, changes | asked)
    quiet_trainer(folder, max_steps=1).fit(module, data)
    trainer = quiet_trainer(folder)
    begun = clock()
    trainer.predict(module, data, return_predictions=False)
    rate = number / (clock() - begun)
    minutes = Figure(GPU, " of ten million", "minutes", [1e7 / rate / 60])
    return [Figure(GPU, "", "rows/s", [rate]), minutes]


def nanogpt_loop(size: Size, folder: Path) -> list[Figure]:
    """Train the same network as nanoGPT does: compiled as a whole, autocast, full logits of a
    padded vocabulary."""
    torch.manual_seed(0)
    with DEVICE:
        network = Decoder(replace(size.config, vocab_size=size.filled_vocabulary))

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(plain_logits(network, inputs).flatten(0, 1), labels.flatten())

    return steps(size, torch.compile(loss_of), list(network.parameters()))


def transformers_loop(size: Size, folder: Path) -> list[Figure]:
    """Train a transformers model of the same shape with accelerate."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = of_transformers(size.config, size.filled_vocabulary, size.length)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = Accelerator(mixed_precision="bf16").prepare(model.train())

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return steps(size, loss_of, list(model.parameters()))


def steps(size: Size, loss_of: Callable[[Tensor, Tensor], Tensor], parameters: Any) -> list[Figure]:
    """Return the figures of a loop that trains on random rows already on the device. Args: loss_of,
    inputs and labels -> mean loss."""
    optimizer, shape = adamw(parameters), (size.rows, size.length + 1)

    def step() -> None:
        ids = torch.randint(size.config.vocab_size, shape, device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return looped(step, size.rows * size.length, "tokens/s").figures()


def ceilings(is_small: bool, folder: Path) -> list[Figure]:
    """Return the device's ceilings: bfloat16 matrix products, and bytes read and written by a copy
    within its memory."""
    size = 256 if is_small else 8192
    a = torch.randn(size, size, device=DEVICE).to(torch.bfloat16)
    source = torch.ones(FEW_FLOATS if is_small else COPIED_FLOATS, device=DEVICE)
    target = torch.empty_like(source)
    product = looped(lambda: torch.mm(a, a), 2e-12 * size**3, "TFLOP/s")
    copy = looped(lambda: target.copy_(source), 2e-9 * source.nbytes, "GB/s")
    return [*product.figures(), *copy.figures()]


def by_command(config: str, folder: Path, **options: Any) -> float:
    """Return the seconds of a shipped run by the command line, start included."""
    begun = time.perf_counter()
    command = ["-m", "lit_models", "fit", "--config", config]
    command += [f"--trainer.default_root_dir={folder}"]
    command += [f"--data.{key}={value}" for key, value in options.items()]
    # Not `run`: its own mark would hide the child from the process that enforces the limit.
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip()[-2000:])
    return time.perf_counter() - begun


def hisco(folder: Path) -> list[Figure]:
    """Train the published coder on its data."""
    tables = {"train_files": "train", "test_files": "dev", "code_book.path": "hisco_codes"}
    files = {key: OCCUPATIONS / f"{name}.csv" for key, name in tables.items()}
    seconds = by_command(HISCO, folder, **files)
    return [Figure(GPU, ", start and end included", "s", [seconds])]


def shakespeare(text: Path, folder: Path) -> list[Figure]:
    """Train the published Shakespeare run; return its best validation loss, its seconds, and the
    tokens/s of its median step."""
    seconds = by_command("causal_lm/shakespeare_gpu.yaml", folder, train_files=text)
    header, *rows = (folder / "metrics.csv").read_text("utf-8").splitlines()
    column = header.split(",").index("val/loss")
    best = min(float(value) for row in rows if (value := row.split(",")[column]))
    steps = [x["targets"]["tokens"] / x["seconds"] for x in ledger_lines(folder) if "seconds" in x]
    aim = Aim(SHAKESPEARE_NATS, of="value")
    return [
        Figure(GPU, ", best val/loss", "nats", [best], aim=aim),
        Figure(GPU, ", start and end included", "s", [seconds]),
        Figure(GPU, "", "tokens/s", [statistics.median(steps)]),
    ]
