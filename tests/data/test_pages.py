"""Pages become prompts without their target, cut at the page's end; lost parts are reported."""

from pathlib import Path

import numpy as np
import pytest

from datamodules import PagesDataModule, PlanOptions, TextSplit, TokenizerOptions, demo
from datamodules.core.batches import IGNORED
from datamodules.files.rows import BadRows, JsonRow
from datamodules.text.pages import SnippetDataset, page_of, page_prompts, prompt_of
from datamodules.text.prompts import read_rows
from datamodules.tokenizers.text import byte_tokenizer
from tests.text_corpora import rows_file

TITLE = "Apple pie – Grandmother's Kitchen"
HTML = f"""<html><head><title>{TITLE}</title><meta property="og:title" content="{TITLE}">
<meta name="twitter:title" content="{TITLE}"><meta name="description" content="How it is made.">
<script type="application/ld+json">{{"name": "{TITLE}"}}</script></head><body>
<nav><a href="/">Home</a> <li>apple PIE!</li></nav><h1>Apple pie - Grandmother's kitchen</h1>
<svg><title>{TITLE}</title></svg><p hidden>{TITLE}</p><img alt="{TITLE}">
<p>Grandmother's Kitchen</p><p>An apple pie needs apples.</p><p>How it is made.</p></body></html>"""


def row(**values):
    return JsonRow(Path("mine.jsonl"), 7, values)


def module(folder, rows, **options):
    """A datamodule that trains on all rows, and its store."""
    split = options.pop("split", TextSplit(validation_share=0))
    path = rows_file(folder / "pages.jsonl", rows)
    sizes = {"context_length": 96, "max_target_tokens": 24, **options}
    data = PagesDataModule(train_files=path, split=split, plan=PlanOptions(seed=1), **sizes)
    data.store = data.open_store("fit")
    return data


def pieces(dataset):
    return [piece for i in range(len(dataset.lengths)) for piece in dataset.example(i, 0)]


def test_the_target_is_nowhere_in_the_page():
    for html in (HTML.replace("<h1>Apple pie", "<h1>Apple<br>pie"), HTML):
        page = page_of(row(html=html, query="pie"), "title")
        assert page.target == TITLE  # the title in the page's own head
        assert page.text == "Home\nAn apple pie needs apples.\nHow it is made."
    prompt, _ = prompt_of(page, "title")
    assert prompt == f"Query: pie\nPage: {page.text}\nTitle:\n"
    page = page_of(row(html=HTML, text="Apple pie\nNeeds apples."), "title")  # the text column wins
    assert (page.target, page.text) == (TITLE, "Needs apples.")


def test_a_description_is_written_from_title_and_text():
    page = page_of(row(html=HTML, title="Mine"), "description")
    assert (page.title, page.target) == ("Mine", "How it is made.")
    assert "How it is made" not in page.text
    prompt, shrinks = prompt_of(page, "description")
    assert prompt.startswith("Title: Mine\nPage: Home\n")
    assert prompt.endswith("\nDescription:\n")
    assert prompt[:shrinks].partition("\nPage: ")[2] == page.text


def test_a_passage_that_holds_the_target_stays():
    page = page_of(row(text="Apple pie\nOld apple, pie is good", title="Apple pie"), "title")
    assert page.text == "Old apple, pie is good"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"title": "x"}, 'mine.jsonl:7: the row has no "html" and no "text", or both are empty'),
        ({"text": 3}, 'mine.jsonl:7: "text" must be a text, got 3'),
        ({"text": "a", "query": ["b"]}, 'mine.jsonl:7: "query" must be a text'),
        ({"text": "A.", "title": "a"}, "mine.jsonl:7: the page has no visible text besides its t"),
        ({"html": "<script>x</script>"}, "mine.jsonl:7: the page has no visible text"),
        ({"text": "a \ud83d"}, r"mine.jsonl:7: .* is half of a surrogate pair"),
    ],
)
def test_a_wrong_row_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        list(page_prompts([row(**values)], byte_tokenizer(), "title", 9))


def test_pages_without_a_target_are_told_apart(tmp_path):
    rows = [{"text": "a b", "title": " "}, {"text": "c", "title": "d"}, {}]
    found, data = BadRows("reject"), module(tmp_path, rows, on_bad_rows="reject")
    assert [page.line for _, _, page in data.store_request().rows(found)] == [2]
    assert [(r.line, r.kind) for r in found.rows] == [(1, "no target"), (3, "no page")]
    with pytest.raises(ValueError, match=r"(?s)pages.jsonl:1: .a b.: the page has no title.*rejec"):
        module(tmp_path, [{"text": "a b"}, {"text": "c", "title": "d"}])
    data = module(tmp_path, [{"text": "a b"}, {"text": "c", "title": "d"}], on_bad_rows="reject")
    assert len(data.build("train").lengths) == 1
    assert [r.kind for r in data.audit().bad_rows] == ["no target"]


