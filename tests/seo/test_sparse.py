"""The sparse retriever: weights, penalty and inverted index, beside plain computations."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lit_models import LitSparseRetriever
from lit_models.seo import sparse as sparse_file
from lit_models.seo.encoders import BagEncoder
from lit_models.seo.networks import TemperatureOptions
from lit_models.seo.retriever import Fusion
from lit_models.seo.sparse import InvertedSearch, Penalty
from tests.distributed.seo_retriever import adamw, retriever
from tests.search_collections import write_collection
from tests.seo.small_collection import bert_folder
from tests.toy import ledger_lines, toy_trainer

options = {"optimizer": adamw, "temperature": TemperatureOptions(0.9, learns=False)}


def fitted(folder: Any, module: Any, steps: int = 2, **data_options: Any) -> tuple[Any, Any]:
    write_collection(folder / "collection")
    _, data = retriever(folder / "run", {})
    for name, value in data_options.items():
        setattr(data, name, value)
    trainer = toy_trainer(folder / "run", max_steps=steps, limit_val_batches=0)
    trainer.fit(module, data)
    return trainer, data


def packed(rows: list[dict[int, float]], width: int) -> np.ndarray:
    """Return tokens and weights side by side, padded with weights of 0."""
    table = np.zeros((len(rows), 2 * width), np.float32)
    for place, row in enumerate(rows):
        table[place, : len(row)] = list(row)
        table[place, width : width + len(row)] = list(row.values())
    return table


@pytest.mark.parametrize("scores_at_once", [1, 50, 2**24])
def test_the_index_finds_what_plain_sums_find_with_ties_in_order(scores_at_once, monkeypatch):
    monkeypatch.setattr(sparse_file, "SCORES_AT_ONCE", scores_at_once)
    rng = np.random.default_rng(0)

    def drawn(tokens: int) -> dict[int, float]:
        chosen = rng.choice(tokens, rng.integers(1, 4), replace=False).tolist()
        return {token: float(rng.integers(1, 4)) / 2 for token in chosen}

    documents, queries = [drawn(9) for _ in range(30)], [drawn(12) for _ in range(7)]
    found = InvertedSearch(packed(documents, 4)).search(packed(queries, 6), 10)
    for row, query in enumerate(queries):
        scores = [sum(query.get(t, 0) * w for t, w in one.items()) for one in documents]
        order = sorted(range(30), key=lambda n: (-scores[n], n))[:10]
        assert found.documents[row].tolist() == order
        assert found.scores[row].tolist() == [scores[n] for n in order]
    for number in (30, 0):  # a rank may have no document
        found = InvertedSearch(packed(documents, 4)[:number]).search(packed(queries, 6), 99)
        assert found.scores.shape == (7, number)
    with pytest.raises(ValueError, match="documents are dense vectors, no token weights"):
        InvertedSearch(np.full((3, 8), 0.5))


def test_weights_are_the_logarithm_of_the_largest_logit_of_a_masked_model(tmp_path):
    import transformers

    bert_folder(tmp_path / "bert")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "bert")
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    model.cls.predictions.bias.data.normal_()
    model.save_pretrained(tmp_path / "bert")
    module = LitSparseRetriever(pretrained=str(tmp_path / "bert"), num_kept=6, **options)
    fitted(tmp_path, module, steps=1, tokenizer_options=None)
    module = LitSparseRetriever.load_from_checkpoint(
        tmp_path / "run/checkpoints/last.ckpt", num_kept=6
    ).eval()
    model.load_state_dict(module.network.encoder.model.state_dict())
    found = module.encode(["salt bread", "iron"], is_query=True)
    vocabulary = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert").get_vocab()
    for text, row in zip(["salt bread", "iron"], found, strict=True):
        ids = [vocabulary[token] for token in ("[CLS]", *text.split(), "[SEP]")]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        weights = torch.log(1 + torch.relu(logits.max(0).values)).sort(descending=True)
        torch.testing.assert_close(row[6:].float(), weights.values[:6], rtol=0, atol=1e-6)
        assert row[:6].tolist() == weights.indices[:6].tolist()


def test_the_penalty_is_the_square_of_mean_weights_and_grows(tmp_path, monkeypatch):
    module = LitSparseRetriever(
        encoder=partial(BagEncoder, width=8), penalty=Penalty(0.5, 0.25, steps=2), **options
    )
    seen: list[Any] = []
    more = LitSparseRetriever.more_terms

    def noted(self: Any, queries: Any, documents: Any, batch: Any, *rest: Any) -> Any:
        seen.append((queries.detach(), documents.detach(), batch["document"]))
        return more(self, queries, documents, batch, *rest)

    monkeypatch.setattr(LitSparseRetriever, "more_terms", noted)
    fitted(tmp_path, module, steps=3)
    for (queries, documents, number), line, share in zip(
        seen, ledger_lines(tmp_path / "run"), (0.25, 1.0, 1.0), strict=True
    ):
        expected = 0.5 * (queries.mean(0) ** 2).sum()
        expected += 0.25 * (documents[number >= 0].mean(0) ** 2).sum()
        assert line["terms"]["flops"] == pytest.approx(share * float(expected), rel=1e-5)
        total = line["terms"]["queries"] + line["terms"]["flops"]
        assert line["loss"] == pytest.approx(total, rel=1e-6)


def test_a_run_is_searched_as_its_vectors_say_and_python_finds_the_same(tmp_path):
    encoder = partial(BagEncoder, width=8)
    module = LitSparseRetriever(encoder=encoder, num_kept=5, fusion=Fusion(0.0), **options)
    trainer, data = fitted(tmp_path, module)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    folder = tmp_path / "run/coded.encoded"
    documents, queries = (np.load(folder / f"{name}.npy") for name in ("documents", "queries"))
    assert documents.shape == (40, 10)
    found = InvertedSearch(documents).search(queries, 3)
    lines = [line.split() for line in (folder / "run.trec").read_text().splitlines()]
    first = [line[2] for line in lines if line[3] == "1"]
    assert first == [f"d{number}" for number in found.documents[:, 0].tolist()]
    texts = [document.whole for document in data.collection.documents]
    loaded = LitSparseRetriever.load_from_checkpoint(tmp_path / "run/checkpoints/last.ckpt").eval()
    own = loaded.search([data.datasets["predict"].queries[0].text], loaded.encode(texts, False), 3)
    assert own.documents[0].tolist() == found.documents[0].tolist()
    with pytest.raises(ValueError, match=r"no model\.feedback"):
        LitSparseRetriever(size=4, **options)
