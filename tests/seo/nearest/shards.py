"""Documents on several ranks, found as one rank finds them: a check inside of another run."""

import torch

from lit_models import LitRetriever
from lit_models.seo.nearest import ExactSearch, Feedback, ShardedSearch


def assert_sharded_search_is_exact(rank: int, num_ranks: int) -> None:
    """Search few different numbers, so that scores are equal; a rank has none of the last."""
    generator = torch.Generator().manual_seed(0)
    for number in (60, 7, num_ranks - 1):
        documents, queries = (
            torch.randint(-1, 2, (rows, 4), generator=generator).double() for rows in (number, 5)
        )
        ids = torch.arange(number) * 3 + 1  # of the collection, of which these are some
        own = slice(rank, None, num_ranks)
        sharded = ShardedSearch(ids[own], documents[own])
        assert torch.equal(sharded.all_ids, ids)
        for feedback in (None, Feedback(documents=3)):
            expected = ExactSearch(documents).search(queries, 9, feedback)
            found = sharded.search(queries, 9, feedback)
            assert torch.equal(found.documents, ids[expected.documents])
            assert torch.equal(found.scores, expected.scores)
            assert found.documents.shape == (5, min(9, number))
        assert sharded.search(queries[:0], 9).documents.shape == (0, min(9, number))


class CheckedRetriever(LitRetriever):
    """Looks, at its test, at the search of documents on several ranks."""

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        assert_sharded_search_is_exact(self.trainer.global_rank, self.trainer.world_size)
