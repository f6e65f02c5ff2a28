"""Users' files, folders and scripts: none of them is mistaken for something else."""

from pathlib import Path

import numpy as np
import pytest

from datamodules import Columns, OccupationDataModule, SplitOptions
from datamodules.files.tables import Table, cell_text
from datamodules.occupations.datamodule import NearestTexts, write_coded_table
from datamodules.text.pairs import text_ids
from datamodules.tokenizers.codes import (
    CodeBook,
    CodeSystem,
    TextOptions,
    build_code_book,
    code_warnings,
)
from lit_models import LitSeq2Seq
from lit_models.cli import ParsedCLI
from lit_models.config_files import find_config
from lit_models.errors import one_screen
from lit_models.training.metrics import evaluating
from tests.occupation_coder.test_module import small_coder
from tests.occupation_tables import index_of
from tests.seq2seq.test_module import ADAMW, SMALL, data_of
from tests.text_corpora import table, text_file
from tests.toy import csv_rows, toy_trainer

BOOK = CodeBook(CodeSystem(), ["07370", "51020"], ["Midwife", "Innkeeper"])
RECIPE = {
    **TextOptions(max_length=10).to_recipe(),
    "languages": ["unk"],
    "default_language": "unk",
    "code_book": BOOK.to_dict(),
}


def jobs(path: Path, codes: list[tuple[str, str]]) -> OccupationDataModule:
    rows = [(f"job {number}", *pair) for number, pair in enumerate(codes)]
    table(path, rows, ("text", "code_1", "code_2"))
    return OccupationDataModule(str(path), code_system="from_data", global_batch_size=2)


def test_codes_that_a_column_with_gaps_made_decimal_are_no_codes_of_their_own(tmp_path):
    data = jobs(tmp_path / "jobs.csv", [("51020", ""), ("83110", "51020.0"), ("61110", "-1.0")])
    for command in (data.audit, data.prepare_data):
        with pytest.raises(ValueError, match=r'2 codes of .* decimal numbers \(such as "-1.0"\)'):
            command()
    points = ["1", "1.0", "1.1"]  # codes of this system contain a point
    assert build_code_book(CodeSystem(), None, points).codes == points


def test_codes_of_which_a_part_lost_its_zeros_are_named_by_training_too(tmp_path, caplog):
    pairs = [("07370", ""), ("7370", "51020"), ("06105", ""), ("83110", "")] * 10
    data = jobs(tmp_path / "jobs.csv", pairs)
    warning = "1 codes may have lost a leading zero: 7370; read and save code columns as text."
    assert warning in data.audit().warnings
    data.prepare_data()
    data.setup("fit")
    assert warning in caplog.text
    assert code_warnings(["1", "2", "1, 2", "1,3", "a b", "?"]) == [
        "1 codes have no letter or digit: ?; empty such cells if they mean that there is no code.",
        '1 codes look like several in one, such as "1, 2"; cut such cells with '
        "--data.columns.code_separator=','.",
    ]
    with pytest.raises(ValueError, match='in the code book, code "7370" seems to have lost its'):
        CodeBook(CodeSystem(), ["7370", "51020"], ["", ""]).index("07370")


def test_tables_of_equal_columns_in_another_order_become_one(tmp_path):
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    table(files[0], [("smith", "1880")], ("text", "year"))
    table(files[1], [("1900", "midwife")], ("year", "text"))
    index = index_of(files, RECIPE)
    ids, sure = np.array([[1], [0]]), np.ones(2)
    results = {"code_ids": ids, "code_confidence": ids * 1.0, "set_confidence": sure}
    write_coded_table(index, BOOK, results | {"needs_review": sure == 0}, tmp_path / "out.csv")
    rows = [(row["text"], row["year"], row["code_1"]) for row in csv_rows(tmp_path / "out.csv")]
    assert rows == [("smith", "1880", "51020"), ("midwife", "1900", "07370")]


def test_a_column_of_a_script_is_coded_as_a_table_is(tmp_path):
    class Series(list):
        """A filtered column of pandas, whose index does not count from 0."""

        def __getitem__(self, place):
            raise KeyError(place)

    data = jobs(tmp_path / "jobs.csv", [("07370", ""), ("51020", "")] * 10)
    coder = small_coder()
    toy_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(coder, data)
    empty, job = coder.code(Series([" ", "job 1"]))
    assert (empty.codes, empty.set_confidence, len(job.codes) > 0) == ([], 0.0, True)
    with pytest.raises(ValueError, match=r"texts\[1\] is nan, no text; write"):
        coder.code(["smith", float("nan")])
    data.options.text, data.store = TextOptions(fold_accents=True), None  # read again
    with pytest.raises(ValueError, match="was made for another normalisation than the data has"):
        toy_trainer(tmp_path / "again", max_steps=1, limit_val_batches=0).fit(coder, data)


def test_a_module_evaluates_until_the_last_thread_has_done_so():
    module = small_coder().train()
    first, second = evaluating(module), evaluating(module)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not module.training
    second.__exit__(None, None, None)
    assert module.training


