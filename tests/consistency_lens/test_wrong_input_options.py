"""Options of a dump and of a lens that do not fit together are refused where they enter."""

from pathlib import Path
from typing import Any

import pytest

from datamodules import ActivationDataModule, ActivationDumpDataModule, TextSplit, TokenizerOptions
from datamodules.activations.documents import PositionRule
from lit_models import LitSubject
from lit_models.causal_lm.network import DecoderConfig
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.subject import SubjectOptions
from tests.activation_dumps import RULE, documents, dumped, stories, trainer
from tests.consistency_lens.small_lens import documents as lens_stories
from tests.consistency_lens.small_lens import lens
from tests.consistency_lens.small_lens import trainer as lens_trainer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store")
    acts = str(dumped(folder / "acts", stories(folder, 30)).folder)
    ActivationDataModule(acts, context_length=16, positions=RULE).prepare_data()  # as dumped
    return acts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_files": "x.jsonl"}, "data.train_files is x.jsonl, and .* was dumped, its"),
        ({"test_files": ["y.txt"]}, "data.test_files is .*: leave it out"),
        ({"tokenizer": TokenizerOptions()}, "data.tokenizer is Tok.*: leave it out"),
        ({"split": TextSplit(0.3)}, "data.split is TextSplit"),
        ({"text_column": "body"}, "data.text_column is body"),
        ({"attributes_column": None}, "data.attributes_column is None"),
        ({"documents_by": "line"}, "data.documents_by is line"),
        ({"context_length": 32}, "context_length is 32, and .*was dumped with 16: leave"),
        (
            {"positions": PositionRule(2, 3, 4)},
            "positions is .*seed=4.*was dumped with .*seed=0",
        ),
    ],
)
def test_options_of_documents_beside_a_store_are_refused(
    store: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationDataModule(store, **options).prepare_data()


def test_another_tokenizer_than_the_subject_s_is_refused(tmp_path: Path) -> None:
    data = ActivationDumpDataModule(str(tmp_path / "acts"), **documents(stories(tmp_path, 20)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    module = LitSubject(SubjectOptions(path=str(tmp_path / "model")))
    with pytest.raises(ValueError, match="data.tokenizer is kind words, and the pretrained model"):
        trainer(tmp_path).predict(module, data)


def test_a_tokenizer_larger_than_the_subject_is_refused(tmp_path: Path) -> None:
    small = DecoderConfig(vocab_size=5, max_positions=16, hidden_size=16, num_heads=2)
    with pytest.raises(ValueError, match="tokens and the network embeds 5"):
        dumped(tmp_path / "a", stories(tmp_path, 20), SubjectOptions(layer=1, network=small))


def test_documents_without_any_activation_are_refused(tmp_path: Path) -> None:
    rule = PositionRule(min_position=200)
    with pytest.raises(ValueError, match="train holds no activation: .*lower the position, raise"):
        dumped(tmp_path / "a", stories(tmp_path, 20), positions=rule, context_length=300,
               of=SubjectOptions(network=DecoderConfig(max_positions=300), layer=1))  # fmt: skip


def test_explanations_beyond_learned_positions_are_refused_and_those_up_to_them_are_not(
    tmp_path: Path,
) -> None:
    def fit(positions: Any, num_prompt: int) -> None:
        sizes = {"max_positions": 32, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
        subject = SubjectOptions(layer=0, network=DecoderConfig(**sizes, positions=positions))
        module = lens(subject, lens=LensOptions(num_words=2, num_prompt=num_prompt))
        lens_trainer(tmp_path / "run", max_steps=1).fit(module, lens_stories(tmp_path))

    fit("learned", 30)  # 30 + 1 + 2 - 1 = 32
    fit("rotary", 31)
    with pytest.raises(ValueError, match=r"num_words 2 .* 31 need 33 .* learnt 32; lower"):
        fit("learned", 31)


def test_two_subjects_and_none_are_refused() -> None:
    for options in ({}, {"path": "x", "network": DecoderConfig(num_heads=2)}):
        with pytest.raises(ValueError, match="a lens needs one subject"):
            SubjectOptions(**options)
