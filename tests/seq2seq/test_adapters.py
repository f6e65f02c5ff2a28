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
def test_adapters_learn_the_same_on_two_devices(own_folder):
    folder = saved(own_folder / "t5")
    pair_files(own_folder)
    options = [
        *("--config=seq2seq/finetune.yaml", f"--model.pretrained={folder}"),
        *("--model.lora.targets=[q,v]", "--model.optimizer.lr=0.05", "--data.global_batch_size=8"),
        *("--data.train_files=pairs.csv", "--data.validation_files=judged_pairs.csv"),
        "--model.decoding={num_beams: 1, max_new_tokens: 4}",
    ]
    in_world(1, unisono_here, "certify", *options, "--strategies=fsdp", "--levels=A")
