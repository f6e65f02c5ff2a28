"""How readable explanations are, apart from what can be rebuilt from them."""

from collections.abc import Sequence

from torch import Tensor, nn

from lit_models.consistency_lens.controls import Case
from lit_models.consistency_lens.metrics import AttributeRecall, DistinctShare
from lit_models.training.metrics import SumCount


class Legibility(nn.ModuleDict):
    """Metrics of greedy explanations.

    text_nats: of a word under the subject as a language model. distinct: share of texts that are
    like no other. recall, shuffled_recall: share of the attributes told before the position that
    are in the explanation, or in that of another activation.

    Args:
        attributes: names, none where nothing is known of the documents.
    """

    def __init__(self, attributes: Sequence[str]) -> None:
        super().__init__({"text_nats": SumCount(), "distinct": DistinctShare()})
        self.attributes = list(attributes)
        if attributes:
            for name in ("recall", "shuffled_recall"):
                self[name] = AttributeRecall(len(attributes))

    def add(self, case: Case, weight: Tensor) -> None:
        """Add one batch. Args: weight: [B], 0 for what does not count."""
        ids = case.greedy.token_ids
        self["text_nats"].update(case.greedy_nats * weight, weight)
        self["distinct"].update(ids, weight)
        if self.attributes:
            words = case.batch["attributes"]
            self["recall"].update(words, ids, weight)
            self["shuffled_recall"].update(words, case.shuffled.token_ids, weight)

    def computed(self) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return name -> value, and attribute -> recall, shuffled_recall, known; a collective."""
        found = {name: float(self[name].compute()) for name in ("text_nats", "distinct")}
        by_name: dict[str, dict[str, float]] = {name: {} for name in self.attributes}
        for name in ("recall", "shuffled_recall") if self.attributes else ():
            every, *each = self[name].compute().tolist()
            found[name] = every[0]
            for attribute, (share, known) in zip(self.attributes, each, strict=True):
                by_name[attribute] |= {name: share, "known": known}
        return found, by_name
