"""All metrics of a test."""

from collections.abc import Sequence

from torch import Tensor, nn

from lit_models.consistency_lens.controls import Case, fidelities, row_names
from lit_models.consistency_lens.evaluation import EvaluationOptions
from lit_models.consistency_lens.legibility import Legibility
from lit_models.consistency_lens.metrics import FidelityTable, SampleErrors

Values = dict[str, float]


class Tested(nn.Module):
    """What a test finds out: how faithful explanations are, how legible, and the single errors.

    Args:
        options: of the evaluation.
        groups: names of the test's files.
        attributes: names of what is known of the documents.
    """

    def __init__(
        self, options: EvaluationOptions, groups: Sequence[str], attributes: Sequence[str]
    ) -> None:
        super().__init__()
        self.fidelity = FidelityTable(row_names(options), groups)
        each = [Legibility(attributes) for _ in self.fidelity.groups]
        self.legibility, self.errors = nn.ModuleList(each), SampleErrors()

    def add(self, case: Case) -> Tensor:
        """Add one batch; return the error of each sample [B]."""
        self.fidelity.update(fidelities(case), case.batch)
        weights = self.fidelity.weights(case.batch)
        for weight, legibility in zip(weights, self.legibility, strict=True):
            legibility.add(case, weight)
        error = case.error(case.rebuilt(case.greedy))
        self.errors.update(case.batch["sample_id"], error, case.batch["weight"])
        return error

    def legible(self) -> tuple[dict[str, Values], dict[str, dict[str, Values]]]:
        """Return group -> name -> value, and group -> attribute -> recall; a collective."""
        found = [legibility.computed() for legibility in self.legibility]
        values, attributes = zip(*found, strict=True)
        groups = self.fidelity.groups
        return (
            dict(zip(groups, values, strict=True)),
            dict(zip(groups, attributes, strict=True)),
        )
