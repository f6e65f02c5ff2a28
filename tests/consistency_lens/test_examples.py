"""The page of examples: escaped, self-contained, sorted by error."""

from html.parser import HTMLParser

import pytest
from lightning.pytorch import seed_everything

from lit_models.consistency_lens.controls import EvaluationOptions
from lit_models.consistency_lens.tables import evenly, page
from tests.consistency_lens.small_lens import data_of, module_of, trainer_of

# The subject stands in evaluation mode for ever.
pytestmark = pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start")

LINE = {
    "document": "test:0",
    "position": 7,
    "before": "<script>alert(1)</script> & ",
    "token": '"<b>"',
    "after": " é",
    "explanation": "<i> 'x'",
    "error": 0.25,
    "nearest_controls": {"mean": 1.0, "token_mean": 1.5},
    "words": [("<i>", 0.5), (" 'x'", -0.1)],
}


class Page(HTMLParser):
    """Tags, cells and the text of the table."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.rows[-1][-1] += data


def test_the_page_shows_texts_as_they_are_and_loads_nothing():
    found = Page(page([LINE, {**LINE, "words": []}], 9))
    assert not found.open
    heads, first, _ = found.rows
    assert not heads
    assert first[0] == "0.250"
    assert first[1] == '<script>alert(1)</script> & "<b>" é'
    assert first[2] == "<i> 'x'"
    assert first[3:] == ["mean", "1.000", "test:0", "7"]
    names = [tag for tag, _ in found.tags]
    assert names.count("script") == 1
    assert not {"link", "img", "iframe", "b", "i"} & set(names)
    keys = [attributes["data-key"] for tag, attributes in found.tags if tag == "td"]
    assert keys[:7][::4] == ["0.25", "1.0"]
    assert not any("src" in attributes or "href" in attributes for _, attributes in found.tags)
    shares = [a["style"] for tag, a in found.tags if a.get("class") == "word"]
    assert shares == ["--share: 0.75", "--share: 0.00"]


def test_examples_stand_at_even_distances():
    assert evenly(10, 4) == [0, 3, 6, 9]
    assert evenly(2, 5) == [0, 1]


def test_a_test_leaves_a_page_sorted_by_error(tmp_path):
    seed_everything(1)
    module = module_of(evaluation=EvaluationOptions(num_draws=1, num_examples=5))
    trainer_of(tmp_path / "run").test(module, data_of(tmp_path), verbose=False)
    found = Page((tmp_path / "run" / "examples.html").read_text("utf-8"))
    errors = [float(row[0]) for row in found.rows[1:]]
    assert len(errors) == 5
    assert errors == sorted(errors)
    assert errors[0] < errors[-1]
    assert all(len(row[2].split()) == 3 for row in found.rows[1:])
