"""Scores of continuations: packed, batched, and as the model would write them."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from datamodules.core.loader import collated
from datamodules.core.plan import MicroBatch
from datamodules.text.prompts import ChoiceDataset, PromptRequest, joint_tokens
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.generation import GenerationOptions, complete, score
from tests.causal_lm.tiny import (
    TOKENIZER,
    completed,
    next_logits,
    own_gpt2,
    own_llama,
    transformers_gpt2,
    transformers_llama,
)

ROWS = [
    {"prompt": "The sky is", "choices": [" blue", " a fish that flies", " b"]},
    {"prompt": "", "continuation": "Once upon a time"},
    {"prompt": "2 + 2 =", "choices": [" 4", " 22"]},
    {"prompt": "A long prompt, longer than all others, ends", "choices": ["."]},
]


def dataset(tmp_path, rows, **options) -> ChoiceDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ChoiceDataset(PromptRequest([path], **{"tokenizer": TOKENIZER, **options}, mode="score"))


def batch_of(data: ChoiceDataset, ids: list[int]):
    return collated(data, MicroBatch(0, 0, np.array(ids), np.ones(len(ids), np.float32), {}))


def slowly(network, prompt: str, choice: str) -> tuple[float, int, bool]:
    """Token by token, each from a forward of its own."""
    ids = [TOKENIZER.begin_id, *TOKENIZER.encode(prompt).tolist()]
    total, greedy, rest = 0.0, True, TOKENIZER.encode(choice).tolist()
    for token in rest:
        nats = next_logits(network, ids).log_softmax(0)
        total, greedy = total + float(nats[token]), greedy and int(nats.argmax()) == token
        ids.append(token)
    return total, len(rest), greedy


@pytest.mark.parametrize("make", [own_gpt2, own_llama, transformers_gpt2, transformers_llama])
def test_scores_are_those_of_one_forward_per_token(tmp_path, make):
    network = make()
    data = dataset(tmp_path, ROWS)
    order = [2, 0, 3, 1]
    batch = batch_of(data, order)
    assert len(batch["input_ids"]) < 7  # several in a row
    found = complete(network, TOKENIZER, batch, GenerationOptions(mode="score"))
    assert found["scores"].shape == (4, 3)
    for place, number in enumerate(order):
        row = ROWS[number]
        choices = row.get("choices") or [row["continuation"]]
        for k, choice in enumerate(choices):
            total, count, greedy = slowly(network, row["prompt"], choice)
            assert float(found["scores"][place, k]) == pytest.approx(total, abs=1e-9)
            assert int(found["num_tokens"][place, k]) == count
            assert bool(found["is_greedy"][place, k]) == greedy
        assert found["scores"][place, len(choices) :].isnan().all()
        assert not found["num_tokens"][place, len(choices) :].any()
        assert not found["is_greedy"][place, len(choices) :].any()


def test_what_the_model_writes_is_greedy_and_nothing_else_is(tmp_path):
    network, prompt = own_llama(), [TOKENIZER.begin_id, *TOKENIZER.encode("A").tolist()]
    [(ids, _, _)] = completed(network, [prompt], GenerationOptions(6))
    assert len(ids) == 6
    # Bytes that are no text cannot stand in a file: they are put in the place of others.
    batch = batch_of(dataset(tmp_path, [{"prompt": "A", "choices": ["x" * 6, "y" * 6]}]), [0])
    for document, last in zip(batch["choice_documents"][0], (ids[-1], ids[-1] ^ 1), strict=True):
        row, places = (batch["document_ids"] == document).nonzero(as_tuple=True)
        text = torch.tensor([*prompt, *ids[:-1], last])
        batch["input_ids"][row, places] = text[:-1]
        batch["labels"][row, places] = text[1:].masked_fill(torch.arange(7) < 1, -100)
    assert score(network, batch).is_greedy.tolist() == [[True, False]]


def test_the_weight_of_a_label_belongs_to_its_sample(tmp_path):
    batch = batch_of(dataset(tmp_path, ROWS), [0, 1, 2, 3])
    for sample, documents in enumerate(batch["choice_documents"]):
        for document in documents[documents >= 0]:
            places = batch["document_ids"] == document
            assert (batch["sample_index"][places] == sample).all()


def test_a_continuation_begins_where_the_tokens_differ():
    assert joint_tokens([1, 2], [1, 2, 3, 4]) == 2
    assert joint_tokens([1, 2], [1, 7, 4]) == 2  # 7 is made of 2 and what follows
    assert joint_tokens([], [5]) == 1
    assert joint_tokens([1, 2], [1, 2]) == 0


def test_a_token_across_the_border_is_the_continuations(tmp_path):
    vocabulary = {"x": 0, "y": 1, "z": 2, "yz": 3}
    backend = Tokenizer(models.BPE(vocabulary, [("y", "z")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    tokenizer = TextTokenizer(backend, 4)  # without a begin-of-text token
    rows = [{"prompt": "xy", "choices": ["z", "x"]}, {"prompt": "", "continuation": "yx"}]
    data = dataset(tmp_path, rows, tokenizer=tokenizer)
    texts = [data.example(i, 0) for i in (0, 1)]
    assert [(t.ids, t.num_rated) for t in texts[0]] == [([0, 3], 1), ([0, 1, 0], 1)]
    assert [(t.ids, t.num_rated) for t in texts[1]] == [([4, 1, 0], 2)]


def test_a_text_longer_than_the_positions_is_refused_or_loses_its_beginning(tmp_path):
    rows = [{"prompt": "abcdefgh", "choices": ["ijk", "i"]}]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: prompt and continuation has 11 tokens"):
        dataset(tmp_path, rows, max_positions=10)
    data = dataset(tmp_path, rows, max_positions=6, cuts=True)
    long, short = data.example(0, 0)
    assert long.ids == TOKENIZER.encode("efghijk").tolist()
    assert (long.num_rated, short.num_rated) == (3, 1)
    assert data.num_cut.tolist() == [5]  # with the begin-of-text token
    with pytest.raises(ValueError, match="the continuation has 3 tokens and the network 2"):
        dataset(tmp_path, rows, max_positions=2, cuts=True)
