"""A whole retriever: evaluation beside a plain reference, prediction, scripts, wrong input."""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from datamodules.files.splitting import TEST
from datamodules.search.candidates import HardNegatives, open_bm25
from datamodules.search.queries import read_run
from datamodules.text.encoding import RECIPE_KEY
from lit_models import LitRetriever
from lit_models.commands.export import export
from lit_models.seo.retriever import CHOSEN_WEIGHT, WEIGHTS, Fusion
from tests.distributed.seo_retriever import adamw, retriever
from tests.search_collections import SIZES
from tests.toy import csv_rows, json_rows, ledger_lines, toy_trainer


def values_of(run: Path, split: str = "test") -> dict[str, dict[str, dict[str, float]]]:
    """Return system -> metric -> query -> value, as written by a run."""
    values: dict = defaultdict(lambda: defaultdict(dict))
    for row in csv_rows(run / f"queries-{split}.csv"):
        query, system = row.pop("query"), row.pop("system")
        for metric, value in row.items():
            values[system][metric][query] = float(value)
    return values


def plain_ndcg(ranked: list[str], grades: dict[str, float], k: int = 10) -> float:
    discounts = 1 / np.log2(np.arange(2, k + 2))
    gains = np.array([grades.get(name, 0.0) for name in ranked[:k]])
    ideal = np.array(sorted(grades.values(), reverse=True)[:k])
    return float((gains * discounts[: len(gains)]).sum() / (ideal * discounts[: len(ideal)]).sum())


def test_a_test_measures_what_a_plain_reference_measures(retriever_run, trained):
    _, data = retriever(retriever_run, {})
    collection = data.collection
    texts = [collection.documents[n].whole for n in range(len(collection.documents))]
    documents = trained.encode(texts, is_query=False)
    judged = collection.judgements(TEST)
    index = open_bm25(collection, data.bm25)
    content = json.loads((retriever_run / "ranking-test.json").read_text())
    assert content["queries"] == SIZES["test"]
    per_query = values_of(retriever_run)
    for query in np.unique(judged.query):
        name, text = collection.queries[int(query)].id, collection.queries[int(query)].text
        of_query = judged.query == query
        grades = {
            str(d): float(g)
            for d, g in zip(judged.document[of_query], judged.grade[of_query], strict=True)
        }
        found = trained.search([text], documents, 10).documents[0]
        ndcg = plain_ndcg([str(int(n)) for n in found], grades)
        assert per_query["retriever"]["ndcg@10"][name] == pytest.approx(ndcg, abs=1e-6)
        ndcg = plain_ndcg([str(n) for n in index.search([text], 10).documents[0]], grades)
        assert per_query["bm25"]["ndcg@10"][name] == pytest.approx(ndcg, abs=1e-6)
    for system, metrics in content["systems"].items():
        for metric, mean in metrics.items():
            assert mean == pytest.approx(np.mean([*per_query[system][metric].values()]))
    assert set(content["systems"]) == {"retriever", "bm25", "fused"}
    mean, low, high = content["differences"]["fused - bm25"]["ndcg@10"]
    assert low <= mean <= high


