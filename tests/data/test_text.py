"""Text files become batches; wrong inputs are named."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules import TextDataModule, TextSplit, TokenizerOptions
from datamodules.core.store import cache_root
from datamodules.files.splitting import TEST, TRAIN, VALIDATION
from datamodules.text.texts import BlockDataset
from tests.text_corpora import TEXTS, text_file, text_module, text_rows, texts_of

CHARACTERS = TokenizerOptions(kind="characters")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path):
    return text_rows(tmp_path)


def test_txt_jsonl_parquet_and_folders_give_the_same_tokens(tmp_path, corpus):
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        text_file(folder / ("deeper" if i < 10 else ".") / f"{i:02}.txt", text)
    pq.write_table(pa.table({"content": TEXTS}), tmp_path / "a.parquet")
    text_file(tmp_path / "blank.txt", "\n".join(TEXTS))
    modules = [
        text_module(corpus),
        text_module(str(tmp_path / "a.parquet"), text_column="content"),
        text_module([str(folder / "deeper"), str(folder / "*.txt")]),
        text_module(str(tmp_path / "blank.txt"), documents_by="blank_line"),
    ]
    found = []
    for module in modules:
        module.setup("fit")
        found.append(
            [[t.strip("\n") for t in texts_of(module.store, p)] for p in (TRAIN, VALIDATION)]
        )
    texts = [[t.replace("\n", "") for part in parts for t in part] for parts in found]
    assert all(sorted(t) == sorted(texts[0]) for t in texts)
    assert found[0] == found[1] == found[2]  # drawn by the text alone


@pytest.mark.parametrize("layout", ["packed", "blocks", "documents"])
def test_an_epoch_has_every_target_once(corpus, layout):
    data = text_module(corpus, layout=layout, tokenizer=CHARACTERS)
    data.prepare_data()
    data.setup("fit")
    stream = data.store.stream(TRAIN)
    counted = np.zeros(data.tokenizer.vocab_size, np.int64)
    for batch in data.train_dataloader():
        labels = batch["labels"][batch["labels"] >= 0]
        counted += np.bincount(labels, minlength=len(counted))
    # all but the first token, which begins the first document
    assert counted.tolist() == np.bincount(stream.tokens[1:], minlength=len(counted)).tolist()
    lengths = data.datasets["train"].lengths
    assert lengths.sum() > 0.4 * len(lengths) * data.context_length
    assert isinstance(data.datasets["validation"], BlockDataset) == (layout == "blocks")


def test_without_files_the_demo_text_is_divided_by_documents(monkeypatch):
    monkeypatch.undo()  # the cache of all tests has the demo, most likely
    data = TextDataModule(split=TextSplit(0.1, 0.05))
    data.setup("fit")
    counts = [data.store.part_facts(part).num_documents for part in (TRAIN, VALIDATION, TEST)]
    assert sum(counts) > 1500
    assert [round(count / sum(counts), 2) for count in counts] == [0.85, 0.1, 0.05]
    assert "document 1" in data.datasets["train"].describe(0, 0)


def test_validation_and_test_files_are_read_as_they_are(tmp_path, corpus):
    held = [str(text_file(tmp_path / f"{name}.txt", name)) for name in ("held", "tested")]
    data = text_module(corpus, validation_files=held[0], test_files=held[1])
    data.setup("fit")
    data.setup("test")
    counts = [data.store.part_facts(part).num_documents for part in (TRAIN, VALIDATION, TEST)]
    assert counts == [20, 1, 1]
    data = text_module(corpus, test_files=held[1], split=TextSplit(0.2, 0.2))
    data.setup("fit")
    counts = [data.store.part_facts(part).num_documents for part in (TRAIN, VALIDATION, TEST)]
    assert counts == [16, 4, 1]


def test_a_second_start_reads_nothing(corpus, monkeypatch):
    text_module(corpus, tokenizer=CHARACTERS).prepare_data()
    monkeypatch.setattr("datamodules.text.store.cuts_of", None)  # making it would now fail
    data = text_module(corpus, tokenizer=CHARACTERS)
    data.prepare_data()
    data.setup("fit")
    assert data.tokenizer.vocab_size > 20


def test_a_part_without_text_names_the_option(corpus):
    data = text_module(corpus)
    with pytest.raises(
        ValueError, match=r"no text is for test; name data.test_files, or raise data"
    ):
        data.setup("test")
    with pytest.raises(ValueError, match="prompts"):
        data.setup("predict")


def test_one_document_for_two_parts_names_the_ways_to_divide_it(tmp_path):
    one = str(text_file(tmp_path / "one.txt", "All of it in one document."))
    data = text_module(one)
    message = "hold 1 documents, too few .*set data.split.by to tail, or data.documents_by to"
    with pytest.raises(ValueError, match=message):
        data.setup("validate")
    held = str(text_file(tmp_path / "held.txt", "More."))
    data = text_module(one, validation_files=held)
    with pytest.raises(ValueError, match=r"no text is for test; name data.test_files\.$"):
        data.setup("test")


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="context_length must be at least 1, got 0"):
        TextDataModule(context_length=0)
    with pytest.raises(ValueError, match='layout must be one of blocks, packed, .*got "rows"'):
        TextDataModule(layout="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="validation_files are given without train_files"):
        TextDataModule(validation_files="a.txt")


def test_tokenising_is_said_in_one_line(corpus, caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.datamodules"):
        text_module(corpus).prepare_data()
    (said,) = caplog.messages
    assert said.startswith("Tokenised 20 documents, ")
    assert len(list((cache_root() / "tokens").iterdir())) == 1
