"""How readable explanations are, apart from what can be rebuilt from them."""

from collections.abc import Sequence

from torch import nn

from lit_models.consistency_lens.controls import Case
from lit_models.consistency_lens.loss import text_nats
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

    def add(self, case: Case) -> None:
        """Add one batch."""
        weight, ids = case.batch["weight"], case.greedy.token_ids
        nats = text_nats(case.lens.language_logits(ids), ids)  # [B]
        self["text_nats"].update(nats * weight, weight)
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
