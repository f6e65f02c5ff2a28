"""`unisono check`: all faults of the data at once, and a reliable exit status."""

from collections.abc import Callable
from pathlib import Path

import pytest

from datamodules.tokenizers.text import bpe_tokenizer
from tests.text_corpora import saved_tokenizer

ANY_MODEL = "--model=lightning.pytorch.demos.boring_classes.BoringModel"
HEADER = "text,language,code_1\n"
SOUND = "smith,en,83110\ntailor,en,79100\nSmith,en,83110\n"
BAD = "smith,en,2110\n,en,83110\ntailor,xy,79100\nfarmer,en,6111x\nfarmer,en\n"
CONFIG = f"""
seed_everything: 1
model: {{class_path: {ANY_MODEL.partition("=")[2]}}}
data:
  class_path: datamodules.OccupationDataModule
  init_args: {{train_files: train.csv, columns: {{language: language}}, text: {{max_length: 5}}}}
trainer: {{max_epochs: 2}}
"""
TEXT = "A hen sat on a mat. "
Check = Callable[..., str]


@pytest.fixture
def check(own_folder: Path, done: Callable[..., str]) -> Check:
    """Checks data with the options of a run; returns the output in one line."""
    Path("mine.yaml").write_text(CONFIG)
    Path("train.csv").write_text(HEADER + SOUND)
    Path("mine.txt").write_text(TEXT * 20)

    def run(*options: str, status: int = 0) -> str:
        lines = done("check", *options, status=status).splitlines()
        assert max(map(len, lines)) <= 80, lines
        return " ".join(" ".join(lines).split())

    return run


def test_sound_data_pass_with_the_options_of_their_run(check):
    shown = check("--config=mine.yaml")
    for words in (
        "median 5 characters, 95 % up to 6, longest 6; 1 longer than 5",
        "languages 1 distinct, 0 of them once: en 3",
        "codes 2 distinct, 1 of them once: 83110 2, 79100 1",
        "duplicates train 1",  # smith
        "every row can be used",
    ):
        assert words in shown
    assert "0 longer than 9" in check("--config=mine.yaml", "--data.text.max_length=9")


def test_every_bad_row_is_listed_with_its_line(check):
    Path("bad.csv").write_text(HEADER + SOUND + BAD)
    Path("book.csv").write_text("code,description\n83110,Smith\n79100,Tailor\n61110,Farmer")
    options = ("--data.train_files=bad.csv", "--data.code_book.path=book.csv")
    shown = check("--config=mine.yaml", *options, status=1)
    assert "5 bad rows" in shown
    for kind in ("lost zeros 1", "text 1", "language 1", "code 1", "columns 1"):
        assert kind in shown
    for line in (5, 6, 7, 8, 9):
        assert f"bad.csv:{line}:" in shown
    assert "1 of its codes occur in no row" in shown


def test_one_text_with_different_codes_is_a_warning(check):
    Path("train.csv").write_text(HEADER + SOUND + "smith,en,83120\n")
    words = '1 texts have different codes in different rows, such as "smith"'
    assert words in check("--config=mine.yaml")


def test_overlap_and_tables_to_code_are_counted(check):
    Path("test.csv").write_text(HEADER + SOUND)
    Path("mine.csv").write_text("text,language\nsmith,en\n,en\n")
    options = ("--data.test_files=test.csv", "--data.predict_files=mine.csv")
    shown = check("--config=mine.yaml", *options)
    assert "2 different test rows are also in train" in shown
    assert "1 different predict rows are also in test" in shown
    assert '1 row has no text in the column "text": such a row' in shown


def test_data_without_an_audit_are_refused(check):
    boring = "--data=lightning.pytorch.demos.boring_classes.BoringDataModule"
    assert "BoringDataModule has none; give a config of" in check(ANY_MODEL, boring, status=1)


def test_text_and_instructions_are_audited_by_the_same_command(check):
    data = (ANY_MODEL, "--data.class_path=datamodules.TextDataModule", "--data.split.by=tail")
    tokens = ("--data.tokenizer.kind=bpe", "--data.tokenizer.vocab_size=262")
    shown = check(*data, *tokens, "--data.train_files=mine.txt")
    assert "262 tokens" in shown  # both options of the group take effect
    assert "validation" in shown
    Path("mine.jsonl").write_text('{"prompt": "Hen?", "completion": " Yes."}\n{"prompt": "x"}\n')
    data = (ANY_MODEL, "--data.class_path=datamodules.InstructionDataModule")
    shown = check(*data, "--data.train_files=mine.jsonl", status=1)
    assert "1 bad rows (keys 1)" in shown
    assert "mine.jsonl:2:" in shown


def test_a_pretrained_model_brings_the_tokenizer_that_counts(check):
    saved_tokenizer(bpe_tokenizer([TEXT], 261), Path("model"))
    data = ("--data.train_files=mine.txt", "--data.split.by=tail", "--model.pretrained=model")
    tuned = ("--config=causal_lm/finetune.yaml", *data)
    assert "261 tokens" in check(*tuned)
    refused = check(*tuned, "--data.tokenizer.kind=bytes", status=1)
    assert "trained with its own; leave data.tokenizer out" in refused
    Path("mine.jsonl").write_text('{"prompt": "Hen?", "completion": " Mat."}\n' * 40)
    chats = ("--config=causal_lm/instruct.yaml", "--model.pretrained=model")
    chats += ("--data.train_files=mine.jsonl", "--data.tokenizer.chat_template=plain")
    # A chat template after it joins the model's tokenizer; the config's one is dropped.
    assert "data.tokenizer is kind bpe" in check(*chats, status=1)
    assert "261 tokens" in check(*chats[:-1], "--data.tokenizer=null", chats[-1])
