"""Activations as parquet: written by a prediction, read and explained, never of another place."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from lightning.pytorch import seed_everything

from datamodules import ActivationDataModule
from datamodules.activations import interchange
from datamodules.activations.interchange import COLUMN, SUFFIX, VectorFile
from lit_models.consistency_lens.interchange import explain_vectors
from tests.activation_dumps import dumped, stories, subject
from tests.consistency_lens.small_lens import data_of, module_of, trainer
from tests.toy import json_rows


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a store, a module, and the file of its prediction in parts of five rows."""
    folder = tmp_path_factory.mktemp("interchange")
    store = dumped(folder / "store", stories(folder, 60), subject())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datamodules.activations.interchange.ROWS", 5)
        for name in ("said.jsonl", "said.parquet"):
            seed_everything(1, verbose=False)
            data = ActivationDataModule(str(store.folder), predict_output=str(folder / name))
            module = module_of(subject=subject())
            trainer(folder / name[5:]).predict(module, data, return_predictions=False)
    return store, module, folder / "said.parquet"


def test_a_prediction_writes_the_activations_beside_its_lines(written):
    store, _, path = written
    lines = json_rows(path.with_suffix(".jsonl"))
    table, true = pq.read_table(path), store.array(2, "activations")
    assert table.schema.field(COLUMN).type == pa.list_(pa.float32())
    assert (np.array(table[COLUMN].to_pylist(), np.float32) == true).all()
    for name in ("document", "position", "explanation", "error", "token"):
        assert table[name].to_pylist() == [line[name] for line in lines]
    meta = yaml.safe_load(Path(f"{path}{SUFFIX}").read_text())
    assert meta["kind"] == "nla_dataset"
    assert meta["extraction"] == {"d_model": 16, "layer_index": 1}
    assert meta["unisono"]["subject"] == store.subject.digest
    assert pq.ParquetFile(path).num_row_groups == -(-len(true) // 5)


def test_a_file_of_activations_is_explained_piece_by_piece(written, tmp_path, monkeypatch):
    store, module, path = written
    monkeypatch.setattr(interchange, "ROWS", 7)
    explain_vectors(module, path, tmp_path / "said.parquet")
    table = pq.read_table(tmp_path / "said.parquet")
    true = torch.from_numpy(np.array(store.array(2, "activations")))
    assert table["explanation"].to_pylist() == module.explain(true)
    assert table["token"].to_pylist() == pq.read_table(path)["token"].to_pylist()
    assert pq.ParquetFile(tmp_path / "said.parquet").num_row_groups == -(-len(true) // 7)
    lens = module.lens
    with torch.no_grad():
        rebuilt = lens.reconstructor(lens.verbalizer.explain(true).embeddings)
    cosines = torch.cosine_similarity(rebuilt, true, dim=1).tolist()
    assert table["cosine"].to_pylist() == pytest.approx(cosines, abs=1e-4)
    explain_vectors(module, path, tmp_path / "best.parquet", best_of=6)
    tables = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("best", "said"))
    better, plain = (table["fve"].to_numpy() for table in tables)
    assert (better >= plain - 1e-6).all()
    assert (better > plain + 1e-3).any()
    assert VectorFile.open(tmp_path / "best.parquet").subject == store.subject.digest
    with pytest.raises(FileExistsError, match="exists and is not overwritten"):
        explain_vectors(module, path, tmp_path / "best.parquet")


def foreign(path, rows, **extraction):
    pq.write_table(pa.table({COLUMN: pa.array(rows, pa.list_(pa.float32()))}), path)
    meta = {"kind": "nla_dataset", "extraction": {"d_model": 16, **extraction}}
    Path(f"{path}{SUFFIX}").write_text(yaml.safe_dump(meta))


def test_files_of_other_programs_are_read_and_wrong_ones_leave_none(written, tmp_path, monkeypatch):
    monkeypatch.setattr(interchange, "ROWS", 1)
    _, module, _ = written
    row, path, target = [0.5] * 16, tmp_path / "a.parquet", tmp_path / "b.parquet"
    foreign(path, [row, row])
    explain_vectors(module, path, target)
    said = module.explain(torch.tensor([row] * 2))
    assert pq.read_table(target)["explanation"].to_pylist() == said
    target.unlink()
    for rows, extraction, message in (
        ([row], {"layer_index": 2}, r"other activations \(layer: 2 there, 1 here\)"),
        ([row], {"d_model": 8}, r"other activations \(width: 8 there, 16 here\)"),
        ([row, row[1:]], {}, r"a.parquet, row 2: activation_vector must hold 16 finite numbers"),
        ([row, None], {}, r"a.parquet, row 2: "),
        ([row, [float("nan")] * 16], {}, r"a.parquet, row 2: "),
        ([], {}, r"b.parquet would hold no row"),
    ):
        foreign(path, rows, **extraction)
        with pytest.raises(ValueError, match=message):
            explain_vectors(module, path, target)
        assert not target.exists()
    pq.write_table(pa.table({COLUMN: ["0.5"]}), path)
    with pytest.raises(ValueError, match="needs kind nla_dataset and activation_vector, lists of"):
        VectorFile.open(path)
    path.write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"a.parquet is damaged or no parquet file \("):
        VectorFile.open(path)
    for meta in ("kind: nla_model\n", "kind: [nla\n"):
        Path(f"{path}{SUFFIX}").write_text(meta)
        with pytest.raises(ValueError, match="must have kind, and extraction with d_model"):
            VectorFile.open(path)
    Path(f"{path}{SUFFIX}").unlink()
    with pytest.raises(FileNotFoundError, match=r"nla_meta.yaml is not there; activations are"):
        VectorFile.open(path)


def test_activations_that_are_not_kept_are_no_parquet(tmp_path):
    data = data_of(tmp_path, predict_output=str(tmp_path / "said.parquet"))
    with pytest.raises(ValueError, match="are computed in each step here and not kept"):
        trainer(tmp_path / "run").predict(module_of(), data, return_predictions=False)
