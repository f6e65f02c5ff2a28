"""Several snippets for a page: the ranker's choice, page by page."""

from types import SimpleNamespace

import pytest
import torch

from lit_models.causal_lm.generation import Completions, GenerationOptions
from lit_models.commands.export import export_checkpoint
from lit_models.seo.snippets import BestOf, best
from lit_models.seo.writer import LitSnippetWriter
from tests.seo.pages import pages_of, predict, write_pages, writer
from tests.seo.small_collection import ranker, ranking_data, relevance_files
from tests.toy import toy_trainer


def completions(*tokens):
    ids = torch.tensor(tokens)[:, None]
    ones = torch.ones(len(tokens), dtype=torch.int64)
    return Completions(ids, ones, ones, 0 * ones)


class LongestFirst:
    """Ranks a text by its number for one query, and against it for another."""

    def rank(self, query, documents):
        values = torch.tensor([float(text) for text in documents])
        return values if query == "high" else -values


def test_each_page_gets_the_candidate_that_its_query_ranks_first():
    candidates = [completions(5, 5, 5, 5), completions(9, 9, 9, 5), completions(2, 2, 2, 5)]
    texts_of = lambda done: [str(int(i)) for i in done.completion_ids[:, 0]]  # noqa: E731
    chosen = best(candidates, texts_of, ["high", "low", "", "high"], LongestFirst())
    assert chosen.completion_ids[:, 0].tolist() == [9, 2, 5, 5]
    assert all(len(values) == 4 for values in chosen)


def test_the_first_candidate_is_the_usual_one_and_draws_differ():
    usual = GenerationOptions(max_new_tokens=7, seed=3)
    options = BestOf("folder", num_candidates=3, temperature=0.5).options(usual)
    assert options[0] == usual
    assert [(o.temperature, o.seed, o.max_new_tokens) for o in options[1:]] == [
        (0.5, 4, 7),
        (0.5, 5, 7),
    ]


@pytest.mark.parametrize(("name", "value"), [("num_candidates", 1), ("temperature", 0)])
def test_options_that_choose_nothing_are_refused(name, value):
    with pytest.raises(ValueError, match=f"best_of.{name} must be"):
        BestOf("folder", **{name: value})


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exported rankers: one that can choose, one that needs a first stage."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("rankers")
    relevance_files(folder / "relevance")
    for name, prior in (("plain", False), ("prior", True)):
        trainer = toy_trainer(folder / name, max_steps=2, limit_val_batches=0)
        trainer.fit(ranker(prior=prior), ranking_data(folder / "relevance"))
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        export_checkpoint(folder / f"{name}.ckpt", folder / f"{name}-exported", class_path=RANKER)
    return folder


RANKER = "lit_models.seo.ranker.LitRanker"


def test_a_ranker_that_needs_a_first_stage_is_refused(exported):
    with pytest.raises(ValueError, match="train one with model.prior=false"):
        BestOf(str(exported / "prior-exported")).loaded_ranker()


def test_a_writer_writes_what_its_ranker_chooses_and_keeps_it_out_of_its_weights(
    exported, tmp_path
):
    path = write_pages(tmp_path / "pages.jsonl")
    chosen = BestOf(str(exported / "plain-exported"), num_candidates=3)
    module = writer(best_of=chosen)
    trainer = toy_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    trainer.fit(module, pages_of(path))
    [metrics] = trainer.test(module, pages_of(path), verbose=False)
    assert 0 <= metrics["test/rouge1"] <= 1
    assert len(module._rankers) == 1
    assert not any("ranker" in name for name in module.state_dict())
    assert isinstance(module, LitSnippetWriter)
    assert SimpleNamespace(**module.hparams).best_of["num_candidates"] == 3
    rows = predict(tmp_path, module, path)
    candidates = []
    for options in chosen.options(module.generation):
        plain = writer(generation=options)
        plain.recipe = module.recipe
        plain.configure_model()
        plain.load_state_dict(module.state_dict())
        (tmp_path / "out.jsonl").unlink()
        candidates.append([row["snippet"] for row in predict(tmp_path, plain, path)])
    judge = chosen.loaded_ranker()
    for row, texts in zip(rows, zip(*candidates, strict=True), strict=True):
        assert row["snippet"] == texts[int(judge.rank(row["query"], texts).argmax())]