@pytest.mark.slow
def test_one_batch_is_learnt_by_heart(retriever_run, tmp_path):
    module, data = retriever(retriever_run, {})
    options = {"overfit_batches": 1, "limit_val_batches": 0}
    toy_trainer(tmp_path, max_steps=60, max_epochs=60, **options).fit(module, data)
    losses = [line["loss"] for line in ledger_lines(tmp_path)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_prediction_is_a_mapped_matrix_with_ids_and_a_run(retriever_run, trained):
    folder = retriever_run / "coded.encoded"
    documents, names = (
        json_rows(folder / f"{kind}.ids.jsonl") for kind in ("documents", "queries")
    )
    _, data = retriever(retriever_run, {})
    assert documents == [data.collection.documents[n].id for n in range(40)]
    encoded = np.load(folder / "documents.npy", mmap_mode="r")
    assert (encoded.dtype, encoded.shape[0]) == (np.float32, 40)
    texts = [
        data.collection.queries[data.collection.queries.indices_of([name])[0]].text
        for name in names
    ]
    expected = trained.encode(texts, is_query=True)
    assert np.allclose(np.load(folder / "queries.npy"), expected.numpy(), atol=1e-3)
    rankings = list(read_run(folder / "run.trec"))
    assert [ranking.query for ranking in rankings] == names
    assert all(len(ranking.documents) == 40 for ranking in rankings)


def test_an_exported_folder_encodes_alike(retriever_run, trained, tmp_path):
    export(
        retriever_run / "checkpoints/last.ckpt",
        to=tmp_path / "out",
        class_path="lit_models.LitRetriever",
    )
    exported = LitRetriever.from_exported(tmp_path / "out").double()
    texts = ["Salt by weight", "", "old iron boat sold cheap by mill " * 9]
    assert torch.equal(exported.encode(texts, False), trained.encode(texts, False))
    alone = torch.cat([trained.encode([text], False) for text in texts])
    torch.testing.assert_close(trained.encode(texts, False), alone, rtol=1e-12, atol=1e-12)
    assert trained.search(texts, trained.encode([], False), 3).documents.shape == (3, 0)
    assert trained.search([], trained.encode(texts, False), 3).documents.shape == (0, 3)
    for dropout in (part for part in exported.modules() if isinstance(part, nn.Dropout)):
        dropout.p = 0.5
    assert torch.equal(exported.train().encode(texts, False), trained.encode(texts, False))
    assert exported.recipe["fusion_weight"] == trained.recipe["fusion_weight"]


def test_validation_can_leave_documents_out_and_says_so(retriever_run, tmp_path, capsys):
    module, data = retriever(retriever_run, {})
    data.negatives, data.bm25 = HardNegatives(), None
    with pytest.raises(ValueError, match=r"model\.fusion adds BM25's scores, and data\.bm25 is"):
        toy_trainer(tmp_path, max_steps=1, callbacks=[]).fit(module, data)
    module, data = retriever(retriever_run, {})
    data.negatives, module.fusion = HardNegatives(), None
    data.num_others, data.bm25 = 5, None
    toy_trainer(tmp_path, max_steps=1, callbacks=[]).fit(module, data)
    content = json.loads((tmp_path / "ranking-val.json").read_text())
    judged = np.unique(data.collection.judgements(1).document)
    assert set(content["systems"]) == {"retriever"}
    printed = capsys.readouterr().out
    note = f"over {len(judged) + 5} documents of 40, which is easier than all"
    assert note in " ".join(printed.split())
    lines = [line for line in printed.splitlines() if not line.startswith("errors: ")]  # a path
    assert max(map(len, lines)) <= 80


def test_a_checkpoint_names_the_class_from_before_fsdp(retriever_run, trained):
    checkpoint = {RECIPE_KEY: trained.recipe, "state_dict": {}}
    sharded = LitRetriever(optimizer=adamw)
    sharded.recipe, sharded.network = trained.recipe, trained.network
    sharded.__class__ = type("FSDPLitRetriever", (LitRetriever,), {})
    sharded.on_load_checkpoint(checkpoint)
    sharded.kind = "LitRanker"
    with pytest.raises(ValueError, match=r"of a LitRetriever; give one of LitRanker"):
        sharded.on_load_checkpoint(checkpoint)


def test_a_step_that_is_cut_is_refused(retriever_run, tmp_path):
    module, data = retriever(retriever_run, {"micro_batch_size": 4})
    with pytest.raises(ValueError, match=r"cut into 4 micro-batches, but the loss of LitRetriever"):
        toy_trainer(tmp_path, max_steps=1).fit(module, data)


def test_a_fusion_needs_a_weight(retriever_run, trained, tmp_path, monkeypatch):
    chosen, (_, data) = trained.recipe.pop("fusion_weight"), retriever(retriever_run, {})
    data.predict_output = str(tmp_path / "encoded")
    with monkeypatch.context() as patch:
        patch.setattr(trained.network, "encode", None)  # the error comes before this call
        with pytest.raises(ValueError, match=r"fusion\.weight is chosen on the validation queries"):
            toy_trainer(tmp_path).predict(trained, data)
    # A checkpoint passes it on from training in separate processes.
    path = retriever_run / "checkpoints" / "last.ckpt"
    toy_trainer(tmp_path).predict(trained, data, ckpt_path=path, weights_only=True)
    assert trained.fusion_weight() == chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "table"), [("pages", "encoded/found.csv"), ("pages_ranker", "ranked.trec.csv")]
)
def test_a_folder_of_pages_is_learnt_and_searched(config, table, own_folder, done):
    words = ("salt", "bread", "iron", "boat", "wool", "mill", "rope", "glass", "ink", "tar")
    (own_folder / "site").mkdir()
    for i in range(20):
        some = " ".join(words[(i + step) % 10] for step in range(1 + i // 10, 5))
        page = f"<title>{words[i % 10]} number {i}</title><p>It is sold.<p>Of {some} by weight."
        (own_folder / "site" / f"p{i}.html").write_text(page)
    lines = ["Query;Page", *(f"{words[i % 10]} {words[(i + 2) % 10]};p{i}.html" for i in range(20))]
    (own_folder / "site" / "queries.csv").write_text("\n".join(lines))
    (own_folder / "asked.txt").write_text("glass ink\n")
    folder = ["--config", f"seo/{config}.yaml", "--data.collection.folder=site"]
    small = ["--trainer.max_epochs=1", "--data.tokenizer.vocab_size=300"]
    done("fit", *folder, *small)
    options = ["--ckpt_path=auto", "--data.predict_queries=asked.txt", small[1]]
    done("predict", *folder, *options)
    rows = csv_rows(own_folder / "runs" / f"seo-{config}" / table)
    assert [row["rank"] for row in rows] == [str(rank) for rank in range(1, len(rows) + 1)]
    assert 1 < len(rows) <= 10
    number = re.fullmatch(r"p(\d+).html", rows[0]["address"])[1]
    assert rows[0]["title"].endswith(f"number {number}")
    assert rows[0]["query"] == "glass ink"
    shown = [row["snippet"] for row in rows if "glass" in row["snippet"]]
    assert shown
    assert all(snippet.startswith("Of ") for snippet in shown)  # the most relevant sentence
    if config == "pages_ranker":  # its table is beside the run named
        (own_folder / "asked.csv").write_text("query\nglass ink\n")
        options[1] = "--data.predict_queries=asked.csv"
        done("predict", *folder, *options, "--data.predict_output=asked.trec")
        assert (own_folder / "asked.trec.csv").is_file()
        assert (own_folder / "asked.csv").read_text() == "query\nglass ink\n"


LAST = "checkpoints/last.ckpt"


@pytest.mark.parametrize("predict_depth", [10, 20])
def test_the_written_run_is_what_a_test_measures(retriever_run, tmp_path, predict_depth):
    _, data = retriever(retriever_run, {"predict_depth": predict_depth})
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
        mine = judged.query == collection.queries.indices_of([query])[0]
        names = [collection.documents[int(number)].id for number in judged.document[mine]]
        grades = dict(zip(names, judged.grade[mine].astype(float).tolist(), strict=True))
        assert measured["ndcg@10"][query] == pytest.approx(plain_ndcg(ranked, grades), abs=1e-6)
        hits = [n for n, name in enumerate(ranked[:10], 1) if grades.get(name, 0) > 0]
        expected = 1 / hits[0] if hits else 0.0
        assert measured["mrr@10"][query] == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def other_weight(retriever_run: Path, tmp_path: Path) -> Path:
    """The run's checkpoint with a weight that validation would not choose."""
    checkpoint = torch.load(retriever_run / LAST, weights_only=True)
    checkpoint[RECIPE_KEY][CHOSEN_WEIGHT] = 0.123
    torch.save(checkpoint, tmp_path / "other.ckpt")
    return tmp_path / "other.ckpt"


def test_only_a_fit_chooses_the_weight(trained, retriever_run, tmp_path, other_weight, capsys):
    module, data = retriever(retriever_run, {})
    toy_trainer(tmp_path).validate(module, data, ckpt_path=other_weight, verbose=False)
    assert module.fusion_weight() == 0.123
    printed = capsys.readouterr().out
    assert "BM25 weighs 0.123, chosen on these queries" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80  # with three systems and two differences
    [row] = [line.split() for line in printed.splitlines() if "recall@100" in line]
    assert [len(cell) for cell in row] == [10, *[5] * 3, *[5, 5, 5] * 2]  # +.000 [+.00 +.00]
    assert trained.recipe[CHOSEN_WEIGHT] in WEIGHTS


def test_a_resumed_fit_keeps_the_fusion_weight(retriever_run, tmp_path, other_weight):
    module, data = retriever(retriever_run, {})
    options = {"max_epochs": 3, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    toy_trainer(tmp_path, **options).fit(module, data, ckpt_path=other_weight)
    assert module.recipe[CHOSEN_WEIGHT] == 0.123


def test_queries_of_a_file_search_as_those_of_the_collection(retriever_run, tmp_path):
    _, data = retriever(retriever_run, {})
    text = data.collection.queries[data.collection.queries.indices_of(["test-3"])[0]].text
    (tmp_path / "mine.tsv").write_text(f"id\tquery\nmine\t{text}\n")
    options = {"predict_queries": str(tmp_path / "mine.tsv")}
    _, data = retriever(retriever_run, options)
    data.predict_output = str(tmp_path / "out")
    module = LitRetriever.load_from_checkpoint(retriever_run / LAST)
    toy_trainer(tmp_path).predict(module, data, return_predictions=False)
    (found,) = read_run(tmp_path / "out" / "run.trec")
    known = {r.query: r for r in read_run(retriever_run / "coded.encoded" / "run.trec")}["test-3"]
    assert (found.query, found.documents) == ("mine", known.documents)
