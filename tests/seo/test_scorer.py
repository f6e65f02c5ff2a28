"""The scorer: batches, chunks and missing labels; a whole run with baselines and scored file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lit_models import LitTextScorer
from lit_models.commands.export import export
from lit_models.seo.networks import HeadOptions, pooled_chunks
from tests.distributed.seo_family import HEADS, scored_texts, text_scorer
from tests.seo.small_collection import adamw, small_encoder
from tests.toy import json_rows, toy_trainer


@pytest.fixture
def scorer(tmp_path: Path):
    """An untrained module in float64, and the dataset of its training rows."""
    scored_texts(tmp_path / "scored.jsonl")
    module, data = text_scorer(tmp_path / "run", {})
    data.setup("fit")
    module.recipe = {**data.recipe}
    module.configure_model()
    return module.double().eval(), data.datasets["train"]


def batch_of(dataset, ids, weight=None):
    batch = dataset.batch(np.array(ids), 0)
    weights = torch.ones(len(ids)) if weight is None else torch.tensor(weight)
    return {**batch, "weight": weights, "sample_id": torch.tensor(ids)}


def test_padding_and_the_other_texts_of_a_batch_change_nothing(scorer) -> None:
    module, dataset = scorer
    ids = list(range(12))
    assert len(batch_of(dataset, ids)["chunk_of"]) > len(ids)  # some have several chunks
    together = module(batch_of(dataset, ids))
    for i in ids:
        for name, alone in module(batch_of(dataset, [i])).items():
            torch.testing.assert_close(together[name][i : i + 1], alone)


def test_chunks_are_those_of_the_whole_text(scorer) -> None:
    _, dataset = scorer
    for i in range(len(dataset.lengths)):
        ids = dataset.encoding.ids(dataset.store.text(int(dataset.texts[i])))
        expected = dataset.encoding.chunk_rows([ids], dataset.chunks.stride, dataset.chunks.most)
        found = dataset.batch(np.array([i]), 0)
        assert torch.equal(found["input_ids"], expected["input_ids"])


def test_terms_of_micro_batches_add_up_and_the_plan_knows_their_counts(scorer) -> None:
    module, dataset = scorer
    whole = module.training_terms(batch_of(dataset, range(50)))
    parts = [module.training_terms(batch_of(dataset, range(i, i + 10))) for i in range(0, 50, 10)]
    assert list(whole) == list(HEADS)
    for name, (total, count) in whole.items():
        assert count == dataset.target_counts[name].sum() < 50 * (1 + (name == "tags"))
        torch.testing.assert_close(sum(part[name].total for part in parts), total)
        assert sum(part[name].count for part in parts) == count


def test_a_text_without_labels_and_a_filler_give_no_gradient(scorer) -> None:
    module, dataset = scorer
    for batch in (batch_of(dataset, [7]), batch_of(dataset, [3], [0.0])):
        terms = module.training_terms(batch)
        assert all(float(term.count) == 0 for term in terms.values())
        module.zero_grad()
        sum(term.total for term in terms.values()).backward()
        assert all(not p.grad.any() for p in module.parameters() if p.grad is not None)


def test_uncertainty_weighs_a_loss_by_its_own_variance(scorer) -> None:
    module, dataset = scorer
    batch = batch_of(dataset, range(8))
    before = module.training_terms(batch)["stars"]
    module.network.log_variances["head_stars"].data.fill_(np.log(4.0))
    total, count = module.training_terms(batch)["stars"]
    torch.testing.assert_close(total, before.total / 4 + np.log(4.0) / 2 * count)
    assert module.term_weights() == {"price": 2.0, "stars": 1.0, "trade": 1.0, "tags": 0.5}


def test_chunks_become_one_vector_per_text() -> None:
    chunks, chunk_of = torch.tensor([[1.0, 8], [3, 4], [5, 6]]), torch.tensor([0, 0, 1])
    assert pooled_chunks(chunks, chunk_of, 2).tolist() == [[2, 6], [5, 6]]


def test_an_unknown_head_is_refused(scorer) -> None:
    module, _ = scorer
    other = LitTextScorer({"prize": HeadOptions()}, optimizer=adamw, encoder=small_encoder)
    other.recipe = module.recipe
    with pytest.raises(ValueError, match='model.heads names "prize"; the data has the heads price'):
        other.configure_model()


def test_one_batch_is_learnt_by_heart(scorer) -> None:
    module, dataset = scorer
    batch, optimizer = batch_of(dataset, range(16)), torch.optim.AdamW(module.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        sum(term.total for term in module.training_terms(batch).values()).backward()
        optimizer.step()
    known, target = batch["is_labelled"]["trade"], batch["targets"]["trade"]
    assert (module(batch)["trade"].argmax(1) == target)[known].all()
    assert batch["targets"]["price"].dtype == torch.float64  # float32 loses digits of a time


def test_a_run_reports_a_baseline_exports_and_scores_every_row(tmp_path: Path) -> None:
    scored_texts(tmp_path / "scored.jsonl")
    module, data = text_scorer(tmp_path / "run", {"global_batch_size": 16})
    trainer = toy_trainer(tmp_path / "run", max_epochs=1, limit_val_batches=0)
    trainer.fit(module, data)
    found = trainer.test(module, data, verbose=False)[0]
    rows = json_rows(tmp_path / "scored.jsonl")
    prices = np.array([row["price"] for row in rows if row["price"] is not None])
    assert found["test/baseline_price_rmse"] == pytest.approx(prices.std(), rel=1e-6)
    loss = sum(found[f"test/loss_{name}"] * share for name, share in module.term_weights().items())
    assert found["test/loss"] == pytest.approx(loss)
    shares = [sum(row["trade"] == t for row in rows) for t in ("baker", "smith", "weaver")]
    assert found["test/baseline_trade_accuracy"] == pytest.approx(max(shares) / sum(shares))
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    export(checkpoint, to=tmp_path / "exported", class_path="lit_models.LitTextScorer")
    exported = LitTextScorer.from_exported(tmp_path / "exported").double()
    batch = batch_of(data.datasets["test"], range(8))
    # An exported module is in float32 when its weights are loaded.
    torch.testing.assert_close(exported(batch), module.eval()(batch), rtol=1e-5, atol=1e-5)
    trainer.predict(module, data, return_predictions=False)
    coded = json_rows(tmp_path / "run/coded.jsonl")
    assert [{name: row[name] for name in rows[0]} for row in coded] == rows
    assert exported.score([]) == {}
    scored = exported.score([row["text"] for row in rows])
    assert scored["trade"].argmax(1).tolist() == [
        exported.recipe["heads"]["trade"]["classes"].index(row["predicted_trade"]) for row in coded
    ]
    assert scored["price"][:, 0].tolist() == pytest.approx(
        [row["predicted_price"] for row in coded], abs=1e-4
    )
    hits = [row["predicted_trade"] == row["trade"] for row in coded if row["trade"]]
    assert np.mean(hits) == pytest.approx(found["test/trade_accuracy"])
    errors = [row["predicted_price"] - row["price"] for row in coded if row["price"] is not None]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(found["test/price_rmse"], rel=1e-4)
    assert {"predicted_stars", "expected_stars", "probability_tags_old"} <= set(coded[0])
