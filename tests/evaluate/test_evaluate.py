"""Tasks of lm-eval on a checkpoint: the figures of lm-eval itself, on one process and on two."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

import lit_models.evaluate as room
from datamodules.text.prompts import ChoiceDataset, Prompt
from datamodules.tokenizers.text import TokenizerOptions, make_tokenizer
from lit_models.__main__ import run
from lit_models.causal_lm.generation import score
from lit_models.errors import UsageError
from tests.causal_lm.tiny import (
    DATA_OPTIONS,
    MODEL_OPTIONS,
    SENTENCE,
    SHAPE_OPTIONS,
    TEXT,
    own_llama,
)

CHOICES = [
    {"question": "the cat sat on the", "choices": ["mat", "dog", "log and"], "answer": 0},
    {"question": "and the dog sat", "choices": ["on the", "so", "by"], "answer": 0},
    {"question": "", "choices": ["the", "so they sat an"], "answer": 1},
]
PROSE = [{"text": SENTENCE}, {"text": "mat"}]
HEAD = """\
task: tiny_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}.jsonl}}}}
test_split: test
"""
TASKS = {
    "choice": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "prose": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "write": """\
output_type: generate_until
doc_to_text: "{{question or 'mat and dog and log and'}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["sat", "."], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}
REFERENCE = """\
import json, sys
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
results = simple_evaluate(
    "hf", model_args={"pretrained": "exported", "dtype": "float32"}, device="cpu", batch_size=2,
    tasks=["tiny_choice", "tiny_prose", "tiny_write"],
    task_manager=TaskManager(include_path="tasks", include_defaults=False),
)
kept = {name: results[name] for name in ("results", "samples")}
json.dump(kept, open("theirs.json", "w"), default=str)
"""


