"""Low-rank adapters on transformers models: only they learn, on any devices; then merged."""

import pytest
import torch

from lit_models import LitSeq2Seq
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.commands.export import export
from tests.distributed.launch import in_world, unisono_here
from tests.seq2seq.family import pair_files
from tests.seq2seq.test_module import trained
from tests.seq2seq.tiny import saved
from tests.text_corpora import table
from tests.toy import ledger_lines

PAIRS = [(f"b{n}", "baker") for n in range(40)]


@pytest.mark.parametrize(("kind", "targets"), [("T5", ["q", "v", "wo"]), ("Bart", ["q_proj"])])
def test_adapters_alone_learn_and_are_merged_by_an_export(tmp_path, kind, targets):
    from transformers import AutoModelForSeq2SeqLM

    folder, pairs = saved(tmp_path / kind, kind), table(tmp_path / "pairs.csv", PAIRS)
    options = {"pretrained": str(folder), "lora": LoraOptions(targets, rank=2, alpha=4)}
    module, _ = trained(tmp_path, pairs, 4, network=None, **options)
    before = AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
    after = module.network.model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert all(weight.any() for name, weight in after.items() if name.endswith("lora_B"))
    path, sources = tmp_path / "checkpoints" / "last.ckpt", ["b3", "smith"]
    export(path, to=tmp_path / "merged", class_path="lit_models.LitSeq2Seq")
    again = LitSeq2Seq.from_exported(tmp_path / "merged")
    assert again.recipe["lora"] is None
    for mine, theirs in zip(module.translations(sources), again.translations(sources), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], rel=1e-4)
    peft = pytest.importorskip("peft", reason="extra: peft")
    export(path, to=tmp_path / "adapter", adapter=True, class_path="lit_models.LitSeq2Seq")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(again.network.model.state_dict(), theirs.state_dict())


@pytest.mark.slow
def test_adapters_learn_the_same_on_two_devices(tmp_path):
    folder, runs = saved(tmp_path / "t5"), {"one": (1, "auto"), "two": (2, "fsdp")}
    pair_files(tmp_path)
    for name, (devices, strategy) in runs.items():
        command = [
            *("fit", "--config", "seq2seq/finetune.yaml", f"--model.pretrained={folder}"),
            *("--model.lora.targets=[q,v]", "--model.optimizer.lr=0.05", "--trainer.max_epochs=1"),
            f"--data.train_files={tmp_path / 'pairs.csv'}",
            f"--data.validation_files={tmp_path / 'judged_pairs.csv'}",
            *("--data.global_batch_size=8", "--model.decoding={num_beams: 1, max_new_tokens: 4}"),
            *("--trainer.accelerator=cpu", f"--trainer.devices={devices}"),
            f"--trainer.strategy={strategy}",
            f"--trainer.default_root_dir={tmp_path / name}",
        ]
        in_world(devices, unisono_here, *command)
    losses = [[line["loss"] for line in ledger_lines(tmp_path / name)] for name in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
