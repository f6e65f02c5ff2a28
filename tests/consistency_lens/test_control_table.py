"""Values of the controls, by hand and with valid intervals; the table that a test prints."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import seed_everything
from rich.console import Console
from selectolax.lexbor import LexborHTMLParser

from datamodules.files.splitting import TextSplit
from datamodules.tokenizers.text import TokenizerOptions
from lit_models.causal_lm.pretrained import network_from_config as drawn
from lit_models.consistency_lens import controls, subject
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.module import continued
from lit_models.consistency_lens.subject import TRAINED_ON
from tests.activation_dumps import stories
from tests.consistency_lens.small_lens import data_of, module_of, trainer
from tests.consistency_lens.tiny import case_of
from tests.text_corpora import rows_file

# The subject always stays in evaluation mode.
pytestmark = pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode at the start")
ROWS = ("greedy", "zero", "mean", "token_mean")


def fidelity(*values):
    return controls.Fidelity(*(torch.tensor(value, dtype=torch.float64) for value in values))


def batch(number, **more):
    return {"document": torch.arange(number), "weight": torch.ones(number), **more}


def by_hand():
    """Two samples: error, spread, unit error, unit spread, nats, next nats."""
    spread, unit = [4, 6], [0.2, 0.8]
    return {
        "greedy": fidelity([1, 2], spread, [0.1, 0.1], unit, [0.5, 0.5], [1, 3]),
        "zero": fidelity([8, 12], spread, [1, 1], unit, [8, 8], [5, 5]),
        "mean": fidelity([4, 6], spread, unit, unit, [3, 1], [2, 2]),
        "token_mean": fidelity([3, 2], spread, unit, unit, [2, 1], [1, 2]),
    }


def test_values_are_those_worked_by_hand():
    table = controls.FidelityTable(ROWS, [])
    table.update(by_hand(), batch(2))
    found = table.compute()["all"]
    own = found["greedy"]
    assert own["fve"] == pytest.approx(1 - 3 / 10)
    assert own["excess"] == pytest.approx((1 - 3 / 10) - (1 - 5 / 10))
    assert own["unit_fve"] == pytest.approx(1 - 0.2 / 1.0)
    assert own["kl_recovered"] == pytest.approx(1 - 1 / 4)
    assert (own["nats"], own["next_nats"], own["count"]) == (0.5, 2.0, 2)
    assert found["zero"]["fve"] == -1
    nothing = found["mean"]["fve"], found["mean"]["kl_recovered"], found["token_mean"]["excess"]
    assert nothing == (0, 0, 0)


def test_a_weight_of_0_and_an_empty_table_count_nothing():
    table = controls.FidelityTable(ROWS, [])
    table.update(by_hand(), batch(2) | {"weight": torch.zeros(2)})
    assert not any(value for row in table.compute()["all"].values() for value in row.values())
    table.update(by_hand(), batch(2) | {"weight": torch.tensor([1.0, 0.0])})
    own = table.compute()["all"]["greedy"]
    assert (own["fve"], own["count"]) == (0.75, 1)
    assert (own["fve_low"], own["fve_high"]) == (0.75, 0.75)  # a replicate of nothing says nothing
    explained = controls.Explained()
    explained.update(torch.zeros(1), torch.zeros(1))
    assert explained.compute() == 0


def random_rows(number, seed=0):
    random = np.random.default_rng(seed)
    return {row: fidelity(*random.gamma(1.0, size=(6, number))) for row in ROWS}


@settings(deadline=None, max_examples=15)
@given(st.permutations(range(12)), st.lists(st.integers(1, 11), max_size=4))
def test_neither_order_nor_batches_change_a_value(order, cuts):
    rows = random_rows(12)
    whole, pieces = controls.FidelityTable(ROWS, []), controls.FidelityTable(ROWS, [])
    whole.update(rows, batch(12))
    for part in np.split(np.array(order), sorted(set(cuts))):
        some = {name: controls.Fidelity(*(x[part] for x in found)) for name, found in rows.items()}
        pieces.update(some, batch(len(part)) | {"document": torch.from_numpy(part)})
    torch.testing.assert_close(whole.compute(), pieces.compute(), rtol=1e-12, atol=1e-12)


def test_the_interval_is_that_of_an_ordinary_bootstrap_over_documents():
    random = np.random.default_rng(0)
    document = np.repeat(np.arange(150), 4)
    quality = random.gamma(2.0, size=150)[document]  # samples of one document are alike
    spread = random.gamma(3.0, size=600)
    error = spread * quality * random.uniform(0.1, 0.3, 600)
    rows = random_rows(600)
    rows["greedy"] = fidelity(error, spread, *random.gamma(1.0, size=(4, 600)))
    table = controls.FidelityTable(ROWS, [])
    table.update(rows, batch(600) | {"document": torch.from_numpy(document)})
    own = table.compute()["all"]["greedy"]
    errors, spreads = (np.bincount(document, x) for x in (error, spread))
    draws = random.integers(150, size=(4000, 150))
    low, high = np.quantile(1 - errors[draws].sum(1) / spreads[draws].sum(1), [0.025, 0.975])
    width = high - low
    assert own["fve_low"] == pytest.approx(low, abs=0.12 * width)
    assert own["fve_high"] == pytest.approx(high, abs=0.12 * width)
    draws = random.integers(600, size=(4000, 600))  # as if samples were independent
    low, high = np.quantile(1 - error[draws].sum(1) / spread[draws].sum(1), [0.025, 0.975])
    assert own["fve_high"] - own["fve_low"] > 1.25 * (high - low)


def test_texts_and_attributes_are_counted_by_hand():
    table = controls.Legibility(["pet", "place"], ["all", "one"])
    member = torch.tensor([[1.0, 0], [1, 1], [1, 1], [0, 0]]).double()
    own = torch.tensor([[1, 5], [5, 1], [1, 5], [9, 9]])
    other = torch.tensor([[6, 4], [0, 0], [0, 4], [4, 4]])
    attributes = torch.tensor([[5, 6], [5, -1], [7, 5], [4, 4]])
    table.update(torch.tensor([1.0, 2.0, 6.0, 99.0]), (own, other), attributes, member)
    found, attributes = table.compute()
    (values, by_name), (some, of_one) = (
        (found[group], attributes[group]) for group in ("all", "one")
    )
    assert values == pytest.approx(
        {"text_nats": 3, "distinct": 2 / 3, "recall": 3 / 5, "shuffled_recall": 1 / 5}
    )
    assert by_name["pet"] == pytest.approx({"recall": 2 / 3, "shuffled_recall": 0, "known": 3})
    assert by_name["place"] == pytest.approx({"recall": 0.5, "shuffled_recall": 0.5, "known": 2})
    assert some["text_nats"] == 4
    assert (some["distinct"], of_one["pet"]["recall"]) == (1, 0.5)
    bare = controls.Legibility([], ["all"])
    bare.update(torch.ones(4), (own, other), torch.zeros(4, 0), member[:, :1])
    assert bare.compute() == (
        {"all": {"text_nats": 1, "distinct": pytest.approx(2 / 3)}},
        {"all": {}},
    )


@pytest.fixture(scope="module")
def rows():
    case, table = case_of(), controls.FidelityTable([*controls.ROWS], [])
    with torch.no_grad():
        table.update(case.fidelities(), case.batch)
    return table.compute()["all"]


def printed(table):
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_tables_fit_a_terminal_and_cut_no_word(rows):
    wide = {"untrained_reader": dict.fromkeys(rows["greedy"], -12.3456)} | rows
    wide["zero"] = dict.fromkeys(rows["zero"], -45678.9)
    legible = {"text_nats": 12.345, "distinct": 0.5, "recall": 0.25, "shuffled_recall": 0.125}
    lines = printed(controls.rendered(wide, legible, "combinations"))
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("controls: combinations")
    assert [line.split()[0] for line in lines[2 : 2 + len(wide)]] == list(wide)
    assert "…" not in "".join(lines)
    below = " ".join(line.strip() for line in lines[2 + len(wide) :])
    assert f"greedy is {rows['greedy']['excess']:.3f} (" in below
    assert "12.345 nats per word under the subject, 0.500 distinct" in below
    assert "attributes named: 0.250, of another activation 0.125" in below
    bare = controls.rendered(rows, {"text_nats": 1.0, "distinct": 1.0}, "all")
    assert "attributes" not in "".join(printed(bare))
    notes = "\n".join([controls.IS_RANDOM, controls.OTHER_DATA, controls.NO_REFERENCE])
    assert max(map(len, notes.splitlines())) <= 80


def test_the_headline_is_what_the_token_mean_does_not_say(rows):
    found = controls.headline(rows, {"distinct": 0.5})
    own, token = rows["greedy"]["fve"], rows["token_mean"]["fve"]
    assert found["fve_excess"] == pytest.approx(own - token)
    assert found["fve_excess_share"] == pytest.approx((own - token) / (1 - token))
    assert found["distinct"] == 0.5


def test_a_test_without_training_leaves_its_table_and_page_and_names_what_it_lacks(
    tmp_path, capsys, monkeypatch
):
    seed_everything(1)
    monkeypatch.setattr("lit_models.consistency_lens.controls.NUM_EXAMPLES", 5)
    runs = trainer(tmp_path / "run", limit_test_batches=1)
    runs.test(module_of(), data_of(tmp_path), verbose=False)
    out = capsys.readouterr().out
    content = json.loads((tmp_path / "run" / "controls.json").read_text())
    assert content["notes"] == [controls.NO_REFERENCE, controls.IS_RANDOM]
    assert controls.NO_REFERENCE in out
    assert set(content["attributes"]["all"]) == {"pet", "place"}
    assert set(content["rows"]["all"]) == controls.ROWS.keys() - controls.REFERENCE_ROWS
    shown = cells(LexborHTMLParser((tmp_path / "run" / "examples.html").read_text("utf-8")))
    errors = [float(row[0]) for row in shown]
    assert len(errors) == 5
    assert errors == sorted(errors)
    assert errors[0] < errors[-1]
    assert all(len(row[2].split()) == 3 for row in shown)


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


def cells(tree):
    """Return the texts of the table's rows."""
    return [[cell.text() for cell in row.css("td")] for row in tree.css("tbody tr")]


