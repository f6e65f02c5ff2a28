"""Training on folders of shards from the command line, with verified runs."""

import json
import re

import pytest
import yaml

from lit_models.commands.verify import Status, verify_run
from lit_models.run_files import chained
from tests.distributed.launch import in_world, unisono_here
from tests.shards.small import write_folder

SMALL = (
    *("--config", "causal_lm/debug.yaml", "--data=datamodules.ShardDataModule"),
    *("--data.context_length=64", "--data.global_batch_size=8"),
)
WHOLE = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=null")


def test_a_folder_of_shards_trains_a_language_model(done, own_folder):
    folder = write_folder(own_folder / "shards")
    options = ["--data.split.validation_share=0.1", "--data.layout=documents"]
    options += [f"--data.train_files={folder}", "--data.shuffle_shards=1"]
    done("fit", *SMALL, *WHOLE, *options)
    done("verify", "runs/causal_lm-debug", status=Status.PROVEN)


@pytest.fixture
def mixture(own_folder):
    """The options of a mixture of two folders of shards, in mix.yaml."""
    web, books = (write_folder(own_folder / name, seed=seed) for seed, name in enumerate("ab"))
    sources = {"web": {"files": web, "weight": 0.5}, "books": {"files": books, "tokens": 9000}}
    options = {"sources": sources, "split": {"validation_share": 0.1}}
    (own_folder / "mix.yaml").write_text(yaml.safe_dump({"data": {"init_args": options}}))
    return (*SMALL, "--config=mix.yaml", *WHOLE)


@pytest.mark.slow
def test_a_mixture_is_the_same_run_on_two_devices_and_after_kills(mixture, own_folder):
    options = (
        "--data.shuffle_shards=2",
        "--data.global_batch_size=48",
        "--strategies=ddp",
        "--levels=C",
    )
    in_world(1, unisono_here, "certify", *mixture, *options)
    [folder] = (own_folder / "certificates").glob("*/C-*/")
    proof = verify_run(folder)
    assert (proof.status, proof.attempts) == (Status.PROVEN, [2, 1, 2])
    assert set(proof.sources) == {"web", "books"}


def test_a_mixture_is_exact_in_forecast_ledger_and_proof(unisono, done, mixture, own_folder):
    output = done("plan", *mixture, "--devices=1")
    forecast = dict(re.findall(r"│ (.*?) +│ +([\d,]+) │", output))
    done("fit", *mixture)
    ledger = (own_folder / "runs/causal_lm-debug/ledger.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, ledger) if "sources" in line]
    for line in steps:
        counts = line["sources"].values()
        assert line["samples"] == sum(samples for samples, _ in counts)
        assert sum(line["targets"].values()) == sum(targets for _, targets in counts)
    for name in ("web", "books"):
        own = [line["sources"][name] for line in steps]
        for place, word in enumerate(("samples", "targets")):
            total = sum(c[place] for c, step in zip(own, steps, strict=True) if not step["epoch"])
            assert forecast[f"{word} of {name}"] == f"{total:,}"
    assert abs(sum(c[1] for c in own) / 2 - 9000) < 64
    output = done("verify", "runs/causal_lm-debug", status=Status.PROVEN)
    done("replay", "runs/causal_lm-debug", "--step=3")
    _, audit = unisono("check", *mixture, "--data.test_files=a")
    assert "120 different test documents are also in train" not in audit  # some are held out
    assert re.search(r"overlap +1\d\d different test documents are also in train", audit), audit
    samples, targets = (f"{sum(c[i] for c in own):,}" for i in range(2))
    assert f"of books          {samples} samples, {targets} targets" in output
    rows, before = [json.loads(line) for line in ledger], ""
    rows[1]["sources"]["web"][1] += 1
    for row in rows:
        row["hash"] = before = chained(row, before)
    run = own_folder / "runs/causal_lm-debug"
    (run / "ledger.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert any("epoch 0, step 0: by sources" in fault for fault in verify_run(run).faults)