def test_a_continuation_is_greedy_where_each_token_is_the_most_probable() -> None:
    network = own_llama()
    ids = [40, 41, 42]
    for _ in range(3):  # the greedy text of temperature 0
        row = torch.tensor([ids])
        hidden = network(row, torch.arange(len(ids))[None], torch.zeros_like(row))
        ids.append(int(network.head(hidden)[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 257]
    rows = [[Prompt(ids, 3, 0), Prompt(other, 3, 0)], [Prompt(other[:-1], 2, 0)]]
    batch = ChoiceDataset(rows).batch(np.arange(2), 0)
    names = ("input_ids", "position_ids", "document_ids")
    found = score(network(*(batch[name] for name in names)), network.head.weight, batch)
    assert found["is_greedy"].tolist() == [[True, False], [True, False]]


def test_without_the_package_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, f"{room.__name__}.harness", raising=False)
    with pytest.raises(UsageError, match=r"lm_eval.*pip install 'unisono\[eval\]'"):
        run(["evaluate", "--checkpoint=a.ckpt", "--tasks=tasks"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tasks with their data, and a run whose checkpoint has learnt TEXT a little."""
    pytest.importorskip("lm_eval", reason="extra: eval")
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        head = HEAD.format(name=name, file="prose" if name == "prose" else "choice")
        (folder / "tasks" / f"{name}.yaml").write_text(head + text)
    for name, rows in (("choice", CHOICES), ("prose", PROSE)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        limits = ["--trainer.max_steps=40", "--trainer.limit_val_batches=0"]
        limits += ["--trainer.default_root_dir=trained"]
        assert run(["fit", *MODEL_OPTIONS, *SHAPE_OPTIONS, *DATA_OPTIONS, *limits]) == 0
        assert run(["export", "trained/checkpoints/last.ckpt", "--to", "exported"]) == 0
    return folder


def evaluated(folder, monkeypatch, to, *options, checkpoint="trained/checkpoints/last.ckpt"):
    monkeypatch.chdir(folder)
    named = ["evaluate", f"--checkpoint={checkpoint}", f"--to={to}", "--trainer.accelerator=cpu"]
    assert run([*named, *options]) == 0
    return json.loads((folder / to / "results.json").read_text())


@pytest.mark.slow
def test_figures_are_those_of_lm_eval_on_the_export_and_of_two_processes(
    folder, monkeypatch, capsys
) -> None:
    own = evaluated(folder, monkeypatch, "own", "--tasks=tasks", "--trainer.devices=1")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines if line.startswith("tiny_prose")] == [
        ["tiny_prose", "word_perplexity"],
        ["tiny_prose", "bits_per_byte"],
    ]
    subprocess.run([sys.executable, "-c", REFERENCE], cwd=folder, check=True, capture_output=True)
    theirs = json.loads((folder / "theirs.json").read_text())
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            expected = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert own["results"][task][name] == expected, (task, name)
    for task, samples in theirs["samples"].items():
        for one, other in zip(own["samples"][task], samples, strict=True):
            for (said,), (expected,) in zip(one["resps"], other["resps"], strict=True):
                assert said == (
                    pytest.approx(expected, rel=1e-6) if task != "tiny_write" else expected
                )
    # By hand: bits per byte of the two log-likelihoods, and the likeliest choice of each.
    nats = sum(sample["resps"][0][0] for sample in own["samples"]["tiny_prose"])
    num_bytes = sum(len(row["text"]) for row in PROSE)
    bits = own["results"]["tiny_prose"]["bits_per_byte,none"]
    assert bits == pytest.approx(-nats / num_bytes / math.log(2))
    best = [np.argmax([r[0][0] for r in s["resps"]]) for s in own["samples"]["tiny_choice"]]
    share = np.mean(np.array(best) == [row["answer"] for row in CHOICES])
    assert own["results"]["tiny_choice"]["acc,none"] == pytest.approx(share)
    # A process of its own, which starts the second one.
    command = [sys.executable, "-m", "lit_models", "evaluate", "--tasks=tasks", "--to=two"]
    command += ["--checkpoint=trained/checkpoints/last.ckpt", "--trainer.accelerator=cpu"]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    two = json.loads((folder / "two" / "results.json").read_text())
    assert two["results"] == own["results"]
    for path in (folder / "own").glob("answers-*.npz"):
        with np.load(path) as one, np.load(folder / "two" / path.name) as other:
            assert all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("is_asked", [True, False])
def test_chats_are_written_as_transformers_writes_them(folder, tmp_path, is_asked) -> None:
    from transformers import AutoTokenizer

    from lit_models.evaluate.harness import PlannedLM

    own = make_tokenizer(TokenizerOptions(chat_template="plain"), iter(()))
    begin = own.special_tokens["bos_token"]
    own.backend.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, own.begin_id)]
    )
    for name, content in own.hugging_face_files().items():
        (tmp_path / name).write_text(content)
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is"}]
    chat = chat[:1] if is_asked else chat
    model = PlannedLM(own, 16, None)
    written = model.apply_chat_template(chat, is_asked)
    options = {"add_generation_prompt": is_asked, "continue_final_message": not is_asked}
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert written == theirs.apply_chat_template(chat, tokenize=False, **options)
    # A text alone gets the tokenizer's begin token, once; a continuation gets none.
    assert model.tok_encode(written) == theirs(written).input_ids
    assert model.tok_encode(begin + written) == theirs(written).input_ids
    assert model.tok_encode(written, add_special_tokens=False) == own.encode(written).tolist()


@pytest.mark.slow
def test_an_evaluation_goes_on_from_an_export_with_examples_before_the_question(
    folder, monkeypatch, capsys
) -> None:
    options = ["--tasks=tiny_choice", "--tasks=tasks/prose.yaml", "--limit=1", "--num-fewshot=1"]
    with pytest.raises(UsageError, match=r"tiny_choice is no task, file or folder of tasks"):
        evaluated(folder, monkeypatch, "again", *options)
    options[0] = "--tasks=tasks/choice.yaml"
    first = evaluated(folder, monkeypatch, "again", *options, checkpoint="exported")
    assert "no --ckpt_path" not in capsys.readouterr().err  # the folder has weights
    answers = sorted((folder / "again").glob("answers-*.npz"))
    assert len(answers) == 2
    (folder / "again" / "results.json").unlink()  # as after a kill before the end
    (folder / "exported").touch()  # the same weights, a later time
    second = evaluated(folder, monkeypatch, "again", *options, checkpoint="exported")
    assert sorted((folder / "again").glob("answers-*.npz")) == answers
    assert second["results"] == first["results"]
    assert first["n-samples"]["tiny_choice"]["effective"] == 1
    with pytest.raises(UsageError, match=r"results.json is there and is never replaced; name"):
        evaluated(folder, monkeypatch, "again", *options, checkpoint="exported")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            HEAD.format(name="far", file="choice").replace("path: json", "path: nobody/nothing")
            + TASKS["choice"],
            "task tiny_far cannot be read: .*Its data must be on this machine",
        ),
        (
            HEAD.format(name="beams", file="choice")
            + TASKS["write"].replace("max_gen_toks: 6", "max_gen_toks: 6, num_beams: 3"),
            "task tiny_beams: generation_kwargs num_beams is not known; there are until",
        ),
        (
            HEAD.format(name="long", file="choice")
            + TASKS["write"].replace("max_gen_toks: 6", "max_gen_toks: 16"),
            "task tiny_long: max_gen_toks is 16 .*must be 1 to 15: the model has 16 positions",
        ),
        (
            HEAD.format(name="wide", file="choice")
            + TASKS["choice"].replace('"{{question}}"', "question")
            + 'doc_to_choice: ["a choice that is far too long", "b"]\n',
            "a continuation has 30 tokens, and must have 1 to 16, the positions of the model",
        ),
        ("nothing: here\n", "holds no task of lm-eval; write one as a .yaml file"),
    ],
)
def test_a_task_that_cannot_be_run_is_a_sentence(folder, monkeypatch, task, message) -> None:
    (folder / "wrong").mkdir(exist_ok=True)
    (folder / "wrong" / "task.yaml").write_text(task)
    with pytest.raises(ValueError, match=message):
        evaluated(folder, monkeypatch, "none", "--tasks=wrong")
