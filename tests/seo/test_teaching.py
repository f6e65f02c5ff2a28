"""Vectors of several sizes, and a ranker's scores as targets: by hand, by a reference, in a run."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from datamodules.search.candidates import CandidateOptions, HardNegatives
from datamodules.search.queries import read_run
from lit_models import LitRetriever
from lit_models.seo.encoders import TransformerEncoder
from lit_models.seo.networks import Distillation, in_batch_loss, nested, shortened, taught_terms
from tests.distributed.seo_retriever import adamw, retriever
from tests.search_collections import write_collection
from tests.seo.small_collection import ranker, ranking_data
from tests.toy import ledger_lines, toy_trainer

NAN = float("nan")


def units(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def test_a_loss_over_sizes_is_the_mean_of_those_of_cut_vectors():
    queries, documents = units(3, 8), units(5, 8)
    rest = (torch.arange(5), torch.tensor([[0], [1], [2]]), torch.tensor(0.1), torch.ones(3))
    expected = 0.0
    for size in (2, 8):
        cut = [x[:, :size] / x[:, :size].norm(dim=1, keepdim=True) for x in (queries, documents)]
        logits = cut[0] @ cut[1].T / 0.1
        expected += float(F.cross_entropy(logits, torch.arange(3), reduction="sum")) / 2
    found = nested([2, 8], queries, documents[:3], documents, *rest)
    assert found.total.item() == pytest.approx(expected, rel=1e-6)
    assert float(found.count) == 3
    whole = nested([], queries, documents[:3], documents, *rest)
    assert torch.equal(whole.total, in_batch_loss(queries, documents[:3], documents, *rest).total)


def test_shares_of_a_ranker_are_learnt_where_two_documents_have_a_score():
    queries, documents = units(4, 6).requires_grad_(), units(12, 6)
    scores = torch.tensor([[2.0, 0.0, 1.0], [1.0, NAN, 3.0], [1.0, NAN, NAN], [5.0, 1.0, 2.0]])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
    temperature = torch.tensor(0.2)
    options, batch = Distillation(0.5, 0.5), {"teacher": scores, "weight": weight}
    assert taught_terms(None, queries, documents, batch, temperature) == {}
    found = taught_terms(options, queries, documents, batch, temperature)["distillation"]
    expected = 0.0
    for row, kept in ((0, [0, 1, 2]), (1, [0, 2])):
        logits = queries.detach()[row].numpy() @ documents[3 * row : 3 * row + 3].numpy()[kept].T
        own, teacher = np.exp(logits / 0.2), np.exp(scores[row].numpy()[kept] / 0.5)
        own, teacher = own / own.sum(), teacher / teacher.sum()
        expected += float((teacher * np.log(teacher / own)).sum())
    assert found.total.item() == pytest.approx(expected / 2, rel=1e-6)
    assert float(found.count) == 3
    found.total.backward()
    assert (queries.grad.abs().sum(1) > 0).tolist() == [True, True, False, False]


def trained(folder: Path, data_options: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    _, data = retriever(folder, {})
    for name, value in (data_options or {}).items():
        setattr(data, name, value)
    encoder = partial(TransformerEncoder, width=16, num_layers=0)
    module = LitRetriever(optimizer=adamw, encoder=encoder, **options)
    trainer = toy_trainer(folder, max_epochs=2)
    trainer.fit(module, data)
    return trainer, module, data


def test_a_trained_size_is_used_in_evaluation_prediction_and_search(tmp_path):
    write_collection(tmp_path / "collection")
    trainer, module, data = trained(tmp_path / "run", sizes=[4, 16], size=4)
    texts = ["salt bread", "iron boat."]
    assert module.encode(texts, True).shape == (2, 4)
    whole = LitRetriever.load_from_checkpoint(
        tmp_path / "run/checkpoints/last.ckpt", size=None
    ).double()
    torch.testing.assert_close(module.encode(texts, True), shortened(whole.encode(texts, True), 4))
    trainer.predict(module, data, return_predictions=False)
    assert np.load(tmp_path / "run/coded.encoded/documents.npy").shape == (40, 4)
    with pytest.raises(ValueError, match=r"model\.size must be 1 to 16, got 17"):
        trained(tmp_path / "other", size=17)


def test_a_rankers_run_teaches_a_retriever(tmp_path):
    """Retriever -> its run over training queries -> ranker's run over the same -> distillation."""
    folder = write_collection(tmp_path / "collection")
    trainer, module, data = trained(tmp_path / "first", {"predict_part": "train"})
    trainer.predict(module, data, return_predictions=False)
    mined = tmp_path / "first/coded.encoded/run.trec"
    output = {"predict_output": str(tmp_path / "ranked.trec"), "predict_part": "train"}
    teacher = ranker(encoder=partial(TransformerEncoder, width=16, num_layers=0))
    trainer = toy_trainer(tmp_path / "second", max_steps=2, limit_val_batches=0)
    trainer.fit(teacher, ranking_data(folder))
    found = ranking_data(folder, candidates=CandidateOptions("run", 10, str(mined)), **output)
    trainer.predict(teacher, found, return_predictions=False)
    run = {ranking.query: ranking for ranking in read_run(tmp_path / "ranked.trec")}
    negatives = HardNegatives(2, "run", str(tmp_path / "ranked.trec"), depth=10)
    _, module, data = trained(
        tmp_path / "third", {"negatives": negatives}, distillation=Distillation(0.5)
    )
    dataset = data.datasets["train"]
    batch = dataset.batch(np.arange(24), 0)  # one for each judged query
    names = [document.id for document in data.collection.documents]
    scores, seen = batch["teacher"], 0
    for row, query in enumerate(dataset.queries):
        ranking = run[query.id]
        score_of = dict(zip(ranking.documents, np.float32(ranking.scores), strict=True))
        for number, score in zip(batch["document"].view(24, 3)[row], scores[row], strict=True):
            expected = score_of.get(names[number], NAN) if number >= 0 else NAN
            assert float(score) == pytest.approx(expected, nan_ok=True)
            seen += not np.isnan(expected)
    assert seen > 40
    assert dataset.batch(np.arange(24, 30), 0)["teacher"].isnan().all()  # pairs made from documents
    *_, last = ledger_lines(tmp_path / "third")
    assert last["terms"]["distillation"] > 0
    assert last["loss"] == last["terms"]["queries"] + last["terms"]["distillation"]
    with pytest.raises(ValueError, match=r"data\.negatives\.source=run"):
        trained(tmp_path / "wrong", distillation=Distillation())
