"""A retriever trained once for several test files."""

from pathlib import Path

import pytest

from lit_models import LitRetriever
from tests.distributed.seo_retriever import retriever
from tests.search_collections import write_collection
from tests.toy import toy_trainer


@pytest.fixture(scope="session")
def retriever_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained, tested and used for predictions; do not change it."""
    folder = tmp_path_factory.mktemp("retriever")
    write_collection(folder / "collection")
    module, data = retriever(folder / "run", {})
    trainer = toy_trainer(folder / "run", max_epochs=2)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    return folder / "run"


@pytest.fixture
def trained(retriever_run: Path) -> LitRetriever:
    """The run's module in double precision."""
    path = retriever_run / "checkpoints/last.ckpt"
    return LitRetriever.load_from_checkpoint(path).eval().double()
