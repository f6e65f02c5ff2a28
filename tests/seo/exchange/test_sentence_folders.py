"""Folders of sentence-transformers: written and read without a change of scores."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from datamodules.text.encoding import TextLimits
from lit_models import LitRanker, LitRetriever
from lit_models.commands.export import export
from lit_models.seo.encoders import BagEncoder, stored_pooling
from tests.distributed.seo_retriever import adamw, retriever
from tests.search_collections import write_collection
from tests.seo.small_collection import bert_folder, ranker, ranking_data, small_encoder
from tests.toy import toy_trainer

TEXTS = ["salt bread", "Iron boat\ncheap wool sold by weight", "old", "salt " * 40]
still = partial(torch.optim.SGD, lr=0.0)
bag = partial(small_encoder, num_layers=0)
PROMPTS = {"query": "salt: ", "document": "a "}


def fitted(module: Any, data: Any, folder: Path) -> Path:
    toy_trainer(folder, max_steps=2, limit_val_batches=0, precision=32).fit(module, data)
    return folder / "checkpoints" / "last.ckpt"


def retriever_checkpoint(folder: Path, limits: Any = None, **options: Any) -> Path:
    write_collection(folder / "collection")
    _, data = retriever(folder / "run", {})
    data.text = limits or TextLimits(max_length=24, max_query_length=16)
    if "pretrained" in options:
        data.tokenizer_options = None
    return fitted(LitRetriever(**{"optimizer": adamw, **options}), data, folder / "run")


def ranker_checkpoint(folder: Path, **options: Any) -> Path:
    module = ranker(**options)
    return fitted(module, ranking_data(write_collection(folder / "data")), folder / "run")


def prompted_bert(folder: Path, pooling: str | None, **options: Any) -> Path:
    """Write a BERT with a prompt, in the files of sentence-transformers itself."""
    bert_folder(folder)
    types = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    rows = zip(("", "1_Pooling"), types, strict=True)
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in rows]
    content = {"embedding_dimension": 16, "pooling_mode": pooling, **options.pop("pooled", {})}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(content))
    (folder / "modules.json").write_text(json.dumps(options.pop("modules", modules)))
    own = {"model_type": "SentenceTransformer", "prompts": PROMPTS, **options}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    return folder


RETRIEVERS = {
    "layers": {"encoder": small_encoder},
    "bag": {"encoder": bag, "pooling": "max"},
    "first": {"encoder": small_encoder, "pooling": "first", "size": 10},
    "prompts": {"pretrained": "cls"},
}


@pytest.fixture(scope="module", params=RETRIEVERS)
def retriever_folders(request: Any, tmp_path_factory: Any) -> tuple[LitRetriever, Path]:
    folder, options = tmp_path_factory.mktemp(request.param), {**RETRIEVERS[request.param]}
    if "pretrained" in options:
        options["pretrained"] = str(prompted_bert(folder / "bert", options["pretrained"]))
    path = retriever_checkpoint(folder, **options)
    options = {"class_path": "lit_models.LitRetriever", "format": "sentence-transformers"}
    export(path, to=folder / "out", **options)
    return LitRetriever.load_from_checkpoint(path).eval(), folder / "out"


def test_transformers_and_the_pooling_of_the_folder_give_the_vectors(retriever_folders):
    import transformers

    module, folder = retriever_folders
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    mode = json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode"]
    own = json.loads((folder / "config_sentence_transformers.json").read_text())
    most = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    assert (own["prompts"] == PROMPTS) == (mode == "cls" and model.config.model_type == "bert")
    for is_query, name in ((True, "query"), (False, "document")):
        found = module.encode(TEXTS[:3], is_query)
        for text, vector in zip(TEXTS, found, strict=False):
            row = tokenizer(own["prompts"][name] + text, truncation=True, max_length=most)
            ids = torch.tensor([row["input_ids"]])
            with torch.no_grad():
                hidden = model(ids, torch.ones_like(ids)).last_hidden_state[0]
            pooled = {"cls": hidden[0], "max": hidden.amax(0), "mean": hidden.mean(0)}[mode]
            pooled = pooled[: own["truncate_dim"]]
            torch.testing.assert_close(F.normalize(pooled, dim=0), vector, rtol=0, atol=1e-6)


def test_the_folder_comes_back_with_its_pooling_and_its_prompts(retriever_folders, tmp_path):
    module, folder = retriever_folders
    path = retriever_checkpoint(
        tmp_path, pretrained=str(folder), freeze=["encoder.*"], optimizer=still
    )
    again = LitRetriever.load_from_checkpoint(path).eval()
    assert again.network.encoder.pooling == module.network.encoder.pooling
    for is_query in (True, False):
        expected, again.size = module.encode(TEXTS[:3], is_query), module.size
        torch.testing.assert_close(again.encode(TEXTS[:3], is_query), expected, rtol=0, atol=1e-6)


def test_sentence_transformers_gives_the_same_scores(retriever_folders):
    library = pytest.importorskip("sentence_transformers", reason="extra: bench")
    module, folder = retriever_folders
    model = library.SentenceTransformer(str(folder), device="cpu")
    queries = model.encode_query(TEXTS[:3], convert_to_tensor=True)
    documents = model.encode_document(TEXTS, convert_to_tensor=True)
    expected = module.encode(TEXTS[:3], True) @ module.encode(TEXTS, False).T
    torch.testing.assert_close(model.similarity(queries, documents), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["bert", "bag"])
def test_a_ranker_scores_pairs_as_cross_encoder_does(case, tmp_path, done):
    options: dict[str, Any] = {"encoder": bag}
    if case == "bert":
        options = {"pretrained": str(bert_folder(tmp_path / "bert")), "pooling": "first"}
    path = ranker_checkpoint(tmp_path, **options)
    words = (f"--to={tmp_path / 'out'}", "--class-path=lit_models.LitRanker")
    done("export", str(path), *words, "--format=sentence-transformers")
    module = LitRanker.load_from_checkpoint(path).eval()
    expected = module.rank("salt WOOL", TEXTS)
    again = LitRanker.load_from_checkpoint(
        ranker_checkpoint(tmp_path / "again", pretrained=str(tmp_path / "out"), optimizer=still)
    ).eval()
    torch.testing.assert_close(again.rank("salt WOOL", TEXTS), expected, rtol=0, atol=1e-6)
    library = pytest.importorskip("sentence_transformers", reason="extra: bench")
    model = library.CrossEncoder(str(tmp_path / "out"), device="cpu")
    scores = model.predict([("salt WOOL", text) for text in TEXTS], convert_to_tensor=True)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def test_a_sequence_classifier_with_one_score_is_a_ranker(tmp_path):
    import transformers

    bert_folder(tmp_path / "bert")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "bert", num_labels=1)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "bert")
    options = {"pretrained": str(tmp_path / "bert"), "optimizer": still}
    module = LitRanker.load_from_checkpoint(ranker_checkpoint(tmp_path, **options)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    rows = tokenizer(["salt"] * 3, TEXTS[:3], return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = model(**rows).logits[:, 0] - model.classifier.bias
    torch.testing.assert_close(module.rank("salt", TEXTS[:3]), expected, rtol=0, atol=1e-6)


def test_an_older_folder_says_its_pooling_by_switches(tmp_path):
    old = {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}
    folder = prompted_bert(tmp_path / "bert", None, pooled=old)
    assert stored_pooling(folder, is_ranker=False) == {"pooling": "max"}


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (retriever_checkpoint, {"encoder": partial(BagEncoder, width=16)}, "1 \\+ ln n times"),
        (retriever_checkpoint, {"limits": TextLimits(24, 16, stemmer="english")}, "stemmer"),
        (ranker_checkpoint, {}, "segments and rotary positions"),
        (ranker_checkpoint, {"prior": True}, "model.prior"),
    ],
)
def test_what_the_layout_cannot_express_is_refused(make, options, match, tmp_path):
    path = make(tmp_path, **options)
    kind = "LitRanker" if make is ranker_checkpoint else "LitRetriever"
    given = {"class_path": f"lit_models.{kind}", "format": "sentence-transformers"}
    with pytest.raises(ValueError, match=match):
        export(path, to=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pooling": "lasttoken"}, "pools by lasttoken"),
        ({"pooling": None, "pooled": {"pooling_mode_mean_sqrt_len_tokens": True}}, "pools by mean"),
        ({"pooling": "mean", "similarity_fn_name": "dot"}, "any length"),
        ({"pooling": "mean", "pooled": {"include_prompt": False}}, "without its prompt"),
        ({"pooling": "mean", "modules": [{"path": "", "type": "a.Transformer"}]}, "modules are"),
    ],
)
def test_a_folder_that_is_no_retriever_of_ours_is_refused(options, match, tmp_path):
    folder = prompted_bert(tmp_path / "bert", **options)
    with pytest.raises(ValueError, match=match):
        retriever_checkpoint(tmp_path, pretrained=str(folder))
