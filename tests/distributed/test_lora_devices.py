"""Adapters on a model of transformers: trained on two devices, exported to transformers."""

import json
from pathlib import Path

import pytest
import torch

from lit_models import LitCausalLM
from lit_models.commands.export import export
from tests.causal_lm.folders import saved_with_bytes
from tests.causal_lm.test_export import logits
from tests.distributed.families import write_documents
from tests.distributed.launch import in_world, unisono_here
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
OTHERS = [("GPT2", "fsdp", ["c_attn"]), ("Llama", "ddp", ["*"]), ("GPT2", "ddp", ["c_attn"])]
STEPS = 4


def fit(folder: Path, name: str, targets: list[str], devices: int, strategy: str) -> Path:
    """Train for some steps; return the checkpoint."""
    command = [
        *["fit", "--config", "causal_lm/lora.yaml", f"--model.pretrained={folder / 'base'}"],
        f"--data.train_files={folder / 'documents.jsonl'}",
        f"--data.validation_files={folder / 'documents.jsonl'}",
        f"--model.lora.targets={json.dumps(targets)}",
        *["--model.lora.rank=4", "--model.lora.dropout=0.0"],
        "--model.lora.base_dtype=float32",
        *["--model.optimizer.lr=0.05", "--trainer.accelerator=cpu", f"--trainer.max_steps={STEPS}"],
        *["--data.context_length=32", "--data.global_batch_size=8", "--data.micro_batch_size=2"],
        f"--trainer.default_root_dir={folder / name}",
        *[f"--trainer.devices={devices}", f"--trainer.strategy={strategy}"],
    ]
    in_world(devices, unisono_here, *command)
    return folder / name / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    ("kind", "strategy", "targets"),
    [
        ("Llama", "fsdp", ["q_proj", "v_proj"]),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in OTHERS),
    ],
)
def test_a_model_tuned_on_two_devices_is_read_by_transformers(kind, strategy, targets, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_documents(tmp_path / "documents.jsonl", number=40)
    saved_with_bytes(tmp_path / "base", kind, **({"n_positions": 64} if kind == "GPT2" else {}))
    path = fit(tmp_path, "two", targets, 2, strategy)
    fit(tmp_path, "one", targets, 1, "auto")
    losses = [[line["loss"] for line in ledger_lines(tmp_path / run)] for run in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]

    export(path, to=tmp_path / "model")
    trained = LitCausalLM.load_from_checkpoint(path).eval()
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("the old baker", return_tensors="pt")
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(**ids).logits
        before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()(**ids).logits
    expected = logits(trained.network, ids["input_ids"])
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-4)
    assert (theirs - before).abs().max() > 0.01
    exported = LitCausalLM.from_exported(tmp_path / "model")
    torch.testing.assert_close(logits(exported.network, ids["input_ids"]), expected)
