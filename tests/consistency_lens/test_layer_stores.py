"""One reading of the documents gives a store for each of several layers."""

import pytest

from datamodules import ActivationDumpDataModule
from datamodules.activations.store import ActivationStore
from lit_models import LitSubject
from tests.activation_dumps import contents, documents, dumped, stories, subject, trainer


def test_each_layers_store_is_that_of_a_dump_of_its_own(tmp_path):
    files = stories(tmp_path, 40)
    data = ActivationDumpDataModule(str(tmp_path / "all"), **documents(files))
    trainer(tmp_path).predict(LitSubject(subject(), [2, 0]), data, return_predictions=False)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["layer-0", "layer-2"]
    for layer in (0, 2):
        store = ActivationStore(tmp_path / "all" / f"layer-{layer}")
        alone = dumped(tmp_path / f"alone-{layer}", files, subject(layer))
        assert store.subject == alone.subject
        assert contents(store.folder) == contents(alone.folder)


def test_a_layer_that_there_is_not_is_refused(tmp_path):
    for layers in ([-1, 1], [1, 3]):
        data = ActivationDumpDataModule(str(tmp_path / "all"), **documents(stories(tmp_path, 40)))
        with pytest.raises(ValueError, match=r"is none of the subject's 3 blocks"):
            trainer(tmp_path).predict(LitSubject(subject(), layers), data, return_predictions=False)
    assert not (tmp_path / "all").exists()
