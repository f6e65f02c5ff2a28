"""The tables: as wide as a terminal, with every row, and plain about what was not run."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import seed_everything
from rich.console import Console

from lit_models.consistency_lens.controls import (
    REFERENCE_ROWS,
    EvaluationOptions,
    fidelities,
    known_rows,
    random_subject_rows,
    row_names,
)
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.metrics import FidelityTable
from lit_models.consistency_lens.recipe import TRAINED_ON
from lit_models.consistency_lens.tables import (
    IS_RANDOM,
    NO_REFERENCE,
    NOT_RUN,
    OTHER_DATA,
    TOLD_NOTE,
    UNKNOWN_DATA,
    headline,
    legibility_table,
    logged,
    notes_of,
    rendered,
)
from tests.consistency_lens.cases import case_of, data_of, module_of, trainer_of


@pytest.fixture(scope="module")
def rows():
    case, table = case_of(), FidelityTable(row_names(EvaluationOptions()), [])
    with torch.no_grad():
        table.update(fidelities(case), case.batch)
    return table.computed()["all"]


def printed(table):
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_tables_fit_a_terminal_and_cut_no_word(rows):
    wide = {"random_subject": dict.fromkeys(rows["greedy"], -12.3456)} | rows
    wide["zero"] = dict.fromkeys(rows["zero"], -45678.9)
    lines = printed(rendered(wide, "combinations"))
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("controls: combinations")
    assert [line.split()[0] for line in lines[2 : 2 + len(wide)]] == list(wide)
    assert "…" not in "".join(lines)
    assert f"greedy is {rows['greedy']['excess']:.3f} (" in lines[-1]
    legible = {"text_nats": 12.345, "distinct": 0.5, "recall": 0.25, "shuffled_recall": 0.125}
    attributes = {"pet": {"recall": 0.5, "shuffled_recall": 0.25, "known": 1234.0}}
    lines = printed(legibility_table(rows, legible, attributes, "all"))
    assert max(map(len, lines)) <= 80
    assert [line.split()[-3:] for line in lines if "pet" in line] == [["0.500", "0.250", "1234"]]
    bare = printed(legibility_table(rows, {"text_nats": 1.0, "distinct": 1.0}, {}, "combinations"))
    assert (len(bare), bare[0].strip()) == (5, "legibility: combinations")
    notes = "\n".join([NOT_RUN, IS_RANDOM, OTHER_DATA, UNKNOWN_DATA, NO_REFERENCE, TOLD_NOTE])
    assert max(map(len, notes.splitlines())) <= 80


def test_the_headline_is_what_the_token_mean_does_not_say(rows):
    found = headline(rows, {"distinct": 0.5})
    own, token = rows["greedy"]["fve"], rows["token_mean"]["fve"]
    assert found["fve_excess"] == pytest.approx(own - token)
    assert found["fve_excess_share"] == pytest.approx((own - token) / (1 - token))
    assert found["distinct"] == 0.5


def test_the_headline_is_of_the_first_file_and_of_others_some_values_are_told(rows):
    found = {g: headline(rows, {"recall": n}) for n, g in enumerate(["all", "a.b", "c"])}
    values = logged(found)
    assert values["recall"] == 1
    assert values["c/recall"] == 2
    assert values["c/fve"] == rows["greedy"]["fve"]
    assert values["c/kl_recovered"] == rows["greedy"]["kl_recovered"]
    assert not any(name.startswith(("all/", "a.b/")) for name in values)
    assert logged({"all": found["all"]}) == found["all"]


def test_a_reference_that_was_never_kept_has_no_rows(rows):
    lens = SimpleNamespace(has_reference=False)
    found = known_rows(rows, lens)
    assert rows.keys() - found.keys() == set(REFERENCE_ROWS)
    assert "separate_reader_fve" not in headline(found, {})
    assert headline(rows, {})["separate_reader_fve"] == rows["separate_reader"]["fve"]
    legible = {"text_nats": 1.0, "distinct": 1.0}
    assert "reader" not in "".join(printed(legibility_table(found, legible, {}, "all")))
    lens.has_reference = True
    assert known_rows(rows, lens) == rows


def test_notes_name_all_that_makes_the_numbers_easier(rows):
    module = SimpleNamespace(
        lens_options=LensOptions(gives_current_token=True),
        options=SimpleNamespace(path="subject", random_weights=True),
        recipe={"subject": {"digest": "", "layer": 1}, TRAINED_ON: ["mine"]},
        lens=SimpleNamespace(has_reference=True),
    )
    assert notes_of(module, rows, {}, "mine") == [TOLD_NOTE, IS_RANDOM]
    module.options.random_weights, module.lens_options = False, LensOptions()
    assert notes_of(module, rows, {}, "mine") == [NOT_RUN]
    random = {"all": rows["greedy"]}
    assert notes_of(module, rows, random, "mine") == []
    assert notes_of(module, rows, random, "other") == [OTHER_DATA]
    module.lens.has_reference, module.recipe[TRAINED_ON] = False, ["mine", "before"]
    assert notes_of(module, rows, random, "mine") == [OTHER_DATA, NO_REFERENCE]
    del module.recipe[TRAINED_ON]  # an older checkpoint
    assert notes_of(module, rows, random, "mine") == [UNKNOWN_DATA, NO_REFERENCE]


def test_a_second_chain_becomes_a_row(tmp_path, capsys):
    seed_everything(1)
    module, data = module_of(), data_of(tmp_path)
    trainer_of(tmp_path / "random").test(module, data, verbose=False)
    content = json.loads((tmp_path / "random" / "controls.json").read_text())
    assert content["notes"] == [NO_REFERENCE, IS_RANDOM]
    assert set(content["attributes"]["all"]) == {"pet", "place"}
    told = set(row_names(EvaluationOptions())) - set(REFERENCE_ROWS)
    assert set(content["rows"]["all"]) == told
    capsys.readouterr()
    named = str(tmp_path / "random" / "controls.json")
    options = EvaluationOptions(num_draws=1, num_examples=0, random_subject=named)
    trainer = trainer_of(tmp_path / "run", limit_test_batches=1)
    trainer.test(module_of(evaluation=options), data_of(tmp_path), verbose=False)
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "controls.json").read_text())
    assert found["rows"]["all"]["random_subject"] == content["rows"]["all"]["greedy"]
    assert not any("best" in name for name in found["rows"]["all"])
    assert out.count("\nrandom_subject  ") == 1
    number = int(content["rows"]["all"]["greedy"]["count"])
    assert f"random_subject is of {number} activations, and the other rows of 16" in out
    assert not (tmp_path / "run" / "examples.html").exists()


def test_what_is_no_second_chain_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="evaluation.random_subject .* does not exist"):
        random_subject_rows(tmp_path / "none.json")
    path = tmp_path / "controls.json"
    for text in ("{", "[]", '{"rows": {"all": {}}, "subject": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"is no controls.json of a test \("):
            random_subject_rows(path)
    rows = {"all": {"greedy": {"fve": 0.5}}}
    path.write_text(json.dumps({"subject": {"has_random_weights": False}, "rows": rows}))
    with pytest.raises(ValueError, match="is of a trained subject; name the controls.json of"):
        random_subject_rows(path)
