"""All metrics of a test."""

from collections.abc import Sequence

from torch import nn

from lit_models.consistency_lens.controls import Case, fidelities, row_names
from lit_models.consistency_lens.evaluation import EvaluationOptions
from lit_models.consistency_lens.legibility import Legibility
from lit_models.consistency_lens.metrics import FidelityTable, SampleErrors


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
        self.legibility, self.errors = Legibility(attributes), SampleErrors()

    def add(self, case: Case) -> None:
        """Add one batch."""
        self.fidelity.update(fidelities(case), case.batch)
        self.legibility.add(case)
        error = case.error(case.rebuilt(case.greedy))
        self.errors.update(case.batch["sample_id"], error, case.batch["weight"])
