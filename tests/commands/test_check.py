"""`unisono check`: all faults of the data at once, and a reliable exit status."""

import json
from pathlib import Path

import pytest
import yaml

from lit_models.commands import run_command
from lit_models.commands.plan import check as check_command
from tests.text_corpora import saved_tokenizer

ANY_MODEL = "--model=lightning.pytorch.demos.boring_classes.BoringModel"


def check(data: dict) -> int:
    """Check the data of a config, with options after its class as on the command line."""
    spec = {name: data[name] for name in ("class_path", "init_args") if name in data}
    options = {name: value for name, value in data.items() if name not in spec}
    words = {k: v if isinstance(v, str) else json.dumps(v) for k, v in options.items()}
    return check_command(
        [ANY_MODEL, f"--data={json.dumps(spec)}", *(f"--data.{k}={v}" for k, v in words.items())]
    )


HEADER = "text,language,code_1\n"
SOUND = "smith,en,83110\ntailor,en,79100\nSmith,en,83110\n"
BAD = "smith,en,2110\n,en,83110\ntailor,xy,79100\nfarmer,en,6111x\nfarmer,en\n"


@pytest.fixture
def data(tmp_path: Path) -> dict:
    (tmp_path / "train.csv").write_text(HEADER + SOUND)
    (tmp_path / "bad.csv").write_text(HEADER + SOUND + BAD)
    (tmp_path / "book.csv").write_text("code,description\n83110,Smith\n79100,Tailor\n61110,Farmer")
    return {
        "class_path": "datamodules.OccupationDataModule",
        "init_args": {
            "train_files": str(tmp_path / "train.csv"),
            "columns": {"language": "language"},
            "text": {"max_length": 5},
        },
    }


def test_sound_data_pass(data, capsys):
    assert check(data) == 0
    shown = capsys.readouterr().out
    assert "median 5 characters, 95 % up to 6, longest 6; 1 longer than 5" in shown
    assert "languages  1 distinct, 0 of them once: en 3" in shown
    assert "codes      2 distinct, 1 of them once: 83110 2, 79100 1" in shown
    assert "duplicates train 1" in shown  # smith
    assert "every row can be used" in shown
    assert max(len(line) for line in shown.splitlines() if "train.csv" not in line) <= 80


def test_every_bad_row_is_listed_with_its_line(data, tmp_path, capsys):
    data["train_files"] = str(tmp_path / "bad.csv")
    data["code_book"] = {"path": str(tmp_path / "book.csv")}
    assert check(data) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "5 bad rows" in shown
    for kind in ("lost zeros 1", "text 1", "language 1", "code 1", "columns 1"):
        assert kind in shown
    for line in (5, 6, 7, 8, 9):
        assert f"bad.csv:{line}:" in shown.replace(" ", "")
    assert "1 of its codes occur in no row" in shown


def test_one_text_with_different_codes_is_a_warning(data, tmp_path, capsys):
    (tmp_path / "train.csv").write_text(HEADER + SOUND + "smith,en,83120\n")
    assert check(data) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 texts have different codes" in shown
    assert 'such as "smith"' in shown


def test_overlap_and_tables_to_code_are_counted(data, tmp_path, capsys):
    test = tmp_path / "test.csv"
    test.write_text(HEADER + SOUND)
    to_code = tmp_path / "mine.csv"
    to_code.write_text("text,language\nsmith,en\n,en\n")
    assert check({**data, "test_files": str(test), "predict_files": str(to_code)}) == 0
    shown = capsys.readouterr().out
    assert "2 different test rows are also in train" in shown
    assert "1 different predict rows are also in test" in shown
    assert '1 row has no text in the column "text": such a row' in " ".join(shown.split())


def test_the_command_takes_a_runs_config_and_options(data, tmp_path, capsys):
    config = {
        "seed_everything": 1,
        "model": {"class_path": ANY_MODEL.partition("=")[2]},
        "data": data,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "trainer": {"max_epochs": 2}}))
    argv = ["--config", str(tmp_path / "run.yaml")]
    assert run_command("check", argv) == 0
    assert run_command("check", [*argv, f"--data.train_files={tmp_path / 'bad.csv'}"]) == 1
    assert run_command("check", [*argv, "--data.text.max_length=9"]) == 0
    assert "longest 6; 0 longer than 9" in capsys.readouterr().out


def test_data_without_an_audit_or_without_a_class_are_refused():
    with pytest.raises(ValueError, match="BoringDataModule has none; give a config of one of U"):
        check({"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"})


def test_text_and_instructions_are_audited_by_the_same_command(tmp_path, capsys):
    text, rows = tmp_path / "mine.txt", tmp_path / "mine.jsonl"
    text.write_text("A hen sat on a mat. " * 20)
    rows.write_text('{"prompt": "Hen?", "completion": " Yes."}\n{"prompt": "x"}\n')
    options = ["--data.tokenizer.kind=bpe", "--data.tokenizer.vocab_size=262"]
    argv = [ANY_MODEL, "--data.class_path=datamodules.TextDataModule", *options]
    argv.append(f"--data.train_files={text}")
    assert run_command("check", [*argv, "--data.split.by=tail"]) == 0
    shown = capsys.readouterr().out
    assert "262 tokens" in shown  # both options of the group take effect
    assert "validation" in shown
    argv = [ANY_MODEL, "--data.class_path=datamodules.InstructionDataModule"]
    argv.append(f"--data.train_files={rows}")
    assert run_command("check", argv) == 1
    shown = capsys.readouterr().out
    assert "1 bad rows (keys 1)" in shown
    assert f"{rows}:2:" in shown  # whole, however long it is
    assert max(len(line) for line in shown.splitlines() if str(rows) not in line) <= 80


def test_a_pretrained_model_brings_the_tokenizer_that_counts(tmp_path, capsys):
    from datamodules.tokenizers.text import bpe_tokenizer

    folder = tmp_path / "model"
    saved_tokenizer(bpe_tokenizer(["A hen sat on a mat. "], 261), folder)
    (tmp_path / "mine.txt").write_text("A hen sat on a mat. " * 20)
    argv = ["--config", "causal_lm/finetune.yaml", f"--data.train_files={tmp_path / 'mine.txt'}"]
    argv += ["--data.split.by=tail", f"--model.pretrained={folder}"]
    assert run_command("check", argv) == 0
    assert "261 tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match="trained with its own; leave data.tokenizer out"):
        run_command("check", [*argv, "--data.tokenizer.kind=bytes"])
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Hen?", "completion": " Mat."}\n' * 40)
    argv = ["--config", "causal_lm/instruct.yaml", f"--model.pretrained={folder}"]
    argv.append(f"--data.train_files={tmp_path / 'mine.jsonl'}")
    # A chat template after it joins the model's tokenizer; the config's one is dropped.
    alone = ["--data.tokenizer=null", "--data.tokenizer.chat_template=plain"]
    assert run_command("check", [*argv, *alone]) == 0
    assert "261 tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match="data.tokenizer is kind bpe.*trained with its own"):
        run_command("check", [*argv, alone[1]])
