"""Whose tokenizer is used: that of a trained model, of a pretrained one, or the options' own."""

from types import SimpleNamespace

import pytest

from datamodules import TokenizerOptions
from datamodules.core.planned import ModelFacts
from datamodules.files.splitting import TRAIN, VALIDATION
from datamodules.tokenizers.text import make_tokenizer
from tests.text_corpora import TEXTS, saved_tokenizer, text_file, text_module, text_rows

CHARACTERS = TokenizerOptions(kind="characters")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path):
    return text_rows(tmp_path)


def trainer_of(stage):
    """Return what of a Trainer says what it does."""
    return SimpleNamespace(state=SimpleNamespace(fn=SimpleNamespace(value=stage)))


def test_evaluation_uses_the_tokenizer_of_the_model(corpus):
    trained = make_tokenizer(CHARACTERS, iter([*TEXTS, "zß"]))
    data = text_module(corpus, tokenizer=CHARACTERS)
    data.trainer, data.model = trainer_of("validate"), ModelFacts({"tokenizer": trained.to_dict()})
    data.prepare_data()
    store = data.open_store("validate")
    assert store.tokenizer.digest == trained.digest
    data.trainer = trainer_of("fit")
    assert data.open_store("fit").tokenizer.backend.token_to_id("ß") is None


def test_evaluation_takes_the_store_of_training_and_needs_no_training_text(tmp_path, corpus):
    held = str(text_file(tmp_path / "held.txt", "Document words"))
    data = text_module(corpus, tokenizer=CHARACTERS, validation_files=held)
    data.prepare_data()
    data.setup("fit")
    recipe = {"tokenizer": data.tokenizer.to_dict()}
    again = text_module(corpus, tokenizer=CHARACTERS, validation_files=held)
    again.model = ModelFacts(recipe)
    assert again.open_store("validate").folder == data.store.folder
    elsewhere = text_module(str(tmp_path / "gone.txt"), validation_files=held)
    elsewhere.model = ModelFacts(recipe)
    store = elsewhere.open_store("validate")
    assert store.tokenizer.digest == data.tokenizer.digest
    tokens = [one.stream(VALIDATION).tokens.tolist() for one in (store, data.store)]
    assert tokens[0] == tokens[1]
    assert len(store.stream(TRAIN).tokens) == 0
    elsewhere.model = ModelFacts()
    with pytest.raises(FileNotFoundError, match=r"data.train_files: .*gone.txt does not exist"):
        elsewhere.prepare_data()


def test_a_pretrained_model_brings_its_tokenizer(tmp_path, corpus):
    folder = tmp_path / "pretrained"
    saved_tokenizer(make_tokenizer(CHARACTERS, iter([*TEXTS, "q"])), folder)
    data = text_module(corpus)
    data.model = ModelFacts(tokenizer=str(folder))
    data.prepare_data()
    assert data.open_store("fit").tokenizer.backend.token_to_id("q") is not None
    data.tokenizer_options = TokenizerOptions(kind="folder", path=str(folder))
    assert data.open_store("fit").tokenizer.backend.token_to_id("q") is not None
    data.tokenizer_options = CHARACTERS
    with pytest.raises(
        ValueError, match=r"data.tokenizer is kind characters, and the pretrained mo"
    ):
        data.prepare_data()
    data.model = ModelFacts()
    assert data.open_store("fit").tokenizer.backend.token_to_id("q") is None


def test_a_chat_template_joins_the_tokenizer_of_a_pretrained_model(tmp_path, corpus):
    folder = tmp_path / "pretrained"
    made = make_tokenizer(CHARACTERS, iter([*TEXTS, "q"]))
    saved_tokenizer(made, folder)
    data = text_module(corpus, tokenizer=TokenizerOptions(chat_template="plain"))
    data.model = ModelFacts(tokenizer=str(folder))
    for tokenizer in (data.open_store("fit").tokenizer, data.prompt_tokenizer()):
        assert tokenizer.backend.token_to_id("q") is not None
        assert tokenizer.render([{"role": "user", "content": "q"}]) == "user:\nq\n\n"
    data.tokenizer_options = TokenizerOptions()
    with pytest.raises(ValueError, match=r"kind bytes.* leave data.tokenizer out \(null\)"):
        data.prompt_tokenizer()
