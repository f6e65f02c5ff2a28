"""Rows of shards: each position once in every layout, held-out documents, valid and wrong files."""

import json
from collections import Counter

import numpy as np
import pytest

from datamodules import ShardDataModule
from datamodules.core.store import content_digest
from datamodules.files.splitting import TextSplit
from datamodules.shards import index
from datamodules.shards.datamodule import SourceOptions
from datamodules.text.packing import best_fit
from datamodules.tokenizers.text import byte_tokenizer
from tests.shards.small import write_folder, write_shard

NONE = TextSplit(0.0)


def module(folder, stage="fit", split=NONE, **options):
    if split is NONE:
        options.setdefault("validation_files", folder)
    data = ShardDataModule(folder, split=split, context_length=16, global_batch_size=5, **options)
    data.prepare_data()
    data.setup(stage)
    return data


def pairs_of(dataset):
    """Count the (token, next token) pairs in all rows."""
    found = Counter()
    for sample in range(len(dataset.lengths)):
        pieces = dataset.example(sample, 0)
        sizes = [len(piece.labels) for piece in pieces]
        assert sum(sizes) == dataset.lengths[sample] <= 16
        assert dataset.document_lengths(np.array([sample])).tolist() == sizes
        found.update(p for piece in pieces for p in zip(*map(np.ndarray.tolist, piece)))  # noqa: B905
    return found


@pytest.fixture
def documents():
    rng = np.random.default_rng(1)
    sizes = [0, 1, 2, 16, 17, 18, 40, *rng.integers(0, 30, 60)]
    return [rng.integers(0, 250, size) for size in sizes]


@pytest.mark.parametrize("layout", ["packed", "documents"])
@pytest.mark.parametrize("pieces_at_once", [7, 1 << 20])
def test_rows_hold_each_position_of_the_documents_once_whatever_the_seams(
    tmp_path, monkeypatch, own_cache, documents, layout, pieces_at_once
):
    for name, value in {"PIECES_AT_ONCE": pieces_at_once, "DOCUMENTS_AT_ONCE": 9}.items():
        monkeypatch.setattr(index, name, value)
    folder = write_folder(tmp_path / "shards", 0)
    write_shard(tmp_path / "shards" / "a.ds", documents)
    write_shard(tmp_path / "shards" / "b" / "b.ds", documents[::2], "<u4")
    write_shard(tmp_path / "shards" / "c.ds", [])
    dataset = module(folder, layout=layout).datasets["train"]
    expected = Counter()
    for document in [*documents, *documents[::2]]:
        expected.update(zip(document[:-1].tolist(), document[1:].tolist(), strict=True))
    assert pairs_of(dataset) == expected
    assert dataset.lengths.sum() == sum(expected.values()) == np.asarray(dataset.lengths).sum()
    if layout == "packed" and pieces_at_once > 7:  # number of rows of each shard under `best_fit`
        sizes = [min(16, n - at) for n in [len(d) - 1 for d in documents] for at in range(0, n, 16)]
        assert len(best_fit(np.array(sizes), 16)[1]) - 1 == dataset.lengths.counts[0, 0]


def test_equal_documents_are_held_out_together_and_no_text_is_in_two_parts(tmp_path):
    documents = [np.arange(number, number + 5 + number % 7) for number in range(200)]
    write_folder(tmp_path, 0)
    for name in ("a", "b"):
        write_shard(tmp_path / f"{name}.ds", documents)
    data = module(str(tmp_path), split=TextSplit(0.2, 0.1), layout="documents")
    data.setup("test")
    starts = {}
    for part, dataset in data.datasets.items():
        pieces = [dataset.example(i, 0)[0] for i in range(len(dataset.lengths))]
        counts = Counter(int(piece.input_ids[0]) for piece in pieces)
        assert set(counts.values()) == {2}
        starts[part] = set(counts)
    assert sorted(one for part in starts.values() for one in part) == list(range(200))
    assert 20 < len(starts["validation"]) < 60
    assert 8 < len(starts["test"]) < 40


