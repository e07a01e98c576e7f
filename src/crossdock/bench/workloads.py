"""What is measured: the shape of an exchange, and the same inputs for everyone who takes part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..routing import softmax_topk


class Inputs(NamedTuple):
    """One rank's part of a workload.

    Attributes:
        x: `[num_tokens, hidden_dim]` of the workload's dtype.
        topk_scores: `[num_tokens, top_k]` float32.
        topk_expert_ids: `[num_tokens, top_k]` int64, distinct in a token.
        grad_out: `[num_tokens, hidden_dim]`, the gradient that backward starts from.
    """

    x: torch.Tensor
    topk_scores: torch.Tensor
    topk_expert_ids: torch.Tensor
    grad_out: torch.Tensor


class Moved(NamedTuple):
    """What one forward and backward through identity experts gives on this rank.

    Attributes:
        out: `[num_tokens, hidden_dim]`.
        grad_x: gradient of x, `[num_tokens, hidden_dim]`.
        grad_scores: gradient of the scores, `[num_tokens, top_k]`.
    """

    out: torch.Tensor
    grad_x: torch.Tensor
    grad_scores: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of an exchange; every rank brings `num_tokens`, routed by a softmax over random logits."""

    num_tokens: int
    hidden_dim: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    seed: int = 0

    def inputs(self, rank: int) -> Inputs:
        """The tokens of one rank; the same values wherever they are made."""
        draw = torch.Generator().manual_seed(self.seed * 1009 + rank)
        routing = softmax_topk(torch.randn(self.num_tokens, self.num_experts, generator=draw), self.top_k)
        x = torch.randn(self.num_tokens, self.hidden_dim, generator=draw)
        grad_out = torch.randn(self.num_tokens, self.hidden_dim, generator=draw)
        return Inputs(x.to(self.dtype), routing.topk_scores, routing.topk_expert_ids, grad_out.to(self.dtype))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}
