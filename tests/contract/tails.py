"""Rows that no expert may read, made NaN on their way in and out, forwards and backwards."""

from __future__ import annotations

import torch
from torch import Tensor

from crossdock.nn import GroupedExperts


class SpoilingExperts(GroupedExperts):
    """Experts whose rows behind the last offset are NaN, before and after, and so are their gradients.

    Whatever reads such a row, on either side and in either direction, then has NaN where another run has a number.
    """

    def forward(self, rows: Tensor, expert_offsets: Tensor, scores: Tensor | None = None) -> Tensor:
        return spoiled(super().forward(spoiled(rows, expert_offsets), expert_offsets, scores), expert_offsets)


def spoiled(rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """`rows [R, D]` with NaN behind the last of `expert_offsets [e]`, as in their gradient; all else to the bit."""
    is_spared = torch.arange(rows.shape[0], device=rows.device) < expert_offsets[-1]
    return rows * torch.where(is_spared, 1.0, float("nan")).to(rows.dtype).unsqueeze(1)
