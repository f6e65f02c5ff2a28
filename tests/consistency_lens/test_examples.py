"""The page of examples and the samples while training: seen, escaped, without a trace."""

import json
from html.parser import HTMLParser

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_models.consistency_lens.controls import EvaluationOptions
from lit_models.consistency_lens.tables import ExplanationSamples, evenly, page
from tests.causal_lm.events import texts_of
from tests.consistency_lens.cases import data_of, module_of, trainer_of
from tests.toy import ledger_lines

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
    assert evenly(range(10, 20), 4) == [10, 13, 16, 19]
    assert evenly([3, 1], 5) == [3, 1]


def fit(folder, callbacks=(), **options):
    seed_everything(1)
    module = module_of(evaluation=EvaluationOptions(num_draws=2, num_examples=5))
    logger = TensorBoardLogger(folder, name="board", version="")
    trainer = trainer_of(folder, callbacks, **{"logger": logger, **options})
    trainer.fit(module, data_of(folder.parent))
    return module, trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run without and with samples; the second one is tested."""
    folder = tmp_path_factory.mktemp("runs")
    plain, _ = fit(folder / "plain")
    samples = ExplanationSamples(num_examples=2, num_evaluated=6, every_n_steps=3)
    sampled, trainer = fit(folder / "sampled", [samples])
    trainer.test(sampled, data_of(folder), verbose=False)
    return folder, plain, sampled


def test_a_run_with_samples_is_the_run_without_them(runs):
    folder, plain, sampled = runs
    for one, other in zip(plain.state_dict().values(), sampled.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    lines = [ledger_lines(folder / name) for name in ("plain", "sampled")]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    texts = texts_of(folder / "sampled")
    texts = {key: text for key, text in texts.items() if "/errors/" not in key[0]}
    steps = range(3, len(lines[0]) + 1, 3)
    assert len(steps) > 1
    assert sorted(texts) == [(f"examples/{n}/text_summary", s) for n in (0, 1) for s in steps]
    first = texts["examples/0/text_summary", 3]
    assert "<sub>" in first
    assert "&lt;b&gt;" in "".join(texts.values())
    assert first.splitlines()[0] == texts["examples/0/text_summary", 6].splitlines()[0]
    board = EventAccumulator(str(folder / "sampled" / "board")).Reload()
    curves = {tag: board.Scalars(tag) for tag in board.Tags()["scalars"]}
    assert [event.value for event in curves["fve/mean"]] == pytest.approx(
        [0] * len(steps), abs=1e-6
    )
    assert len({event.value for event in curves["fve/greedy"]}) > 1  # it learns
    assert [event.step for event in curves["kl_recovered/token_mean"]] == list(steps)


def test_a_test_leaves_a_page_with_the_best_and_the_worst(runs):
    folder, _, _ = runs
    found = Page((folder / "sampled" / "examples.html").read_text("utf-8"))
    errors = [float(row[0]) for row in found.rows[1:]]
    assert len(errors) == 5
    assert errors == sorted(errors)
    assert errors[0] < errors[-1]
    rows = json.loads((folder / "sampled" / "controls.json").read_text())["rows"]
    assert "random_subject" not in rows["all"]


def test_samples_need_a_place_and_numbers(tmp_path):
    with pytest.raises(ValueError, match="ExplanationSamples has nowhere to write: the trainer"):
        fit(tmp_path / "run", [ExplanationSamples()], logger=False)
    with pytest.raises(ValueError, match="num_examples of ExplanationSamples must be at least 1"):
        ExplanationSamples(num_examples=0)
