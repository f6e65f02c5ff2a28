"""Fine-tuning on 200 rows of another code system, with and without a trained encoder."""

from collections import Counter
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from datamodules import demo
from lit_models.cli import launch
from lit_models.occupation_coder.module import LitOccupationCoder
from lit_models.run_files import read_checkpoint
from tests.text_corpora import table
from tests.toy import csv_rows

SMALL = {"width": 64, "num_layers": 1, "feed_forward": 128}
ENCODER = [f"--model.encoder.{name}={value}" for name, value in SMALL.items()]
DECODER = [f"--model.decoder.{name}={value}" for name, value in SMALL.items()]
QUIET = ["--trainer.enable_model_summary=false", "--trainer.enable_progress_bar=false"]
NUM_SOURCE_ROWS, NUM_ROWS, NUM_CODES = 6000, 200, 40
SCRATCH = [
    "--model.init_from_part=null",
    "--model.encoder=lit_models.occupation_coder.encoders.CharacterEncoder",
    *ENCODER,
    "--model.encoder.num_buckets=8192",
]


def letters(code: str) -> str:
    """Returns a code of another system: letters, one for each level in use."""
    return "".join(chr(ord("A") + int(digit)) for digit in code.rstrip("0") or "0")


def write_tables(folder: Path) -> None:
    """Writes source.csv with the demo's codes; few.csv and held.csv with letter codes."""
    rows = csv_rows(demo.demo_occupations())
    source = [row for row in rows if row["split"] == "train"][:NUM_SOURCE_ROWS]
    names = ("text", "language", "code_1", "code_2")
    table(folder / "source.csv", [[row[name] for name in names] for row in source], names)
    counts = Counter(row["code_1"] for row in source)
    frequent = {code for code, _ in counts.most_common(NUM_CODES)}
    for name, split in (("few.csv", "validation"), ("held.csv", "test")):
        fitting = [
            [row["text"], "no" if row["language"] == "da" else row["language"], letters(code)]
            for row in rows
            if row["split"] == split and not row["code_2"] and (code := row["code_1"]) in frequent
        ]
        few = fitting[: NUM_ROWS if name == "few.csv" else None]
        table(folder / name, few, ("job", "spoken", "title_code"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the tables and source/checkpoints/best.ckpt, a trained coder."""
    folder = tmp_path_factory.mktemp("finetune")
    write_tables(folder)
    with chdir(folder):
        launch(
            [
                *("fit", "--config", "occupation_coder/demo.yaml", *QUIET, *ENCODER, *DECODER),
                "--model.encoder.num_buckets=8192",
                *("--data.train_files=source.csv", "--data.columns.language=language"),
                *("--data.split.test_share=0", "--data.global_batch_size=64"),
                *("--trainer.max_epochs=4", "--trainer.callbacks=[]", "--test_after_fit=false"),
                "--trainer.default_root_dir=source",
            ]
        )
    return folder


def finetuned(folder: Path, name: str, *options: str) -> SimpleNamespace:
    """Fine-tunes on few.csv; returns F1 on the rows of held.csv, and the weights."""
    with chdir(folder):
        launch(
            [
                *("fit", "--config", "occupation_coder/finetune.yaml", *QUIET, *options),
                *("--data.train_files=few.csv", "--data.validation_files=held.csv"),
                "--data.columns={text: job, language: spoken, codes: [title_code]}",
                *("--model.decoding.method=greedy", "--trainer.check_val_every_n_epoch=30"),
                f"--trainer.default_root_dir={name}",
            ]
        )
    logged = csv_rows(folder / name / "metrics.csv")
    scores = [float(row["val/f1"]) for row in logged if row.get("val/f1")]
    weights = read_checkpoint(folder / name / "checkpoints" / "best.ckpt")["state_dict"]
    return SimpleNamespace(f1=scores[-1], weights=weights)


def encoder_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the encoder's weights except those of languages, which differ between tables."""
    mark = "network.encoder."
    return {k: v for k, v in weights.items() if k.startswith(mark) and "languages" not in k}


@pytest.mark.soak
def test_a_trained_encoder_beats_one_from_scratch_on_200_rows_of_another_code_system(
    source, own_environment
):
    start = ["--model.init_from=source/checkpoints/best.ckpt"]
    trained = encoder_of(read_checkpoint(source / "source/checkpoints/best.ckpt")["state_dict"])
    free = finetuned(source, "free", *start)
    frozen = finetuned(source, "frozen", *start, "--model.freeze=encoder")
    scratch = finetuned(source, "scratch", *SCRATCH)
    print(f"F1: fine-tuned {free.f1:.3f}, frozen {frozen.f1:.3f}, from scratch {scratch.f1:.3f}")
    assert free.f1 > scratch.f1 + 0.2
    assert frozen.f1 > scratch.f1 + 0.2
    assert trained
    torch.testing.assert_close(encoder_of(frozen.weights), trained, rtol=0, atol=0)
    assert not all(torch.equal(encoder_of(free.weights)[n], v) for n, v in trained.items())


def test_languages_keep_their_rows_and_new_ones_begin_as_the_unknown_one():
    coder = LitOccupationCoder(torch.optim.AdamW)
    coder.recipe = {"languages": ["unk", "en", "no"]}
    weights = {"network.encoder.languages.weight": torch.tensor([[0.0], [1.0], [2.0]])}
    trained = {"state_dict": weights, "occupation_recipe": {"languages": ["unk", "da", "en"]}}
    (rows,) = coder.adapted_weights(trained).values()
    assert rows.tolist() == [[0.0], [2.0], [0.0]]
    trained["occupation_recipe"]["code_book"] = {"codes": ["1"]}
    for coder.init_from_part in (None, "decoder"):
        with pytest.raises(ValueError, match="heads for other codes, or for .*_part=encoder"):
            coder.adapted_weights(trained)
