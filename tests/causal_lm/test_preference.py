"""Preference tuning: loss and gradients beside a plain reference, scores kept once, any devices."""

import math
import signal
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from datamodules import PreferenceDataModule
from datamodules.files.splitting import TRAIN, TextSplit
from datamodules.tokenizers.text import TokenizerOptions, byte_tokenizer
from lit_models import LitPreference
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.network import DecoderConfig
from lit_models.causal_lm.preference import pair_scores, preference_loss
from lit_models.certify import probe
from tests.causal_lm.tiny import own_gpt2, own_llama
from tests.distributed.launch import in_world
from tests.distributed.test_matrix import assert_same
from tests.text_corpora import rows_file, saved_tokenizer
from tests.toy import ledger_lines, toy_trainer

pytestmark = pytest.mark.usefixtures("own_cache")

WORDS = ("red", "blue", "green", "old", "new", "big")
ROWS = [
    {"prompt": f"say {a} {b}", "chosen": f"{a} {b}" * (1 + i % 3), "rejected": f"{b} {a} no"}
    for i, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS if a != b)
]
SHAPE = {"max_positions": 64, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
SIDES = ("chosen", "rejected")
STOPPED, END = 75, {"eos_token": "<|endoftext|>"}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
BLANK = {"role": "assistant", "content": " "}


def module(**options) -> LitPreference:
    adamw = partial(torch.optim.AdamW, lr=0.01)
    return LitPreference(optimizer=adamw, network=DecoderConfig(**SHAPE), **options)


def data(folder, rows=ROWS, **options) -> PreferenceDataModule:
    path = rows_file(folder / "pairs.jsonl", rows)
    options = {"context_length": 64, "global_batch_size": 8, "separator": ":", **options}
    tokenizer = options.pop("tokenizer", TokenizerOptions(chat_template="plain"))
    return PreferenceDataModule(path, tokenizer=tokenizer, **options)


def dataset(folder, rows, **options):
    made = data(folder, rows, **options)
    made.store = made.open_store("fit")
    return made.part_dataset(TRAIN)


def test_loss_by_hand() -> None:
    policy, reference = torch.tensor([[-4.0, -6.0], [-3.0, -3.0]]), torch.tensor([[-5.0, -5.0]])
    losses, margins = preference_loss(policy.double(), reference.double(), beta=0.5)
    # 0.5 ((-4 + 5) - (-6 + 5)) = 1, and 0.5 ((-3 + 5) - (-3 + 5)) = 0.
    assert margins.tolist() == [1, 0]
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(2)], abs=1e-12)


