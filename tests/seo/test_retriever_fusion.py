"""BM25 and a retriever together: what is measured is written, and who chooses the weight."""

from pathlib import Path

import pytest
import torch

from datamodules.files.splitting import TEST
from datamodules.search.queries import read_run
from datamodules.text.encoding import RECIPE_KEY
from lit_models import LitRetriever
from lit_models.seo.retriever import CHOSEN_WEIGHT, WEIGHTS, Fusion
from tests.distributed.seo_retriever import retriever
from tests.seo.test_retriever import plain_ndcg, values_of
from tests.toy import toy_trainer

LAST = "checkpoints/last.ckpt"


@pytest.mark.parametrize("predict_depth", [10, 30])
def test_the_written_run_is_what_a_test_measures(
    retriever_run: Path, tmp_path: Path, predict_depth: int
) -> None:
    _, data = retriever(retriever_run, {"bm25_depth": 6, "predict_depth": predict_depth})
    data.predict_output = str(tmp_path / "out")
    module = LitRetriever.load_from_checkpoint(retriever_run / LAST)
    module.fusion = Fusion(0.4)
    trainer = toy_trainer(tmp_path)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    measured = values_of(tmp_path)["fused"]
    judged, collection = data.collection.judgements(TEST), data.collection
    rankings = list(read_run(tmp_path / "out" / "run.trec"))
    assert {len(ranking.documents) for ranking in rankings} == {predict_depth}
    for query, ranked, _ in rankings:
        mine = judged.query == collection.query_index(query)
        names = [collection.document_id(int(number)) for number in judged.document[mine]]
        grades = dict(zip(names, judged.grade[mine].astype(float).tolist(), strict=True))
        assert measured["ndcg@10"][query] == pytest.approx(plain_ndcg(ranked, grades), abs=1e-6)
        hits = [n for n, name in enumerate(ranked[:10], 1) if grades.get(name, 0) > 0]
        expected = 1 / hits[0] if hits else 0.0
        assert measured["mrr@10"][query] == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def other_weight(retriever_run: Path, tmp_path: Path) -> Path:
    """The run's checkpoint with a weight that no validation would choose."""
    checkpoint = torch.load(retriever_run / LAST, weights_only=True)
    checkpoint[RECIPE_KEY][CHOSEN_WEIGHT] = 0.123
    torch.save(checkpoint, tmp_path / "other.ckpt")
    return tmp_path / "other.ckpt"


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_only_a_fit_chooses_the_weight(
    trained: LitRetriever, retriever_run: Path, tmp_path: Path, other_weight: Path, capsys
) -> None:
    module, data = retriever(retriever_run, {})
    trainer = toy_trainer(tmp_path)
    trainer.validate(module, data, ckpt_path=other_weight, verbose=False)
    assert module.fusion_weight() == 0.123
    assert "BM25 weighs 0.123, chosen on these queries" in " ".join(capsys.readouterr().out.split())
    assert trained.recipe[CHOSEN_WEIGHT] in WEIGHTS


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_fit_that_goes_on_keeps_the_weight(
    retriever_run: Path, tmp_path: Path, other_weight: Path
) -> None:
    module, data = retriever(retriever_run, {})
    options = {"max_epochs": 3, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    toy_trainer(tmp_path, **options).fit(module, data, ckpt_path=other_weight)
    assert module.recipe[CHOSEN_WEIGHT] == 0.123


def test_queries_of_a_file_search_as_those_of_the_collection(
    retriever_run: Path, tmp_path: Path
) -> None:
    _, data = retriever(retriever_run, {})
    text = data.collection.query(data.collection.query_index("test-3"))
    (tmp_path / "mine.tsv").write_text(f"id\tquery\nmine\t{text}\n")
    options = {"predict_queries": str(tmp_path / "mine.tsv")}
    _, data = retriever(retriever_run, options)
    data.predict_output = str(tmp_path / "out")
    module = LitRetriever.load_from_checkpoint(retriever_run / LAST)
    toy_trainer(tmp_path).predict(module, data, return_predictions=False)
    (found,) = read_run(tmp_path / "out" / "run.trec")
    known = {r.query: r for r in read_run(retriever_run / "coded.encoded" / "run.trec")}["test-3"]
    assert (found.query, found.documents) == ("mine", known.documents)
