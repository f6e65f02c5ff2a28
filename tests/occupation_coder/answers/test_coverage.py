"""Plausible sets: their limit by hand, the share of records that they hold, table columns."""

import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from datamodules import Columns, OccupationDataModule
from datamodules.core.batches import padded_texts
from datamodules.tokenizers.codes import encode
from lit_models.occupation_coder.decoding import (
    DecodingOptions,
    PlausibleSets,
    code_marginals,
    least_likely,
    set_probability,
)
from lit_models.occupation_coder.module import LitOccupationCoder
from lit_models.occupation_coder.network import NONE
from tests.occupation_coder.test_module import small_coder, trainer_of
from tests.occupation_coder.tiny import network_of, padded
from tests.text_corpora import table
from tests.toy import toy_trainer

QUARTERS = [0.5, 0.25, 0.75, 0.125, 1.0, 0.0625, 0.375, 0.875, 0.625]


def sets_of(coverage):
    return PlausibleSets(DecodingOptions(coverage=coverage))


def limit_of(values, coverage, weight=None):
    search, values = sets_of(coverage), torch.tensor(values)
    search.update(values, torch.ones(len(values)) if weight is None else weight)
    return float(search.compute())


def test_the_limit_is_the_kth_smallest_probability_of_the_truth():
    # of nine records: k = 0.2 x 10 = 2, 0.1 x 10 = 1, 0.05 x 10 < 1
    assert limit_of(QUARTERS, 0.8) == 0.125
    assert limit_of(QUARTERS, 0.9) == 0.0625
    assert limit_of(QUARTERS, 0.95) == 0.0
    # fillers are not counted, and ties are one value
    assert limit_of([*QUARTERS, 0.01], 0.9, torch.tensor([1.0] * 9 + [0.0])) == 0.0625
    assert limit_of([0.5] * 19, 0.9) == 0.5
    # twelve bits are kept, rounded down
    assert limit_of([0.3], 0.4) == 2457 / 8192


@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_sets_hold_the_truth_in_the_share_of_new_records_over_many_draws(coverage):
    generator = torch.Generator().manual_seed(0)
    search, shares = sets_of(coverage), []
    for _ in range(200):
        lowest = torch.rand(99 + 200, generator=generator) ** 3  # most true codes are unlikely
        limit = search(lowest[:99], torch.ones(99))
        shares.append((lowest[99:] >= limit).float().mean())
    mean = float(torch.stack(shares).mean())
    assert coverage - 0.005 <= mean <= coverage + 0.02  # of 99 records


@torch.no_grad()
def test_marginals_are_those_of_all_sets_where_beams_hold_all():
    network = network_of()
    batch = (*padded(["smed", "wine merchant"], 14), torch.tensor([1, 0]))
    memory, flat = network(*batch)
    found = code_marginals(network, memory, flat, DecodingOptions("mixed", 320, 0.25))
    sets = [[a, b, c] for a in range(4) for b in range(-1, a) for c in range(-1, b)]
    sets += [[a, -1, -1] for a in range(4)] + [[a, b, -1] for a in range(4) for b in range(a)]
    sets = torch.tensor([s for s in {tuple(x) for x in sets} if not (s[1] < 0 <= s[2])])
    sets = torch.where(sets < 0, NONE, sets)
    shares = set_probability(network.decoder, memory, sets.expand(2, -1, -1))
    for code in range(4):
        expected = (shares * (sets == code).any(-1)).sum(1) * 0.75 + 0.25 * flat[:, code].sigmoid()
        torch.testing.assert_close(found[:, code].double(), expected, rtol=0, atol=1e-6)
    truth = torch.tensor([[2, 0], [3, NONE]])
    lowest = least_likely(found, truth)
    assert lowest.tolist() == [min(found[0, 2], found[0, 0]), found[1, 3]]


