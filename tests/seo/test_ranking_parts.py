"""Rows of a ranker's batch stand by their lengths, and parts of them are computed alone."""

import numpy as np
import pytest
import torch

from datamodules.search.candidates import CandidateOptions, GroupOptions
from lit_models.seo.networks import even_parts
from lit_models.training.dropout import SampleKeys, key_dropout
from tests.seo.small_collection import ranker, ranking_data, relevance_files

GROUPS = GroupOptions(size=16, mined=10, unjudged_as_negative=True)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """Return a module in float64 and its datamodule."""
    folder = relevance_files(tmp_path_factory.mktemp("relevance"))
    torch.manual_seed(1)
    candidates = CandidateOptions("bm25", top=20)
    module, data = ranker(), ranking_data(folder, candidates=candidates, groups=GROUPS)
    data.setup("fit")
    module.recipe = {**data.recipe}
    module.configure_model()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.double(), data


def batch_of(data, ids):
    dataset = data.datasets["train"]
    batch = dataset.collate(dataset.examples(np.array(ids), 3))
    return {**batch, "weight": torch.ones(len(ids)), "sample_id": torch.tensor(ids)}


def test_rows_stand_by_their_lengths_and_candidates_find_theirs(ready) -> None:
    _, data = ready
    batch, dataset = batch_of(data, [4, 0, 9]), data.datasets["train"]
    lengths = batch["pair_lengths"]
    assert lengths.tolist() == sorted(batch["attention_mask"].sum(1).tolist(), reverse=True)
    assert lengths[0] > lengths[-1]
    found = 0
    for row, sample_id in enumerate((4, 0, 9)):
        example = dataset.example(sample_id, 3)
        for place, pair in enumerate(example.pairs):
            index = int(batch["pair_index"][row, place])
            ids = batch["input_ids"][index, : lengths[index]]
            assert ids.tolist() == pair.ids.tolist()
            found += 1
    assert found == len(lengths)


def test_parts_change_no_score_and_no_gradient(ready) -> None:
    module, data = ready
    batch = batch_of(data, list(range(12)))
    assert batch["num_parts"] == 12 * 16 // 64 == 3
    results = []
    for number in (1, 3, 5):
        module.zero_grad()
        (term,) = module.training_terms({**batch, "num_parts": number}).values()
        term.total.backward()
        gradients = [p.grad.clone() for p in module.network.parameters() if p.grad is not None]
        results.append([term.total.detach(), *gradients])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-11)
    scores = [module(batch, size).detach() for size in (None, 7, 1000)]
    torch.testing.assert_close(scores[1:], scores[:1] * 2, rtol=1e-9, atol=1e-11)


def test_a_part_is_as_wide_as_its_longest_row() -> None:
    lengths = np.array([9, 7, 4, 4, 2])
    assert even_parts(lengths, 2) == [(0, 2, 9), (2, 5, 4)]
    assert even_parts(lengths, 1) == [(0, 5, 9)]
    assert even_parts(lengths, 5) == [(n, n + 1, length) for n, length in enumerate(lengths)]


def test_the_parts_of_a_step_depend_on_sizes_that_all_replicas_share(ready) -> None:
    _, data = ready
    dataset = data.datasets["train"]
    assert [dataset.num_parts(n) for n in (1, 7, 8, 16, 40)] == [1, 1, 2, 4, 10]


def test_keyed_dropout_computes_all_rows_in_one_call(ready, monkeypatch) -> None:
    module, data = ready
    calls = []
    forward = type(module.network.encoder).forward
    spy = lambda self, *rows: calls.append(len(rows[0])) or forward(self, *rows)  # noqa: E731
    monkeypatch.setattr(type(module.network.encoder), "forward", spy)
    batch = batch_of(data, list(range(12)))
    module(batch)
    keys = SampleKeys()
    dropouts = key_dropout(module.network, keys)
    keys.begin(7, batch["sample_id"])
    module(batch)
    assert len(calls) == 3 + (len(dropouts) > 0)
    assert len(dropouts) > 0
    assert calls[-1] == len(batch["pair_lengths"]) == sum(calls[:3])
