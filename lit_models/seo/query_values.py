"""Metrics of single queries, wherever they were computed."""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class QueryValues(Metric):
    """The metrics of each query, M of them."""

    full_state_update = False
    sample_id: list[Tensor]
    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sample_id", [], dist_reduce_fx="cat")
        self.add_state("values", [], dist_reduce_fx="cat")

    def set_dtype(self, dst_type: torch.dtype | str) -> "QueryValues":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(self, sample_id: Tensor, values: dict[str, Tensor], is_counted: Tensor) -> None:
        """Add a batch. Args: sample_id [B] int64; values, name -> [B]; is_counted [B] bool."""
        self.sample_id.append(sample_id[is_counted])
        self.values.append(torch.stack(list(values.values()), 1).double()[is_counted])

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the sample ids [N] int64, ascending, and values [N, M] float64."""
        sample_id, order = dim_zero_cat(self.sample_id).sort()
        return sample_id, dim_zero_cat(self.values)[order]