@pytest.mark.parametrize(
    "tokenizer", [TokenizerOptions("bytes"), TokenizerOptions("bpe", vocab_size=280)]
)
def test_a_long_page_loses_its_end_and_never_the_target(tmp_path, tokenizer):
    text = "the hen drank milk in the barn. " * 12
    rows = [{"text": text, "title": title} for title in ("Hen", "A hen, déjà vu")]
    data = module(tmp_path, rows, tokenizer=tokenizer, context_length=72)
    short, long = sorted(pieces(data.build("train")), key=lambda p: (p.labels != IGNORED).sum())
    decode = data.store.tokenizer.decode
    answers = [decode(p.labels[p.labels != IGNORED]) for p in (short, long)]
    assert answers == ["Hen", "A hen, déjà vu"]
    prompts = [p.input_ids[: (p.labels == IGNORED).sum() + 1] for p in (short, long)]
    assert prompts[0].tolist() == prompts[1].tolist()  # a long target does not shorten it
    assert len(prompts[0]) == data.max_prompt == 48
    prompt = decode(prompts[0])
    assert prompt.startswith("Page: the hen")
    assert prompt.endswith("\nTitle:\n")


def test_prediction_asks_as_training_did(tmp_path):
    asking = ((1, "q"), (40, "q"), (40, "q" * 99))  # the last leaves no room for a page
    rows = [{"text": "the hen " * n, "title": f"Hen {n}", "query": query} for n, query in asking]
    data = module(tmp_path, rows, layout="documents")
    source = read_rows([Path(data.files[0])]), data.store.tokenizer, "title", data.max_prompt
    prompts = [prompt for [prompt] in page_prompts(*source)]
    trained = (p.input_ids[: (p.labels == IGNORED).sum() + 1] for p in pieces(data.build("train")))
    assert [prompt.ids for prompt in prompts] == [ids.tolist() for ids in trained]
    num_cut = len("the hen " * 40) + 24 - 1 - 72
    assert [prompt.num_cut for prompt in prompts] == [0, num_cut, num_cut + 98]


def test_one_page_with_several_queries_is_in_one_part(tmp_path):
    rows = [
        {"text": f"page {i}", "title": f"title {i}", "query": query}
        for i in range(20)
        for query in ("one", "two", "")
    ]
    data = module(tmp_path, rows, split=TextSplit(validation_share=0.3, test_share=0.3))
    parts = [set(data.store.stream(part).lines.tolist()) for part in range(3)]
    groups = [{(line - 1) // 3 for line in lines} for lines in parts]
    assert [len(lines) for lines in parts] == [3 * len(group) for group in groups]
    assert len(groups[1]) == 6


def test_evaluation_has_a_page_per_sample_with_its_whole_texts(tmp_path):
    rows = [{"text": f"page {i}\n" + "x " * i, "title": f"T{i}", "query": "q"} for i in range(60)]
    data = module(tmp_path, rows, split=TextSplit(validation_share=0.5), layout="packed")
    dataset = data.build("validation")
    assert isinstance(dataset, SnippetDataset)
    batch = dataset.collate([dataset.example(i, 0) for i in range(30)])
    lines = data.store.stream(1).lines.tolist()
    assert batch["texts"] == [rows[line - 1]["text"].strip() for line in lines[:30]]
    decode = data.store.tokenizer.decode
    for i, target in enumerate(batch["targets"]):
        prompt = batch["prompt_ids"][i, : batch["prompt_lengths"][i]]
        assert decode(prompt).startswith(f"Query: q\nPage: page {target[1:]}\n")
    assert batch["input_ids"].shape[0] == 1  # both in one row, without attention to each other
    assert np.array_equal(batch["document_ids"].unique(), np.arange(30))


def test_the_demo_has_pages_without_their_titles():
    path = demo.demo_pages()
    assert demo.demo_pages() == path
    pages = [page_of(row, "title") for row in read_rows([path])]
    assert len(pages) > 900
    assert len({page.text for page in pages}) == len(pages)
    assert all(page.query and 0 < len(page.target) <= 100 for page in pages)