def test_the_page_shows_texts_as_they_are_and_loads_nothing():
    tree = LexborHTMLParser(controls.page([LINE, {**LINE, "words": []}], 9))
    texts = ["0.250", '<script>alert(1)</script> & "<b>" é', "<i> 'x'"]
    assert cells(tree)[0] == [*texts, "mean", "1.000", "test:0", "7"]
    assert len(tree.css("script")) == 1
    assert not tree.css("link, img, iframe, b, i, [src], [href]")
    assert [cell.attributes["data-key"] for cell in tree.css("td")][:7][::4] == ["0.25", "1.0"]
    shares = [word.attributes["style"] for word in tree.css(".word")]
    assert shares == ["--share: 0.75", "--share: 0.00"]


BYTES = TokenizerOptions("bytes")  # equal for any texts
OLDER = {"subject": 1, TRAINED_ON: ["old"]}
NEW = {"subject": 1, TRAINED_ON: ["new"]}


def split(seed):
    return TextSplit(test_share=0.2, seed=seed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder of stories and a lens trained for two steps on a part of them."""
    folder = tmp_path_factory.mktemp("trained")
    seed_everything(1)
    runs = trainer(folder / "fit", max_steps=2, limit_val_batches=0)
    runs.fit(module_of(), data_of(folder, tokenizer=BYTES, split=split(0)))
    runs.save_checkpoint(folder / "lens.ckpt")
    return folder


def evaluated(folder, name, precision=64, **options):
    """Return the logged values and controls.json."""
    runs = trainer(folder / name, precision=precision)
    module, path = module_of(), folder / "lens.ckpt"
    data = data_of(folder, tokenizer=BYTES, **options)
    [values] = runs.test(module, data, ckpt_path=path, weights_only=True, verbose=False)
    return values, json.loads((folder / name / "controls.json").read_text())


@pytest.fixture(scope="module")
def tested(trained):
    """Return `evaluated` for the lens on its training data."""
    return evaluated(trained, "own", split=split(0))


@pytest.mark.slow
def test_a_test_on_another_split_of_the_same_texts_says_so(trained, tested):
    _, own = tested
    assert own["notes"][0] == controls.NO_REFERENCE  # kept at step 0, since there is no warm start
    assert "teacher_text" in own["rows"]["all"]
    assert not {"separate_reader", "teacher_text_separate"} & own["rows"]["all"].keys()
    _, other = evaluated(trained, "other", split=split(1))
    assert other["notes"][0] == controls.OTHER_DATA
    assert other["rows"]["all"]["mean"]["fve"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_random_subject_is_the_same_in_every_precision_and_known_by_its_weights(
    trained, tested, monkeypatch
):
    wide, _ = tested
    narrow, _ = evaluated(trained, "narrow", precision="32-true", split=split(0))
    assert narrow["test/fve"] == pytest.approx(wide["test/fve"], abs=1e-4)
    monkeypatch.setattr(subject, "network_from_config", lambda recipe: drawn(recipe).half().float())
    with pytest.raises(ValueError, match="trained with another subject than this run has"):
        evaluated(trained, "moved", split=split(0))


@pytest.mark.slow
def test_the_headline_is_of_the_first_file_however_files_are_called(trained):
    stories(trained, 16, "all.jsonl")
    texts = [f"it saw one fox & left the hut at once {i} ." for i in range(6)]
    rows_file(trained / "b.c.jsonl", [{"text": text, "attributes": {}} for text in texts])
    train = trained / "train.jsonl"
    train.write_text(Path(stories(trained, 60)).read_text().split("\n", 16)[-1])
    files = [str(trained / f"{name}.jsonl") for name in ("all", "b.c")]
    values, content = evaluated(trained, "files", test_files=files, train=str(train))
    (first, second), rows = files, content["rows"]  # one is called as all of them are
    assert list(rows) == ["all", first, second]
    assert values["test/fve"] == pytest.approx(rows[first]["greedy"]["fve"])
    assert values[f"test/{second}/fve"] == pytest.approx(rows[second]["greedy"]["fve"])
    assert rows["all"]["greedy"]["fve"] != pytest.approx(rows[first]["greedy"]["fve"], abs=1e-6)
    counts = [rows[group]["greedy"]["count"] for group in rows]
    assert counts[0] == counts[1] + counts[2]
    assert min(counts) > 0
    known = [content["attributes"][group]["pet"]["known"] for group in rows]
    assert known[0] == known[1] > known[2] == 0
    legible, shares = content["legibility"], [count / counts[0] for count in counts]
    nats = [legible[group]["text_nats"] for group in rows]
    assert nats[0] == pytest.approx(nats[1] * shares[1] + nats[2] * shares[2])
    assert values["test/text_nats"] == pytest.approx(nats[1])


def test_a_recipe_knows_all_that_its_weights_went_through():
    fits, tests = (SimpleNamespace(state=SimpleNamespace(fn=fn)) for fn in ("fit", "test"))
    assert continued(None, NEW, fits) is NEW
    assert continued(OLDER, NEW, tests)[TRAINED_ON] == ["old"]
    assert continued(OLDER, NEW, None)[TRAINED_ON] == ["old"]
    assert continued(OLDER, NEW, fits)[TRAINED_ON] == ["old", "new"]
    assert continued(NEW, NEW, fits)[TRAINED_ON] == ["new"]
    with pytest.raises(ValueError, match="another subject than this run has"):
        continued({"subject": 2, TRAINED_ON: ["new"]}, NEW, fits)
    lens = asdict(LensOptions())
    older = {name: lens[name] for name in lens if name not in ("num_patched", "prompt")}
    assert continued({**NEW, "lens": older}, {**NEW, "lens": lens}, None)["lens"] == lens
    with pytest.raises(ValueError, match="another lens than this run has"):
        continued({**NEW, "lens": {**older, "num_words": 9}}, {**NEW, "lens": lens}, None)