def test_a_translation_is_as_long_as_those_of_training_and_blanks_around_count_nothing(tmp_path):
    path = table(tmp_path / "pairs.csv", [(f"word {n}", "a" * 90) for n in range(40)])
    data, module = data_of(path, max_target_tokens=128), LitSeq2Seq(ADAMW, network=SMALL)
    toy_trainer(tmp_path, max_epochs=4, limit_val_batches=0).fit(module, data)
    assert module.translate(["word 3"]) == ["a" * 127]  # without its end token
    plain, blanks = text_ids(module.tokenizer, ["word 3", " word 3\n"])
    assert plain.tolist() == blanks.tolist()
    assert len(module.translate(["word 3"], max_new_tokens=8)[0]) == 8
    with pytest.raises(ValueError, match="a text is empty"):
        module.translate(["word 3", " "])


def test_an_evaluation_by_a_runs_own_config_is_of_that_run_wherever_it_lies(done, toy_config):
    for _ in range(2):
        done("fit", "--config=toy.yaml")
    for folder in ("runs/toy", "elsewhere"):
        output = done("test", f"--config={folder}/config.yaml", "--ckpt_path=auto")
        assert f"--ckpt_path auto uses {folder}/checkpoints/" in output
        if folder == "runs/toy":
            Path(folder).rename("elsewhere")
    output = done("test", "--config=toy.yaml", "--ckpt_path=auto")
    assert "--ckpt_path auto uses runs/toy-2/checkpoints/" in output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a full device")
def test_a_cache_on_a_full_disk_is_reported_as_such():
    with pytest.raises(OSError, match="requested and") as caught:
        np.zeros(100_000).tofile("/dev/full")
    assert "the disk is full; free some space" in (one_screen(caught.value) or "")


def test_a_column_of_the_training_is_left_out_of_an_evaluation_as_the_error_says(tmp_path):
    argv = ["predict", f"--config={find_config('occupation_coder/table.yaml')}"]
    argv += ["--data.columns.language=language", "--data.columns.text=job"]
    assert ParsedCLI(argv).options.data.init_args.columns.language == "language"
    columns = ParsedCLI([*argv, "--data.columns.language=null"]).options.data.init_args.columns
    assert (columns.text, columns.language) == ("job", None)
    path = Path(table(tmp_path / "jobs.csv", [("smith", "1880")], ("job", "year")))
    with pytest.raises(ValueError, match="with --data.columns.language, or none with =null"):
        Columns("job", "language").named(Table(path), "text", "language")


def test_pairs_of_other_columns_and_texts_of_other_characters_are_named(tmp_path, unisono):
    path = text_file(tmp_path / "a.jsonl", '{"old": "smd", "new": "smed"}\n' * 9)
    check = ["check", "--config=seq2seq/demo.yaml", f"--data.train_files={path}"]
    status, output = unisono(*check)
    assert (status, '"source" holds no text; fill it in' in output) == (1, True), output
    text_file(tmp_path / "a.jsonl", '{"source": "mds", "target": "smed"}\n' * 9)
    path = text_file(tmp_path / "b.jsonl", '{"source": "smd"}\n{"source": ""}\n')
    status, output = unisono(*check, f"--data.predict_files={path}")
    assert (status, "0 different predict pairs" in output, "b.jsonl:2:" in output) == (1, 1, 1)
    text_file(tmp_path / "b.jsonl", '{"source": "smed på"}\n')
    status, output = unisono(*check, f"--data.predict_files={path}")
    assert (status, '"smed på": the tokenizer does not know the character' in output) == (1, True)


def test_a_table_without_rows_for_its_test_is_refused_before_the_training(tmp_path, unisono):
    path = text_file(tmp_path / "a.csv", "text,code_1\n" + "smith,1\nbaker,2\ntailor,3\n" * 9)
    options = ["--config=occupation_coder/table.yaml", f"--data.train_files={path}"]
    status, output = unisono("fit", *options, "--data.split.test_share=0")
    assert (status, "no row is for test" in output, "rank 0" in output) == (1, True, False), output
    assert not Path("runs/occupation_coder-table/ledger.jsonl").exists()


def test_texts_that_are_cut_are_counted_in_training_and_prediction(tmp_path, caplog):
    path = table(tmp_path / "long.csv", [("x" * 200, "1"), ("a", "2")], ("text", "code_1"))
    data = OccupationDataModule(path, path, code_system="from_data", global_batch_size=2)
    data.prepare_data()
    data.setup("fit")
    assert "1 train texts exceed the 128 characters of data.text.max_length" in caplog.text
    index = index_of([Path(path)], RECIPE)
    data.index, data.recipe = index, RECIPE
    data.build("predict")
    assert "1 predict texts exceed the 10 characters of" in caplog.text
    assert cell_text("at 12 00:00:00") == "at 12 00:00:00"


def test_the_nearest_training_rows_are_found_where_no_row_validates(tmp_path):
    data = jobs(tmp_path / "jobs.csv", [("51020", ""), ("07370", "51020"), ("61110", "")])
    data.options.split = SplitOptions(0.0, 0.0)
    assert NearestTexts(data).find("Job 1", 1)[0]["codes"] == "07370 51020"