TRADES = {"smith": "83110", "vintner": "41025", "clerk": "39310", "tailor": "79100"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with texts, one in five of which has another code than its trade's, and a model
    trained on them, coder.ckpt."""
    folder, draws = tmp_path_factory.mktemp("coverage"), np.random.default_rng(0)
    for name, number in (("train", 40), ("validation", 300), ("test", 300), ("mine", 30)):
        rows = []
        for place in range(number):
            trade = list(TRADES)[draws.integers(4)]
            code = TRADES[trade] if draws.random() < 0.8 else list(TRADES.values())[place % 4]
            rows.append((f"{trade} {name} {place}", code, "ab"[place % 3 == 0]))
        table(folder / f"{name}.csv", rows, ("text", "code_1", "place"))
    torch.manual_seed(0)
    coder = small_coder(decoding=DecodingOptions("mixed", coverage=0.9, embeddings=True))
    trainer = trainer_of(folder, 12)
    trainer.fit(coder, data_of(folder))
    trainer.save_checkpoint(folder / "coder.ckpt")
    return folder


@pytest.fixture
def tables(trained, tmp_path):
    """A copy of the folder for one test."""
    return shutil.copytree(trained, tmp_path / "tables")


def data_of(folder, **options):
    files = {
        f"{part}_files": str(folder / f"{part}.csv") for part in ("train", "validation", "test")
    }
    return OccupationDataModule(**files, columns=Columns(), global_batch_size=64, **options)


def coder_of(folder):
    return LitOccupationCoder.load_from_checkpoint(folder / "coder.ckpt")


def test_a_validation_finds_the_limit_and_a_test_logs_what_the_sets_hold(tables):
    again = coder_of(tables)
    scores = trainer_of(tables, 1).test(again, data_of(tables), verbose=False)[0]
    assert 0.85 <= scores["test/set_coverage"] <= 0.96
    assert 1 <= scores["test/set_size"] < 5
    coded = again.code(texts := ["smith", "clerk 7"], language="en")
    marginals = code_marginals(again.network, *again(one_batch(again, texts)), again.decoding)
    book, limit = again.recipe["code_book"]["codes"], again.recipe["set_limits"]["0.9"]
    for text, shares in zip(coded, marginals, strict=True):
        order = shares.argsort(descending=True).tolist()
        assert text.plausible == [book[i] for i in order if shares[i] >= limit]
    for other, name in (({"coverage": 0.8}, "0.8"), ({"method": "flat"}, "0.9 at flat_share 1")):
        with pytest.raises(ValueError, match=f"is {name}, and the checkpoint has a limit for 0.9:"):
            again.code(["smith"], **other)
    with pytest.raises(ValueError, match="the checkpoint has no limit for sets"):
        sets_of(0.9).limit({})


def predict(coder, folder, name, **options):
    """Code mine.csv into this file."""
    files = {"predict_files": str(folder / "mine.csv"), "predict_output": str(folder / name)}
    trainer = toy_trainer(folder / f"of {name}", precision=32, **options)
    trainer.predict(coder, data_of(folder, **files), return_predictions=False)


def one_batch(coder, texts):
    batch = padded_texts([encode(text, 128) for text in texts])
    return {**batch, "language_id": torch.zeros(len(texts), dtype=torch.long)}


def test_a_coded_table_has_sets_and_vectors_beside_it(tables):
    coder = coder_of(tables)
    predict(coder, tables, "out.parquet")
    table_of_before = (tables / "out.parquet").rename(tables / "before.parquet")
    with pytest.raises(FileExistsError, match="embeddings.parquet exists and is not overwritten"):
        predict(coder, tables, "out.parquet")
    rows = pq.read_table(table_of_before).to_pylist()
    vectors = pq.read_table(tables / "out.parquet.embeddings.parquet")["embedding"].to_pylist()
    assert len(rows) == len(vectors) == 30
    texts = [row["text"] for row in rows]
    coded = coder.eval().code(texts)
    memory, _ = coder(one_batch(coder, texts))
    np.testing.assert_allclose(vectors, memory.hidden[:, 0].detach(), rtol=0, atol=1e-5)
    for row, one in zip(rows, coded, strict=True):
        assert set(filter(None, row["plausible_codes"].split("|"))) == set(one.plausible)
        assert row["num_plausible"] == len(one.plausible)


@pytest.mark.slow
def test_sets_and_vectors_are_the_same_bytes_on_two_devices(tables):
    written = []
    for devices, strategy in ((1, "auto"), (2, "ddp_spawn")):
        out = tables / f"out{devices}.csv"
        predict(coder_of(tables), tables, out.name, devices=devices, strategy=strategy)
        vectors = out.with_name(f"{out.name}.embeddings.parquet")
        written.append((out.read_bytes(), vectors.read_bytes()))
    assert written[0] == written[1]
