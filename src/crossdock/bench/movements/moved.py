"""One layer's way of a set: dispatch, experts that lose no bits, combine; what operations are started from."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import Dispatched, TokenDispatcher
from .problems import Problem

_SCALE_EXPONENTS = 5  # experts multiply by 1/4, 1/2, 1, 2 or 4, which loses no bits


class Moved(NamedTuple):
    """One set's way through a dispatcher in grad mode, kept to start operations from.

    Attributes:
        routed: of `x` and `topk_scores`, which require grad.
        y: `[row_capacity, hidden_dim]`: the rows, each multiplied by its expert's power of two; requires grad.
        out: combine of `y`, `[num_tokens, hidden_dim]`.
        out_no_scores: the same with `apply_scores=False`.
        x: the leaf that was dispatched.
        topk_scores: the leaf of the scores.
        grad_out: `[num_tokens, hidden_dim]`.
    """

    routed: Dispatched
    y: torch.Tensor
    out: torch.Tensor
    out_no_scores: torch.Tensor
    x: torch.Tensor
    topk_scores: torch.Tensor
    grad_out: torch.Tensor

    @property
    def grad_row_scores(self) -> torch.Tensor:
        """`[row_capacity]` float32: what backward of dispatch is given for the row scores: twice the scores."""
        return 2 * self.routed.scores.detach()


def expert_scale(num_experts: int, device: torch.device) -> torch.Tensor:
    """What each expert multiplies its rows by: `[num_experts]` float32 powers of two."""
    expert = torch.arange(num_experts, device=device)
    return torch.exp2((expert % _SCALE_EXPONENTS - _SCALE_EXPONENTS // 2).float())


def move(dispatcher: TokenDispatcher, problem: Problem, number: int) -> Moved:
    """Take a set through a dispatcher. Collective."""
    inputs = problem.sets[number]
    x, scores = inputs.x.detach().requires_grad_(), inputs.topk_scores.detach().requires_grad_()
    with torch.enable_grad():
        routed = dispatcher.dispatch(x, scores, inputs.topk_expert_ids)
        y = _through_experts(routed, problem).requires_grad_()
        out = dispatcher.combine(y, routed.handle)
        out_no_scores = dispatcher.combine(y, routed.handle, apply_scores=False)
    return Moved(routed, y, out, out_no_scores, x, scores, inputs.grad_out)


def _through_experts(routed: Dispatched, problem: Problem) -> torch.Tensor:
    num_local, rows = problem.num_local_experts, routed.rows.detach()
    first = problem.rank * num_local
    scale = expert_scale(problem.workload.num_experts, rows.device)[first : first + num_local]
    row = torch.arange(rows.shape[0], device=rows.device)
    expert = torch.searchsorted(routed.expert_offsets, row, right=True).clamp_(max=num_local - 1)
    return rows * scale[expert].to(rows.dtype).unsqueeze(1)
