"""Folders of transformers models pass through all stages: dump, fit, test, predict."""

import numpy as np
import pytest
import torch

from tests.causal_lm.folders import saved_with_bytes
from tests.distributed.lens_family import story_files
from tests.toy import json_rows, ledger_lines

pytestmark = pytest.mark.slow
SIZES = {"GPT2": {"n_positions": 64, "n_layer": 3}}
LLAMA = {"num_hidden_layers": 3}
# The shipped config for such a model, at a size for tests.
MODEL = {
    "lr_scheduler.restarts": [3],
    "lr_scheduler.warmup": 1,
    "subject.layer": 1,
    "lens.num_words": 3,
    "losses.teacher_text.end": 3,
    "losses.teacher_reconstruction.end": 3,
    "losses.reconstruction.begin": 3,
    "losses.reference.begin": 3,
    "losses.effect": "{weight: 0.1, begin: 4}",
    "temperature": "{begin: 3, until: 6}",
}
TRAINER = {"max_steps": 6, "val_check_interval": 3, "limit_val_batches": 1, "limit_test_batches": 2}
QUICK = [
    *(f"--model.{name}={value}" for name, value in MODEL.items()),
    *(f"--trainer.{name}={value}" for name, value in TRAINER.items()),
    *("--data.global_batch_size=8", "--data.loader.num_workers=0"),
    *("--trainer.accelerator=cpu", "--trainer.devices=1"),
    *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
]


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [
        ("GPT2", "gpt2_frozen", []),
        ("GPT2", "gpt2_unfrozen", []),
        ("Llama", "simplestories", []),
        ("Qwen2", "simplestories", ["--model.teacher.told=1"]),
    ],
)
def test_a_model_of_transformers_passes_through_all_stages(done, own_folder, kind, config, options):
    model, store = own_folder / "model", own_folder / "store"
    path = f"--model.subject.path={model}"
    saved_with_bytes(model, kind, **SIZES.get(kind, LLAMA))
    story_files(own_folder)

    files = [f"--data.{p}_files=stories-{p}.jsonl" for p in ("train", "validation", "test")]
    done(
        *["predict", "--config", "consistency_lens/dump.yaml", *files],
        *[f"--data.predict_output={store}", "--data.context_length=48", "--model.subject.layer=1"],
        *["--data.loader.num_workers=0", "--trainer.accelerator=cpu", path],
    )
    quick = ["--config", f"consistency_lens/{config}.yaml", *QUICK, *options, path]
    quick += ["--trainer.default_root_dir=run", f"--data.activations={store}"]
    done("fit", *quick)
    table = done("test", *quick, "--ckpt_path", "auto")
    done("predict", *quick, "--ckpt_path", "auto")

    assert "shuffled_examples" in table
    # Both phases ran, each explanation was written, and the subject is not in the checkpoint.
    run = own_folder / "run"
    num_tested = len(np.load(store / "test.position.npy"))
    lines = ledger_lines(run)
    warm, joint = {"teacher_text", "teacher_reconstruction"}, {"reconstruction", "reference"}
    terms = [*[warm] * 3, joint, *[joint | {"effect"}] * 2]
    assert [set(line["terms"]) for line in lines] == terms
    assert all(line["is_finite"] for line in lines)
    written = json_rows(run / "explanations.jsonl")
    assert len(written) == num_tested
    assert all(line["error"] > 0 for line in written)
    weights = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert not [name for name in weights if name.startswith(("lens.subject", "lens.untrained"))]
    blocks = [name for name in weights if ".network." in name]
    assert bool(blocks) == (config != "gpt2_frozen")
    assert not [name for name in blocks if "wte" in name or "embed" in name or "lm_head" in name]
