"""The tables: as wide as a terminal, with every row, and plain about what was not run."""

import json

import pytest
import torch
from lightning.pytorch import seed_everything
from rich.console import Console

from lit_models.consistency_lens.controls import (
    REFERENCE_ROWS,
    EvaluationOptions,
    FidelityTable,
    row_names,
)
from lit_models.consistency_lens.tables import (
    IS_RANDOM,
    NO_REFERENCE,
    OTHER_DATA,
    headline,
    rendered,
)
from tests.consistency_lens.cases import case_of, data_of, module_of, trainer_of


@pytest.fixture(scope="module")
def rows():
    case, table = case_of(), FidelityTable(row_names(EvaluationOptions()), [])
    with torch.no_grad():
        table.update(case.fidelities(), case.batch)
    return table.computed()["all"]


def printed(table):
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_tables_fit_a_terminal_and_cut_no_word(rows):
    wide = {"untrained_reader": dict.fromkeys(rows["greedy"], -12.3456)} | rows
    wide["zero"] = dict.fromkeys(rows["zero"], -45678.9)
    legible = {"text_nats": 12.345, "distinct": 0.5, "recall": 0.25, "shuffled_recall": 0.125}
    lines = printed(rendered(wide, legible, "combinations"))
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("controls: combinations")
    assert [line.split()[0] for line in lines[2 : 2 + len(wide)]] == list(wide)
    assert "…" not in "".join(lines)
    below = " ".join(line.strip() for line in lines[2 + len(wide) :])
    assert f"greedy is {rows['greedy']['excess']:.3f} (" in below
    assert "12.345 nats per word under the subject, 0.500 distinct" in below
    assert "attributes named: 0.250, of another activation 0.125" in below
    bare = rendered(rows, {"text_nats": 1.0, "distinct": 1.0}, "all")
    assert "attributes" not in "".join(printed(bare))
    notes = "\n".join([IS_RANDOM, OTHER_DATA, NO_REFERENCE])
    assert max(map(len, notes.splitlines())) <= 80


def test_the_headline_is_what_the_token_mean_does_not_say(rows):
    found = headline(rows, {"distinct": 0.5})
    own, token = rows["greedy"]["fve"], rows["token_mean"]["fve"]
    assert found["fve_excess"] == pytest.approx(own - token)
    assert found["fve_excess_share"] == pytest.approx((own - token) / (1 - token))
    assert found["distinct"] == 0.5


def test_a_test_without_training_leaves_its_table_and_names_what_it_lacks(tmp_path, capsys):
    seed_everything(1)
    options = EvaluationOptions(num_draws=1, num_examples=0)
    trainer = trainer_of(tmp_path / "run", limit_test_batches=1)
    trainer.test(module_of(evaluation=options), data_of(tmp_path), verbose=False)
    out = capsys.readouterr().out
    content = json.loads((tmp_path / "run" / "controls.json").read_text())
    assert content["notes"] == [NO_REFERENCE, IS_RANDOM]
    assert NO_REFERENCE in out
    assert set(content["attributes"]["all"]) == {"pet", "place"}
    assert set(content["rows"]["all"]) == set(row_names(options)) - set(REFERENCE_ROWS)
    assert not any("best" in name for name in content["rows"]["all"])
    assert not (tmp_path / "run" / "examples.html").exists()
