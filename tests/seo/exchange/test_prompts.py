"""A folder's prompts precede every query and document, sampled ones too."""

import json

import numpy as np
import pytest

from datamodules.search.retrieval import TrainingMix
from datamodules.text.encoding import TextEncoding, prompts_of
from lit_models import LitRetriever
from tests.distributed.seo_retriever import adamw, retriever
from tests.search_collections import write_collection
from tests.seo.exchange.test_sentence_folders import PROMPTS, prompted_bert
from tests.toy import toy_trainer


def test_every_text_of_a_step_begins_with_its_prompt(tmp_path):
    write_collection(tmp_path / "collection")
    _, data = retriever(tmp_path / "run", {})
    data.tokenizer_options, data.mix = None, TrainingMix(judged=1, titles=1, sentences=1)
    folder = str(prompted_bert(tmp_path / "bert", "mean"))
    module = LitRetriever(optimizer=adamw, pretrained=folder)
    toy_trainer(tmp_path / "run", max_steps=1, limit_val_batches=0).fit(module, data)
    assert module.recipe["prompts"] == PROMPTS
    plain = TextEncoding({**module.recipe, "prompts": {"query": "", "document": ""}})
    assert plain.digest == TextEncoding({k: module.recipe[k] for k in ("tokenizer", "text")}).digest
    assert plain.digest != TextEncoding(module.recipe).digest
    dataset = data.datasets["train"]
    batch = dataset.batch(np.arange(len(dataset.lengths)), 0)
    for name, prompt in (("query", PROMPTS["query"]), ("document", PROMPTS["document"])):
        first = plain.ids(prompt).tolist()
        rows, there = batch[f"{name}_ids"], batch[f"{name}_mask"].sum(1) > 2  # some have no text
        assert (rows[there][:, 1 : 1 + len(first)] == batch["query_ids"].new_tensor(first)).all()
        assert there.sum() >= 24


def test_the_prompt_of_a_document_has_several_names_in_folders(tmp_path):
    path = tmp_path / "config_sentence_transformers.json"
    for stored, found in (
        ({"query": "q: ", "passage": "p: "}, {"query": "q: ", "document": "p: "}),
        ({"query": "", "document": ""}, None),
    ):
        path.write_text(json.dumps({"prompts": stored}))
        assert prompts_of(str(tmp_path)) == ({"prompts": found} if found else {})
    assert prompts_of(None) == prompts_of(str(tmp_path / "none")) == {}
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config_sentence_transformers\.json is damaged"):
        prompts_of(str(tmp_path))
