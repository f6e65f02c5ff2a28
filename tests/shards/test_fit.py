"""Training on folders of shards from the command line, with verified runs."""

import json
import re

import yaml

from lit_models.commands.verify import Status, verify_run
from lit_models.run_files import chained
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


def test_a_mixture_is_exact_in_forecast_ledger_and_proof(unisono, done, own_folder):
    web, books = (write_folder(own_folder / name, seed=seed) for seed, name in enumerate("ab"))
    sources = {"web": {"files": web, "weight": 0.5}, "books": {"files": books, "tokens": 9000}}
    options = {"sources": sources, "split": {"validation_share": 0.1}}
    (own_folder / "mix.yaml").write_text(yaml.safe_dump({"data": {"init_args": options}}))
    output = done("plan", *SMALL, "--config=mix.yaml", *WHOLE, "--devices=1")
    forecast = dict(re.findall(r"│ (.*?) +│ +([\d,]+) │", output))
    done("fit", *SMALL, "--config=mix.yaml", *WHOLE)
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
    _, audit = unisono("check", *SMALL, "--config=mix.yaml", "--data.test_files=a")
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
