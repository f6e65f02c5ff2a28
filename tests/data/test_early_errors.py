"""Faults of the input are reported before its texts are tokenised."""

from pathlib import Path
from typing import Any

import pytest

from datamodules import RankingDataModule, RetrievalDataModule, ScoredTextDataModule, SplitOptions
from datamodules.files.splitting import Split
from datamodules.scored.store import LabelOptions
from datamodules.search.candidates import HardNegatives
from datamodules.search.collection import CollectionRequest
from datamodules.search.retrieval import TrainingMix
from datamodules.text.encoding import TextEncoding
from tests.search_collections import write_collection

NO_SPLIT = Split(validation_share=0, test_share=0)
NO_QUERY = r"no query is judged for validation; name its judgem"
NOT_JUDGED = r'negatives.source is "judged", but no document was judged and found'
RUN = {"negatives": HardNegatives(2, "run", run="no.trec"), "mix": TrainingMix(sentences=1)}


@pytest.fixture(autouse=True)
def no_tokens(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TextEncoding, *_: object) -> None:
        raise RuntimeError("a text is tokenised")

    monkeypatch.setattr(TextEncoding, "ids_of", refuse)
    monkeypatch.setenv("UNISONO_CACHE", str(own_folder / "cache"))


@pytest.mark.parametrize(
    ("family", "part", "options", "message"),
    [
        (RetrievalDataModule, "validation", {}, NO_QUERY),
        (RankingDataModule, "validation", {}, NO_QUERY),
        (RetrievalDataModule, "train", {}, r"there is no pair to train on.*mix\.sentences"),
        (RetrievalDataModule, "train", RUN, r"data.negatives.run: no.trec does not exist"),
        (RetrievalDataModule, "train", {**RUN, "negatives": HardNegatives(2)}, NOT_JUDGED),
    ],
)
def test_a_part_without_judgements_and_negatives_that_are_not_there(
    tmp_path, family, part, options, message
):
    (write_collection(tmp_path / "files") / "qrels" / f"{part}.tsv").unlink()
    request = CollectionRequest(str(tmp_path / "files"), split=NO_SPLIT)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        family(collection=request, **options).prepare_data()


def scored(tmp_path: Path, rows: str, **options: Any) -> ScoredTextDataModule:
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text(f"text,grade\n{rows}")
    files = {name: str(tmp_path / f"{name}.csv") for name in ("train", "test")}
    heads = {"grade": LabelOptions("regression")}
    return ScoredTextDataModule(files=files, heads=heads, **options)


def test_rejected_rows_are_handed_over_even_if_a_text_cannot_be_tokenised(tmp_path):
    rows = "".join(f"text {n},{n}\n" for n in range(40)) + "wrong,good\n"
    with pytest.raises(RuntimeError, match="a text is tokenised"):
        scored(tmp_path, rows, on_bad_rows="reject").prepare_data()
    assert "good" in (tmp_path / "rejected.csv").read_text()


def test_a_stage_without_rows(tmp_path):
    data = scored(tmp_path, "a,1\nb,2\n", split=SplitOptions(validation_share=0))
    with pytest.raises(ValueError, match=r"no row is for validation; name data.files.validation"):
        data.setup("validate")
