"""Preference tuning beside TRL's DPOTrainer: equal losses, equal final figures, and speed."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from datamodules import PreferenceDataModule
from datamodules.core.planned import LoaderOptions
from datamodules.files.splitting import TextSplit
from datamodules.tokenizers.text import byte_tokenizer
from lit_models import LitPreference
from lit_models.training import default_callbacks
from tests.benchmarks.language_models import Clock
from tests.causal_lm.folders import saved
from tests.text_corpora import rows_file, saved_tokenizer
from tests.toy import ledger_lines, toy_trainer

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]  # of trl
PAIRS, BATCH, STEPS, WARM_UP, RATE, BETA = 400, 16, 20, 3, 3e-4, 0.1


def rows() -> list[dict[str, str]]:
    """Return ragged prompts with answers; in four of five cases the quiet answer is preferred."""
    rng = np.random.default_rng(0)
    words = ["baker", "smith", "wool", "salt", "bread", "weight", "old", "north", "sold", "the"]

    def text(mean: float) -> str:
        return " ".join(rng.choice(words, max(1, int(rng.lognormal(np.log(mean), 0.6)))))

    made = []
    for number in range(PAIRS):
        answers = [f" {text(6)}.", f" {text(6)}!!!"][:: -1 if rng.random() < 0.2 else 1]
        prompt = f"<|endoftext|>{number} {text(8)}:"  # one token in both programs
        made.append(dict(zip(("prompt", "chosen", "rejected"), (prompt, *answers), strict=True)))
    return made


def test_losses_and_figures_are_those_of_trl(tmp_path: Path, capsys: Any) -> None:
    trl = pytest.importorskip("trl", reason="beside trl 1.16")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    folder, tokenizer = tmp_path / "model", byte_tokenizer()
    tokens = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    torch.manual_seed(0)
    saved(folder, "Llama", **tokens, **sizes, num_attention_heads=4, max_position_embeddings=512)
    saved_tokenizer(tokenizer, folder)

    seed_everything(1, verbose=False)
    pairs, clock = rows(), Clock()
    data = PreferenceDataModule(
        rows_file(tmp_path / "pairs.jsonl", [{**p, "prompt": p["prompt"][13:]} for p in pairs]),
        context_length=512,
        global_batch_size=BATCH,
        split=TextSplit(0.2),
        loader=LoaderOptions(num_workers=0),
    )
    adamw = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0, fused=True)
    module = LitPreference(BETA, optimizer=adamw, pretrained=str(folder))
    limits = {
        "max_steps": STEPS,
        "precision": 32,
        "gradient_clip_val": 1.0,
        "val_check_interval": STEPS,
    }
    start = time.perf_counter()
    trainer = toy_trainer(tmp_path / "own", callbacks=[*default_callbacks(), clock], **limits)
    trainer.fit(module, data)
    own_s = time.perf_counter() - start
    own = [line["loss"] for line in ledger_lines(tmp_path / "own")]
    own_figures = [
        float(trainer.callback_metrics[f"val/{n}"]) for n in ("loss", "accuracy", "margin")
    ]

    def chosen(part: str, ids: np.ndarray) -> Any:
        lines = data.datasets[part].stream.lines[data.datasets[part].firsts[ids]]
        return Dataset.from_list([pairs[line - 1] for line in lines.tolist()])

    order = np.concatenate([data.plan("train", 0).step_ids(step) for step in range(STEPS)])
    held = chosen("validation", np.arange(len(data.datasets["validation"].lengths)))
    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    on = {"output_dir": str(tmp_path / "trl"), "report_to": [], "use_cpu": True, "bf16": False}
    on |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    on |= {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    on |= {"max_steps": STEPS, "learning_rate": RATE, "lr_scheduler_type": "constant"}
    on |= {"weight_decay": 0.0, "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "beta": BETA}
    on |= {"precompute_ref_log_probs": True, "activation_checkpointing": False}
    on |= {"train_sampling_strategy": "sequential"}
    start = time.perf_counter()
    other = trl.DPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=trl.DPOConfig(**on),
        train_dataset=chosen("train", order),
        eval_dataset=held,
        processing_class=AutoTokenizer.from_pretrained(folder, pad_token="<|endoftext|>"),
        callbacks=[Ends()],
    )
    other.train()
    found, other_s = other.evaluate(), time.perf_counter() - start
    their = [line["loss"] for line in other.state.log_history if "loss" in line]
    names = ("loss", "rewards/accuracies", "rewards/margins")
    their_figures = [found[f"eval_{name}"] for name in names]
    own_step, their_step = (
        (e[-1] - e[WARM_UP]) / (len(e) - WARM_UP - 1) for e in (clock.ends, ends)
    )
    with capsys.disabled():
        apart = max(abs(a - b) for a, b in zip(own[:5], their[:5], strict=True))
        print(f"\nlosses of the first five steps are {apart:.1g} apart at most")
        for name, losses, figures, one, whole in (
            ("own", own, own_figures, own_step, own_s),
            ("trl", their, their_figures, their_step, other_s),
        ):
            said = " ".join(f"{value:.4f}" for value in [*losses[:5], losses[-1]])
            held_out = " ".join(f"{value:.4f}" for value in figures)
            print(f"{name}: {said}; held out {held_out}; {one:.3f} s a step, {whole:.1f} s")
    assert own[:5] == pytest.approx(their[:5], abs=1e-5)
    assert own_figures == pytest.approx(their_figures, abs=0.005)
    assert own_step < their_step