def test_indices_are_made_once_by_several_processes_and_resumed_by_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.shards.store.SERIAL_DOCUMENTS", 0)
    monkeypatch.setattr("datamodules.shards.store.usable_cpus", lambda: 2)
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "shards", 4)
    data = module(folder)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/shards").rglob("*.npy")}
    assert len(made) == 4 * 5 + 1
    again = module(folder)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert again.request("train") == data.request("train")
    write_shard(tmp_path / "shards" / "more.ds", [np.arange(9)])
    assert module(folder).request("train").num_samples == data.request("train").num_samples + 1
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/shards").rglob("*.npy")}
    assert len(kept) == len(made) + 5 + 1
    assert made.items() <= kept.items()


def test_a_manifest_gives_digests_and_its_sizes_are_checked(tmp_path):
    folder = write_folder(tmp_path)
    fingerprint = module(folder).datasets["train"].fingerprint
    entries = [
        {
            "name": path.relative_to(tmp_path).as_posix(),
            "bytes": path.stat().st_size,
            "digest": content_digest(path),
        }
        for path in tmp_path.rglob("*.ds")
    ]
    (tmp_path / "manifest.json").write_text(json.dumps({"shards": entries}))
    assert module(folder).datasets["train"].fingerprint == fingerprint
    entries[0]["bytes"] += 2
    (tmp_path / "manifest.json").write_text(json.dumps({"shards": entries}))
    with pytest.raises(ValueError, match=r"has [\d,]+ bytes, and .*manifest.json says [\d,]+: cop"):
        module(folder)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("tokenizer", {}, "holds no tokenizer.json of .*; name the tokenizer of the shards"),
        ("other", {}, "are different tokenizers; name shards of one tokenizer"),
        ("ends", {}, "its index ends at token 9,999: tokens have 2 or 4 bytes"),
        ("cut", {}, r"its index ends at token [\d,]+: tokens have 2 or 4 bytes"),
        ("order", {}, "is damaged: its ends do not ascend"),
        ("token", {}, "hold token 5000, and their tokenizer has 257: name"),
        ("", {"shuffle_shards": 0}, "data.shuffle_shards must be at least 1, got 0"),
    ],
)
def test_wrong_shards_and_options_are_named(tmp_path, change, options, message):
    folder = write_folder(tmp_path, num_shards=1)
    path = tmp_path / "part0" / "00000.ds"
    ends = np.fromfile(f"{path}.index", "<u8")
    if change == "tokenizer":
        (tmp_path / "tokenizer.json").unlink()
    elif change == "other":
        other = byte_tokenizer().to_dict() | {"end_id": 0}
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(other))
        options = {"validation_files": str(tmp_path / "b")}
    elif change in ("ends", "order"):
        ends[-1 if change == "ends" else 3] = 9999
        ends.tofile(f"{path}.index")
    elif change == "cut":
        ends.view(np.uint8)[:-3].tofile(f"{path}.index")
    elif change == "token":
        write_shard(path, [np.array([1, 5000, 2])])
    with pytest.raises(ValueError, match=message):
        module(folder, **options).datasets["train"].batch(np.zeros(1, int), 0)


def test_missing_folders_and_empty_sources_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder nowhere; name one of shards"):
        module("nowhere")
    with pytest.raises(ValueError, match="in one of data.train_files, data.sources"):
        ShardDataModule()
    write_folder(tmp_path, 0)
    with pytest.raises(FileNotFoundError, match="data.train_files: the folder .* must end in .ds"):
        module(str(tmp_path))
    (tmp_path / "manifest.json").write_text('{"shards": []}')
    with pytest.raises(FileNotFoundError, match=r"manifest.json lists no shard; prepare it again"):
        module(str(tmp_path))
    (tmp_path / "manifest.json").unlink()
    sources = {"web": SourceOptions(write_folder(tmp_path), weight=0.001)}
    with pytest.raises(ValueError, match=r"takes none; raise its weight or its tokens, or leave"):
        module(None, sources=sources, validation_files=str(tmp_path)).request("train")
