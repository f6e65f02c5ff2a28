"""Padding of each family, counted in the batches of an epoch at default settings: positions that a
device computes in vain. Lengths are distributed as in real texts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from datamodules import PlanOptions
from tests.data import data_of_texts as of

NUMBER, BATCH = 800, 16


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return different texts of 2 to 60 words."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(2.2, 0.6, NUMBER).astype(int).clip(2, 60)
    return [" ".join(f"{n}w{rng.integers(9)}" for _ in range(size)) for n, size in enumerate(sizes)]


SORTED, PACKED = 0.10, 0.02
FAMILIES: dict[str, tuple[Callable[..., Any], float]] = {
    "text": (of.text, PACKED),
    "occupation": (of.occupation, SORTED),
    "retrieval": (of.retrieval, SORTED),
    "scored": (of.scored, SORTED),
    "lens": (of.lens, SORTED),
    "ranking": (of.ranking, 0.45),  # candidates of a query vary in length, and stay together
}


def counted(batch: dict[str, Any]) -> tuple[int, int]:
    """Return a batch's number of tokens, and of positions that are computed."""
    for name in ("attention_mask", "document_mask"):
        if name in batch:
            return int(batch[name].sum()), batch[name].numel()
    if "document_ids" in batch:
        return int((batch["document_ids"] >= 0).sum()), batch["document_ids"].numel()
    return int(batch["lengths"].sum()), batch["input_ids"].numel()


def padding(data: Any) -> float:
    """Return the share of an epoch's positions that hold no token."""
    data.prepare_data()
    data.setup("fit")
    tokens, positions = np.array([counted(batch) for batch in data.train_dataloader()]).sum(0)
    return 1 - tokens / positions


@pytest.mark.parametrize("family", FAMILIES)
def test_little_of_what_is_computed_is_padding(family, texts, tmp_path):
    made, most = FAMILIES[family]
    share = padding(made(tmp_path, texts, global_batch_size=BATCH))
    unsorted = PlanOptions(bucket_window=1)
    plain = padding(made(tmp_path, texts, global_batch_size=BATCH, plan=unsorted))
    assert share < most
    assert most == PACKED or plain > 1.5 * share
