"""Models of transformers in folders pass through all stages: dump, fit, test, predict."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from datamodules.tokenizers.text import byte_tokenizer
from tests.causal_lm.folders import saved
from tests.distributed.lens_family import story_files
from tests.text_corpora import saved_tokenizer
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
SIZES = {"GPT2": {"n_positions": 64, "n_layer": 3}}
LLAMA = {"num_hidden_layers": 3}
# The shipped config of such a model, at a size for tests.
QUICK = {
    "model": {
        "init_args": {
            "lr_scheduler": {"init_args": {"restarts": [3], "warmup": 1}},
            "subject": {"layer": 1},
            "lens": {"num_words": 3},
            "losses": {
                "teacher_text": {"end": 3},
                "teacher_reconstruction": {"end": 3},
                "reconstruction": {"begin": 3},
                "reference": {"begin": 3},
                "effect": {"weight": 0.1, "begin": 4},
            },
            "temperature": {"begin": 3, "until": 6},
        }
    },
    "data": {"init_args": {"global_batch_size": 8, "loader": {"num_workers": 0}}},
    "trainer": {
        "max_steps": 6,
        "val_check_interval": 3,
        "limit_val_batches": 1,
        "limit_test_batches": 2,
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [
        ("GPT2", "gpt2_frozen", []),
        ("GPT2", "gpt2_unfrozen", []),
        ("Llama", "simplestories", []),
        ("Qwen2", "simplestories", ["--model.teacher.rare=1"]),
    ],
)
def test_a_model_of_transformers_passes_through_all_stages(
    unisono: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    config: str,
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model, store = tmp_path / "model", tmp_path / "store"
    saved(model, kind, vocab_size=257, **SIZES.get(kind, LLAMA))
    saved_tokenizer(byte_tokenizer(), model)
    story_files(tmp_path)
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(QUICK))

    def done(*arguments: str) -> str:
        status, output = unisono(*arguments, f"--model.subject.path={model}")
        assert status == 0, output
        return output

    files = [f"--data.{p}_files=stories-{p}.jsonl" for p in ("train", "validation", "test")]
    done(
        *["predict", "--config", "consistency_lens/dump.yaml", *files],
        *[f"--data.predict_output={store}", "--data.context_length=48", "--model.subject.layer=1"],
        *["--data.loader.num_workers=0", "--trainer.accelerator=cpu"],
    )
    quick = ["--config", f"consistency_lens/{config}.yaml", "--config", "quick.yaml", *options]
    quick += ["--trainer.default_root_dir=run", f"--data.activations={store}"]
    done("fit", *quick)
    table = done("test", *quick, "--ckpt_path", "auto")
    done("predict", *quick, "--ckpt_path", "auto")

    assert "shuffled_examples" in table
    # It had both phases, wrote each explanation and left the subject out.
    run = tmp_path / "run"
    num_tested = len(np.load(store / "test.position.npy"))
    lines = ledger_lines(run)
    warm, joint = {"teacher_text", "teacher_reconstruction"}, {"reconstruction", "reference"}
    terms = [*[warm] * 3, joint, *[joint | {"effect"}] * 2]
    assert [set(line["terms"]) for line in lines] == terms
    assert all(line["is_finite"] for line in lines)
    written = (run / "explanations.jsonl").read_text().splitlines()
    assert len(written) == num_tested
    assert all(json.loads(line)["error"] > 0 for line in written)
    weights = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert not [name for name in weights if name.startswith(("lens.subject", "lens.untrained"))]
    blocks = [name for name in weights if ".network." in name]
    assert bool(blocks) == (config != "gpt2_frozen")
    assert not [name for name in blocks if "wte" in name or "embed" in name or "lm_head" in name]
