"""Main text, near duplicates and reading ease: by hand, and for a collection of pages."""

import json
import sys
from pathlib import Path

import pytest

from datamodules.files.rows import read_rejected
from datamodules.search.cleaning import Cleaning
from datamodules.search.collection import CollectionRequest, open_collection
from lit_models.seo.onpage import check_page, reading_ease
from tests.search_collections import write_lines

PAGE = (
    "<html lang=en><head><title>Salt</title></head><body><nav><a href=/>Home</a> <a href=/b>Shop"
    "</a></nav><article><h1>Salt</h1>{}</article><footer>Imprint and terms</footer></body></html>"
)
TEXT = "".join(
    f"<p>Paragraph {n} of the text says how salt is won from the sea by sun and wind.</p>"
    for n in range(6)
)


def beir(folder: Path, texts: list[str]) -> CollectionRequest:
    rows = [json.dumps({"_id": f"d{n}", "text": text}) for n, text in enumerate(texts)]
    write_lines(folder / "corpus.jsonl", *rows)
    write_lines(folder / "queries.jsonl", '{"_id": "q", "text": "salt"}')
    write_lines(folder / "qrels/test.tsv", "q\td0\t1")
    return CollectionRequest(str(folder), cleaning=Cleaning(near_duplicates=0.7))


def test_the_main_text_of_a_page_is_read_without_its_menus(tmp_path):
    pytest.importorskip("trafilatura", reason="extra: pages")
    (tmp_path / "salt.html").write_text(PAGE.format(TEXT))
    whole = open_collection(CollectionRequest(str(tmp_path)))
    main = open_collection(CollectionRequest(str(tmp_path), cleaning=Cleaning(main_text=True)))
    assert "Imprint" in whole.documents[0].text
    assert "Home" in whole.documents[0].text
    lines = main.documents[0].text.split("\n")
    assert lines[0] == "Paragraph 0 of the text says how salt is won from the sea by sun and wind."
    assert len(lines) == 6
    assert whole.fingerprint != main.fingerprint
    assert main.documents[0].title == "Salt"


def test_a_document_that_repeats_an_earlier_one_is_a_bad_row(tmp_path):
    pytest.importorskip("datasketch", reason="extra: pages")
    words = [f"word{n}" for n in range(300)]
    near = [*words[:299], "other"]  # 295 of all 297 runs of five words are in both
    half = [*words[:150], *(f"new{n}" for n in range(150))]
    request = beir(tmp_path, [" ".join(own) for own in (words, near, half)] + ["", ""])
    collection = open_collection(request, "reject")
    assert [document.id for document in collection.documents] == ["d0", "d2", "d3", "d4"]
    (row,) = read_rejected(collection.folder)
    assert (row.kind, row.value, row.line) == ("near duplicate", "d1", 2)
    assert "repeats d0" in row.rule
    with pytest.raises(ValueError, match="it repeats d0"):
        open_collection(request)
    assert len(open_collection(CollectionRequest(str(tmp_path))).documents) == 5


def test_reading_ease_is_flesch_s_by_hand():
    pytest.importorskip("pyphen", reason="extra: pages")
    lines = ["The cat sat on the mat.", "Information is in formation."]
    # 10 words, 2 sentences; in-for-ma-tion and for-ma-tion as pyphen divides them, 8 of one.
    import pyphen

    parts = pyphen.Pyphen(lang="en_US")
    syllables = 8 + sum(parts.inserted(w).count("-") + 1 for w in ("Information", "formation"))
    expected = 206.835 - 1.015 * 10 / 2 - 84.6 * syllables / 10
    assert reading_ease(lines, "en-GB") == pytest.approx(expected, abs=0.06)
    assert reading_ease(["Die Katze sitzt."], "de") == 180 - 3 - 58.5 * 4 / 3
    assert reading_ease(lines, "ja") is None
    assert reading_ease([], "en") is None
    report = check_page(PAGE.format(TEXT).encode(), "salt.html", with_ease=True)
    assert 50 < report.facts["reading_ease"] < 110
    assert "reading_ease" not in check_page(PAGE.encode(), "salt.html").facts


def test_what_is_missing_or_wrong_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ValueError, match=r"unisono\[pages\]"):
        open_collection(beir(tmp_path, ["salt"]))
    with pytest.raises(ValueError, match="is for a folder of pages"):
        open_collection(CollectionRequest(str(tmp_path), cleaning=Cleaning(main_text=True)))
    with pytest.raises(ValueError, match=r"near_duplicates must be 0\.1 to 1, got 2"):
        Cleaning(near_duplicates=2)
