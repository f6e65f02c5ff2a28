"""A retriever as ONNX: equal vectors, nearly equal ones in 8 bits, and a tokenizer beside them."""

import importlib

import pytest
import torch

from lit_models import LitRetriever
from lit_models.commands.export import export
from tests.seo.exchange.test_sentence_folders import TEXTS, ranker_checkpoint, retriever_checkpoint
from tests.seo.small_collection import small_encoder

pytestmark = pytest.mark.filterwarnings("ignore:# The axis name")


def test_programs_give_the_vectors_of_the_checkpoint(tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="extra: onnx")
    transformers = importlib.import_module("transformers")
    path = retriever_checkpoint(tmp_path, encoder=small_encoder, size=12)
    export(path, to=tmp_path / "out", class_path="lit_models.LitRetriever", format="onnx")
    module = LitRetriever.load_from_checkpoint(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = tokenizer(TEXTS, padding=True, truncation=True, max_length=24, return_tensors="np")
    given = {name: rows[name].astype("int64") for name in ("input_ids", "attention_mask")}
    expected = module.encode(TEXTS, False)
    for name, error in (("encoder.onnx", 1e-6), ("encoder.int8.onnx", 0.05)):
        session = runtime.InferenceSession(str(tmp_path / "out" / name))
        (found,) = session.run(["vector"], given)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=error)


def test_a_ranker_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    path = ranker_checkpoint(tmp_path, encoder=small_encoder)
    options = {"to": tmp_path / "out", "format": "onnx"}
    with pytest.raises(ValueError, match="onnx of a LitRanker: there are"):
        export(path, class_path="lit_models.LitRanker", **options)
    path = retriever_checkpoint(tmp_path / "other", encoder=small_encoder)
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"unisono\[onnx\]"):
        export(path, class_path="lit_models.LitRetriever", **options)
