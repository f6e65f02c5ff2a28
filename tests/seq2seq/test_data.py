"""Pairs are read completely or refused with the reason; predictions stand beside their rows."""

import json

import numpy as np
import pytest

from datamodules import Seq2SeqDataModule
from datamodules.files.splitting import TextSplit
from datamodules.text.pairs import PairColumns
from datamodules.tokenizers.text import TokenizerOptions
from tests.text_corpora import rows_file, table

PAIRS = [("smd", "smith"), ("bkr", "baker"), ("wvr of wool", "wool weaver"), ("smd", "smith")]


def data_of(files, **options):
    if "split" not in options:
        options.setdefault("validation_files", files)
    return Seq2SeqDataModule(train_files=files, **{"global_batch_size": 2, **options})


def examples(data, stage="fit"):
    data.prepare_data()
    data.setup(stage)
    dataset = data.datasets["train"]
    return dataset, [dataset.example(i, 0) for i in range(len(dataset.lengths))]


def test_a_sample_is_both_texts_with_their_ends(tmp_path):
    data = data_of(table(tmp_path / "pairs.csv", PAIRS))
    dataset, found = examples(data)
    assert [tuple(map(data.tokenizer.decode, pair)) for pair in found] == PAIRS
    end = data.tokenizer.end_id
    assert all(source[-1] == target[-1] == end for source, target in found)
    assert dataset.lengths.tolist() == [len(s) + len(t) for s, t in found]
    assert dataset.target_counts["tokens"].tolist() == [len(target) for _, target in found]
    batch = dataset.batch(np.array([0, 2]), 0)
    assert batch["input_ids"].shape == (2, 12)
    assert batch["attention_mask"].sum(1).tolist() == [4, 12]
    assert batch["labels"][0].tolist() == [*found[0][1], *[-100] * 6]
    assert "targets" not in batch


def test_columns_have_the_names_that_are_said(tmp_path):
    rows = [{"old": old, "new": new} for old, new in PAIRS]
    path = rows_file(tmp_path / "pairs.jsonl", rows)
    data = data_of(path, columns=PairColumns("old", "new"))
    _, found = examples(data)
    assert [tuple(map(data.tokenizer.decode, pair)) for pair in found] == PAIRS


def test_limits_cut_sources_and_leave_out_targets_and_say_so(tmp_path, caplog):
    data = data_of(table(tmp_path / "pairs.csv", PAIRS), max_source_tokens=6, max_target_tokens=8)
    _, found = examples(data)
    assert [data.tokenizer.decode(source) for source, _ in found] == ["smd", "bkr", "smd"]
    assert "1 train targets exceed data.max_target_tokens 8: the pairs are left out" in caplog.text
    data = data_of(table(tmp_path / "more.csv", PAIRS[2:3]), max_source_tokens=6)
    _, [(source, _)] = examples(data)
    assert data.tokenizer.decode(source) == "wvr o"
    assert source[-1] == data.tokenizer.end_id
    assert "1 train sources exceed data.max_source_tokens 6: their ends are cut" in caplog.text


def test_rows_of_one_source_are_in_one_part(tmp_path):
    rows = [(f"text {n % 20}", f"target {n}") for n in range(100)]
    data = data_of(table(tmp_path / "pairs.csv", rows), split=TextSplit(0.3, 0.2))
    data.prepare_data()
    data.setup("fit")
    of_part = []
    for part in range(3):
        dataset = data.part_dataset(part)
        ids = (dataset.example(i, 0)[0] for i in range(len(dataset.lengths)))
        of_part.append({data.tokenizer.decode(one) for one in ids})
    assert [len(texts) for texts in of_part] == [10, 6, 4]
    assert len(set.union(*of_part)) == 20
    batch = data.datasets["validation"].batch(np.array([0, 1]), 0)
    assert all(text.startswith("target ") for text in batch["targets"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("smd", " "), r'pairs.csv:4: "": "target" holds no text; fill it in'),
        (("", "smith"), r'pairs.csv:4: "": "source" holds no text'),
        (("smd",), r"pairs.csv:4: .*the row has 1 values, the header 2"),
    ],
)
def test_bad_rows_are_named_or_listed(own_folder, row, message):
    path = table(own_folder / "pairs.csv", [*PAIRS[:2], row, PAIRS[2]])
    sound = table(own_folder / "sound.csv", PAIRS)
    with pytest.raises(ValueError, match=message):
        data_of(path, validation_files=sound).prepare_data()
    data = data_of(path, validation_files=sound, on_bad_rows="reject")
    assert len(examples(data)[1]) == 3
    assert (own_folder / "rejected.csv").read_text().count("\n") == 2
    other = table(own_folder / "other.csv", [row, *PAIRS])  # of a run in the same folder
    for _ in range(2):
        data_of(other, validation_files=sound, on_bad_rows="reject").prepare_data()
    assert (own_folder / "rejected.csv").read_text().count("\n") == 3


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    path = table(tmp_path / "pairs.csv", PAIRS, ("source", "normal"))
    with pytest.raises(ValueError, match='has no column "target".*it has: source, normal'):
        data_of(path).prepare_data()


def test_the_rows_of_a_file_are_not_lost_in_jsonl(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"source": "smd", "target": 7}) + '\n{"source": ["a"]}\n')
    with pytest.raises(ValueError, match=r'pairs.jsonl:2: .*"source" must be a text'):
        data_of(str(path)).prepare_data()


def test_byt5_has_its_own_bytes(tmp_path):
    from transformers import ByT5Tokenizer

    theirs = ByT5Tokenizer()
    theirs.save_pretrained(tmp_path / "byt5")
    path = table(tmp_path / "pairs.csv", [("smd på ö", "smith</s> 🙂"), *PAIRS])
    folder = TokenizerOptions("folder", path=str(tmp_path / "byt5"))
    data = data_of(path, tokenizer=folder)
    _, [(source, target), *_] = examples(data)
    assert source.tolist() == theirs("smd på ö").input_ids
    assert target.tolist() == theirs("smith</s> 🙂").input_ids
    assert data.tokenizer.decode(source) == "smd på ö"
    assert data.tokenizer.vocab_size == len(theirs) == 384
    for number in (0, 1, 2, 259, 383):
        assert data.tokenizer.backend.id_to_token(number) == theirs.convert_ids_to_tokens(number)