@pytest.mark.parametrize("make", [own_llama, own_gpt2])
def test_loss_and_gradients_are_those_of_a_plain_computation(tmp_path, monkeypatch, make) -> None:
    monkeypatch.setattr("lit_models.causal_lm.preference.ROWS_AT_ONCE", 7)
    pairs = dataset(tmp_path, ROWS)
    batch = pairs.batch(np.array([0, 5, 3]), 0)
    reference = torch.tensor([[-9.0, -8.0], [-7.0, -9.0], [-3.0, -1.0]], dtype=torch.float64)
    network = make()
    names = ("input_ids", "position_ids", "document_ids")
    policy = pair_scores(network(*(batch[name] for name in names)), network.head.weight, batch)
    losses, _ = preference_loss(policy, reference, beta=0.3)
    found = torch.autograd.grad(losses.sum(), list(network.parameters()))

    total = torch.zeros((), dtype=torch.float64)
    for row, i in enumerate((0, 5, 3)):
        ratios = []
        for side, piece in enumerate(pairs.example(i, 0)):  # each text alone
            ids = torch.from_numpy(piece.input_ids)[None]
            states = network(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids))
            rates = F.log_softmax(network.head(states)[0], -1)
            labels = torch.from_numpy(piece.labels)
            is_answer = labels >= 0
            score = rates[is_answer].gather(1, labels[is_answer][:, None]).sum()
            assert float(policy[row, side].detach()) == pytest.approx(
                float(score.detach()), abs=1e-9
            )
            ratios.append(score - reference[row, side])
        total = total - torch.log(torch.sigmoid(0.3 * (ratios[0] - ratios[1])))
    torch.testing.assert_close(losses.sum(), total, rtol=0, atol=1e-9)
    expected = torch.autograd.grad(total, list(network.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chats", [False, True])
def test_answers_alone_have_labels(tmp_path, chats) -> None:
    rows = ROWS
    if chats:  # the prompt is all before the last answer
        rows = []
        for row in ROWS:
            question = [*CHAT, {"role": "user", "content": row["prompt"]}]
            rows.append({s: [*question, {"role": "assistant", "content": row[s]}] for s in SIDES})
        rows[1] |= {"prompt": rows[1]["chosen"][:3], **{s: rows[1][s][3:] for s in SIDES}}
        rows[2] |= {"system": "so"}
        rows[3] |= {"prompt": ROWS[3]["prompt"]}  # repeats what both contain
    pairs = dataset(tmp_path, rows, context_length=128)
    assert len(pairs.lengths) == 27  # of 30; the others validate
    for i in range(len(pairs.lengths)):
        shown = pairs.describe(i, 0)
        row = ROWS[int(shown["place"].rpartition(":")[2]) - 1]
        prompt = f"<|endoftext|>{row['prompt']}:"
        if chats:
            prompt = "system:\nso\n\n" if row is ROWS[2] else ""
            prompt += "user:\nhi\n\nassistant:\nyes<|endoftext|>\n\n"
            prompt += f"user:\n{row['prompt']}\n\nassistant:\n"
        assert shown["prompt"] == prompt
        assert [shown[side] for side in SIDES] == [f"{row[s]}<|endoftext|>" for s in SIDES]
    batch = pairs.batch(np.array([2, 0]), 0)
    tokens = [int((p.labels >= 0).sum()) for i in (2, 0) for p in pairs.example(i, 0)]
    assert batch["place_text"].bincount().tolist() == tokens
    assert batch["input_ids"].shape == (1, int(pairs.lengths[[2, 0]].sum()))


def test_both_texts_lose_as_much_of_the_prompt_or_the_pair_is_left_out(tmp_path) -> None:
    rows = [{"prompt": f"{i}-456789", "chosen": "aaaa", "rejected": "b"} for i in range(9)]
    rows += [{"prompt": "p", "chosen": "a" * 20, "rejected": "b"}]
    pairs = dataset(tmp_path, rows, context_length=10, split=TextSplit(0.0))
    # Begin, eight, ":", "aaaa", and an end token that takes no position: 14; the other text has 11.
    assert pairs.lengths.tolist() == [10 + 7] * 9
    shown = pairs.describe(0, 0)
    assert (shown["prompt"], shown["rejected"]) == ("56789:"[-6:], "b<|endoftext|>")
    assert [line.partition(" pairs")[0] for line in pairs.losses] == ["9 train", "1 train"]


def test_of_an_empty_prompt_the_first_token_of_answers_is_what_they_follow(tmp_path) -> None:
    bare = saved_tokenizer(replace(byte_tokenizer(), begin_id=None, special_tokens=END), tmp_path)
    options = {"tokenizer": TokenizerOptions("folder", path=str(bare)), "split": TextSplit(0.0)}
    rows = [{"prompt": "", "chosen": "abc", "rejected": "axy"}]
    shown = dataset(tmp_path, rows, separator="", **options).describe(0, 0)
    assert [shown[name] for name in ("prompt", "chosen")] == ["a", "bc<|endoftext|>"]


def test_pairs_of_one_prompt_are_in_one_part_and_are_audited(tmp_path) -> None:
    rows = [{**row, "prompt": f"p{i % 6}"} for i, row in enumerate(ROWS)]
    rows[6] = rows[0]
    audit = data(tmp_path, rows, split=TextSplit(0.3, 0.2)).audit()
    assert [(part.name, len(part.lengths)) for part in audit.parts] == [
        *(("train", 15), ("validation", 10), ("test", 5))
    ]
    assert [count for *_, count in audit.leaks()] == [0, 0, 0]
    assert sum(part.num_duplicates for part in audit.parts) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "pairs.jsonl:1: .*the row has prompt, chosen; write"),
        ({"prompt": "a", "chosen": "b", "rejected": CHAT}, "the row has prompt, chosen, rejected;"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, '"chosen" and "rejected" are the same'),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, '"rejected" is empty: only end-of-text'),
        ({"chosen": CHAT, "rejected": [CHAT[0], BLANK]}, 'hi.*"rejected" is empty'),
        ({"chosen": CHAT, "rejected": CHAT[:1]}, '"rejected" must end with a message of the ass'),
        ({"chosen": CHAT, "rejected": [CHAT[1]]}, '"rejected" must be alike up to the last mess'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"}, '"system" needs'),
    ],
)
def test_a_bad_row_is_a_sentence(tmp_path, row, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataset(tmp_path, [row])


@pytest.mark.slow
def test_a_reference_is_scored_once_and_the_run_begins_at_log_two(tmp_path, monkeypatch) -> None:
    passes, original = [], LitPreference.predict_step
    counted = lambda *given, **more: passes.append(1) or original(*given, **more)  # noqa: E731
    monkeypatch.setattr(LitPreference, "predict_step", counted)
    first = {}
    for name, lora in (("one", None), ("two", None), ("lora", LoraOptions(["*"], 2, 4.0))):
        torch.manual_seed(3)
        tuned, pairs = module(lora=lora), data(tmp_path, split=TextSplit(0.2, 0.1))
        trainer = toy_trainer(tmp_path / name, max_epochs=12)
        trainer.fit(tuned, pairs)
        losses = [line["loss"] for line in ledger_lines(tmp_path / name)]
        assert losses[0] == pytest.approx(math.log(2), abs=1e-9)
        assert losses == first.setdefault(bool(lora), losses)
        (tested,) = trainer.test(tuned, pairs, verbose=False)
        assert tested["test/margin"] > 0
        if lora is None:
            assert tested["test/accuracy"] == 1
            assert losses[-1] < 0.3
        assert len(passes) == (5 if lora is None else 10)  # 3 for training, 1 for each other part
    with pytest.raises(ValueError, match="there is no reference for these test data: the run did"):
        trainer.test(tuned, data(tmp_path, ROWS[:20], split=TextSplit(0.2, 0.2)))
    again = LitPreference.load_from_checkpoint(tmp_path / "one" / "checkpoints" / "last.ckpt")
    assert again.beta == 0.1


def test_pairs_of_a_file_of_their_own_are_judged_again_without_those_of_training(tmp_path) -> None:
    files = {"validation_files": rows_file(tmp_path / "apart.jsonl", ROWS[:4])}
    trainer = toy_trainer(tmp_path, max_epochs=1)
    trainer.fit(module(), data(tmp_path, ROWS[4:], **files))
    tuned = LitPreference.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    (found,) = toy_trainer(tmp_path).validate(tuned, data(tmp_path, ROWS[4:], **files))
    assert found["val/margin"] == pytest.approx(float(trainer.callback_metrics["val/margin"])) != 0


def test_a_pass_over_pairs_has_the_same_batches_on_any_number_of_devices(tmp_path, monkeypatch):
    pairs, parts = data(tmp_path), []
    pairs.setup("fit")
    for rank in range(3):
        monkeypatch.setattr(pairs, "_replicas", lambda rank=rank: (3, rank))
        own = [*pairs.passes(pairs.datasets["train"])]
        assert len(own) == 2  # a rank with fewer would leave the others waiting for its shards
        parts += [batch["sample_id"].tolist() for batch in own if batch["weight"][0]]
    assert sorted(parts) == [[*range(n, min(n + 8, 27))] for n in range(0, 27, 8)]


def probed(*options: str) -> int:
    """Train in this process as each start of a certificate does; return the exit status."""
    sys.argv = ["unisono", *options]
    return probe.main() % STOPPED  # one rank decides it for all


@pytest.mark.slow
def test_a_run_is_the_same_stopped_on_two_processes_and_killed_on_one(tmp_path, monkeypatch):
    options = ["fit", "--config=causal_lm/preference.yaml", "--trainer.precision=64-true"]
    options += [f"--model.network.{name}={value}" for name, value in SHAPE.items()]
    options += ["--model.pretrained=null", "--data.tokenizer.kind=bytes"]
    options += [f"--data.train_files={rows_file(tmp_path / 'pairs.jsonl', ROWS)}"]
    options += ["--data.context_length=64", "--data.global_batch_size=8"]
    options += ["--trainer.accelerator=cpu", "--trainer.max_epochs=4", "--trainer.max_steps=8"]
    options += ["--model.optimizer.lr=0.003"]

    def start(name: str, devices: int, status: int, attempt: int, *more: str) -> None:
        monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / f"cache-{name}"))  # each scores alone
        place = [f"--trainer.default_root_dir={tmp_path / name}", f"--trainer.devices={devices}"]
        way = [f"--trainer.strategy={'fsdp' if devices > 1 else 'auto'}"]
        way += ["--ckpt_path=auto"] if attempt > 1 else []
        way += ["--trainer.callbacks+=lit_models.certify.probe.Probe"]
        way += [f"--trainer.callbacks.attempt={attempt}", *more]
        in_world(devices, probed, *options, *place, *way, status=status)

    start("one", 1, 0, 1)
    stop = ["--trainer.callbacks+=tests.distributed.breaks.SignalledAt"]
    stop += ["--trainer.callbacks.step=2", "--trainer.callbacks.signal_name=SIGTERM"]
    start("two", 2, 0, 1, *stop, "--trainer.callbacks.rank=0")
    start("two", 1, -signal.SIGKILL, 2, "--trainer.callbacks.kill_after=7")
    start("two", 2, 0, 3)
    assert_same(tmp_path / "one", tmp_path / "two")
    attempts = [line["attempt"] for line in ledger_lines(tmp_path / "two")]
    assert attempts == sorted(attempts)
    assert {*attempts} == {1, 2, 3}
