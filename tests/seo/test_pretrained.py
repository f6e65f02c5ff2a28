"""Ranker and retriever on a transformers folder: unchanged, with adapters, lower layers frozen."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from datamodules.text.encoding import TextEncoding
from lit_models import LitRanker, LitRetriever
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.commands.export import export
from lit_models.run_files import read_checkpoint
from lit_models.seo.encoders import PretrainedEncoder
from tests.distributed.seo_retriever import adamw, retriever
from tests.search_collections import write_collection
from tests.seo.small_collection import VOCABULARY, bert_folder, ranker, ranking_data
from tests.toy import toy_trainer

sgd = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Files of a ranker, and a folder `bert` beside them."""
    folder = write_collection(tmp_path_factory.mktemp("collection"))
    bert_folder(folder / "bert")
    return folder


def fitted(folder, root, steps=2, data=None, **options):
    module = ranker(**{"pretrained": str(folder / "bert"), "optimizer": sgd, **options})
    torch.manual_seed(1)
    trainer = toy_trainer(root, max_steps=steps, limit_val_batches=0, precision=32)
    trainer.fit(module, ranking_data(data or folder))
    return module


def changes(folder, module):
    """Return parameter -> its distance from the folder's value."""
    content = json.loads((folder / "bert" / "config.json").read_text())
    before = PretrainedEncoder(content, folder / "bert").state_dict()
    after = {n.removeprefix("network.encoder."): p for n, p in module.named_parameters()}
    moved = {n: float((after[n].detach() - p).abs().max()) for n, p in before.items() if n in after}
    return {name: change for name, change in moved.items() if "key.bias" not in name}


def test_a_row_is_framed_and_scored_as_the_folder_says(folder, tmp_path):
    module = fitted(folder, tmp_path).eval()
    ids = [2, *(VOCABULARY.index(w) for w in ("salt", "wool")), 3, VOCABULARY.index("mill"), 3]
    model = module.network.encoder.model
    with torch.no_grad():
        types = torch.tensor([[0, 0, 0, 0, 1, 1]])
        hidden = model(input_ids=torch.tensor([ids]), token_type_ids=types).last_hidden_state
        vector = torch.tanh(module.network.dense(hidden.mean(1)))
        expected = module.network.score(vector).squeeze(-1)
    torch.testing.assert_close(module.rank("Salt wool", ["MILL"]), expected)
    assert min(changes(folder, module).values()) > 0


def test_frozen_layers_stand_still_and_lower_layers_learn_more_slowly(folder, tmp_path):
    frozen = ["encoder.model.embeddings.*"]
    module = fitted(folder, tmp_path, freeze=frozen, layer_decay=0.5)
    moved = changes(folder, module)
    assert all((change == 0) == ("embeddings" in name) for name, change in moved.items()), moved
    factors = {group["lr_factor"] for group in module.trainer.optimizers[0].param_groups}
    assert factors == {1.0, 0.5, 0.25, 0.125}  # the head, then three layers from the top down


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_are_trained_and_survive_checkpoint_and_export(folder, tmp_path, dtype):
    lora = LoraOptions(["query", "value"], rank=2, base_dtype=dtype)
    module = fitted(folder, tmp_path / "run", steps=4, lora=lora)
    learning = {name for name, p in module.named_parameters() if p.requires_grad}
    assert all(".query." in n or ".value." in n or "network.encoder" not in n for n in learning), (
        learning
    )
    assert len(learning) == 2 * 2 * 3 + 3
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert read_checkpoint(path)["text_encoder_recipe"]["lora"] is not None
    texts = ["mill", "salt bread", "iron iron wool"]
    expected = module.eval().rank("salt", texts)
    loaded = LitRanker.load_from_checkpoint(path).eval()
    assert torch.equal(loaded.rank("salt", texts), expected)
    export(path, to=tmp_path / "out", class_path="lit_models.LitRanker")
    (folder / "bert").rename(folder / "gone")  # neither needs the folder any more
    try:
        assert torch.equal(LitRanker.from_exported(tmp_path / "out").rank("salt", texts), expected)
    finally:
        (folder / "gone").rename(folder / "bert")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("FNet", "FNetModel of transformers reads padding: .*depend on the number of devices"),
        ("XLMRoberta", "max_length 48 is longer than the 46 positions"),
        ("Bart", "BartModel of transformers has a decoder, which .* take an encoder such as BERT"),
    ],
)
def test_a_model_that_is_no_encoder_of_single_texts_is_refused(kind, match, folder, tmp_path):
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"vocab_size": len(VOCABULARY), "max_position_embeddings": 48}
    sizes |= dict.fromkeys(("decoder_layers", "decoder_attention_heads"), 1)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    bert_folder(tmp_path / "bert")  # only for its tokenizer
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=match):
        fitted(tmp_path, tmp_path, data=folder)


@pytest.mark.parametrize("lora", [None, LoraOptions(["query", "value"], rank=2)])
def test_a_retrievers_vectors_are_those_of_transformers_pooled_over_tokens(folder, tmp_path, lora):
    import transformers

    write_collection(tmp_path / "collection")
    _, data = retriever(tmp_path / "run", {})
    data.tokenizer_options = None
    options = {"encode_chunk": 4, "pretrained": str(folder / "bert"), "lora": lora}
    module = LitRetriever(optimizer=adamw, **options)
    toy_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(module, data)
    if lora is not None:
        learning = [name for name, p in module.named_parameters() if p.requires_grad]
        assert {"lora" in n or "temperature" in n for n in learning} == {True}
        assert any("lora" in name for name in learning)
        return
    fitted = LitRetriever.load_from_checkpoint(tmp_path / "checkpoints/last.ckpt").eval()
    texts = ["salt bread", "iron boat mill. cheap wool"]
    model = transformers.AutoModel.from_config(fitted.network.encoder.model.config)
    model.load_state_dict(fitted.network.encoder.model.state_dict(), strict=False)
    encoding = TextEncoding(fitted.recipe)
    for text, vector in zip(texts, fitted.encode(texts, is_query=True), strict=True):
        ids = encoding.rows([encoding.ids(text)])["input_ids"]
        assert [VOCABULARY[n] for n in ids[0, [0, -1]]] == ["[CLS]", "[SEP]"]
        hidden = model.eval().to(vector.dtype)(input_ids=ids).last_hidden_state
        expected = F.normalize(hidden.mean(1), dim=1)[0].detach()
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-5)
