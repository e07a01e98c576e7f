"""Solving a problem on one rank: dispatch, experts, combine and back, with everything kept that can be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..types import Dispatched, DispatchLayer
from .problems import Experts, Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What one rank got; all tensors detached.

    Attributes:
        rows, scores, tokens_per_expert, expert_offsets, row_valid: of the dispatch.
        out: `[T, hidden_dim]`, of combine.
        grad_rows: `[R, hidden_dim]`: the gradient of what combine was given.
        grad_x: `[T, hidden_dim]`.
        grad_scores: `[T, top_k]` float32.
        grad_weights: of the experts.

    """

    rows: Tensor
    scores: Tensor
    tokens_per_expert: Tensor
    expert_offsets: Tensor
    row_valid: Tensor
    out: Tensor
    grad_rows: Tensor
    grad_x: Tensor
    grad_scores: Tensor
    grad_weights: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Sent:
    """A problem on one rank between dispatch and combine: its rows have been through the experts.

    Attributes:
        x, topk_scores: the leaves that gradients come to.
        topk_expert_ids: as they were handed over.
        routed: what dispatch gave.
        rows: the experts' output, NaN in padding rows and behind the last offset.

    """

    problem: Problem
    rank: int
    x: Tensor
    topk_scores: Tensor
    topk_expert_ids: Tensor
    experts: Experts
    routed: Dispatched
    rows: Tensor

    def home(self, layer: DispatchLayer) -> Attempt:
        """Combine; collective."""
        out = layer.combine(self.rows, self.routed.handle, apply_scores=self.problem.apply_scores)
        return Attempt(self, out)


@dataclass(frozen=True, eq=False)
class Attempt:
    """A problem on one rank between forward and backward; `out` is what combine gave."""

    sent: Sent
    out: Tensor

    def backward(self) -> Outcome:
        """Send the problem's gradient back; collective, like the forward."""
        self.out.backward(self.sent.problem.grad_out[self.sent.rank].to(self.out.device))
        return self.outcome()

    def outcome(self) -> Outcome:
        """All results, after a backward."""
        sent, routed = self.sent, self.sent.routed
        return Outcome(
            rows=routed.rows.detach(),
            scores=routed.scores.detach(),
            tokens_per_expert=routed.tokens_per_expert,
            expert_offsets=routed.expert_offsets,
            row_valid=routed.row_valid,
            out=self.out.detach(),
            grad_rows=_grad(sent.rows),
            grad_x=_grad(sent.x),
            grad_scores=_grad(sent.topk_scores),
            grad_weights=tuple(_grad(weight) for weight in sent.experts.parameters()),
        )


def send(layer: DispatchLayer, problem: Problem, rank: int, device: torch.device) -> Sent:
    """Dispatch and run the experts. Collective over the problem's group.

    What stands in padding rows and behind the last offset is poisoned with NaN before combine, and so are the
    gradients there on their way back: nobody may read them.
    """
    x = _leaf(problem.x[rank], device, problem.strided)
    scores = _leaf(problem.topk_scores[rank], device, problem.strided)
    ids, *histogram = _ids_of(problem, rank, device)
    routed = layer.dispatch(x.handed_over, scores.handed_over, ids, *histogram, **_bound_of(problem))
    experts = Experts(problem, rank, device)
    invalid = ~routed.row_valid
    _poison_gradient(routed.rows, invalid)
    _poison_gradient(routed.scores, invalid)
    rows, row_scores = _with_nan_tail(routed)
    y = experts(rows, routed.expert_offsets, None if problem.apply_scores else row_scores)
    y = y.masked_fill(invalid.unsqueeze(1), float("nan"))
    if y.requires_grad:
        y.retain_grad()
    return Sent(problem, rank, x.leaf, scores.leaf, ids, experts, routed, y)


def forward(layer: DispatchLayer, problem: Problem, rank: int, device: torch.device) -> Attempt:
    """Dispatch, run the experts and combine. Collective over the problem's group."""
    return send(layer, problem, rank, device).home(layer)


def solve(layer: DispatchLayer, problem: Problem, rank: int, device: torch.device) -> Outcome:
    """Forward and backward of a problem on one rank. Collective over the problem's group."""
    return forward(layer, problem, rank, device).backward()


@dataclass(frozen=True, eq=False)
class _Leaf:
    leaf: Tensor
    handed_over: Tensor


def _leaf(values: Tensor, device: torch.device, strided: bool) -> _Leaf:
    """Make a leaf with these values; `strided` hands over every second column of something twice as wide."""
    leaf = values.to(device, copy=True).requires_grad_()
    return _Leaf(leaf, torch.stack([leaf, torch.zeros_like(leaf)], dim=2).flatten(1)[:, ::2] if strided else leaf)


def _ids_of(problem: Problem, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    ids = problem.topk_expert_ids[rank].to(device, copy=True)
    if not problem.strided:
        return (ids,)
    histogram = torch.bincount(ids[ids >= 0], minlength=problem.config.num_experts)
    return ids.to(torch.int32).t().contiguous().t(), histogram


def _bound_of(problem: Problem) -> dict[str, Any]:
    return {"num_tokens_per_rank": max(problem.num_tokens)} if problem.strided else {}


def _with_nan_tail(routed: Dispatched) -> tuple[Tensor, Tensor]:
    """Rows and scores, NaN behind the last offset."""
    tail = torch.arange(routed.rows.shape[0], device=routed.rows.device) >= routed.handle.rows_end
    return (
        routed.rows.masked_fill(tail.unsqueeze(1), float("nan")),
        routed.scores.masked_fill(tail, float("nan")),
    )


def _poison_gradient(tensor: Tensor, invalid: Tensor) -> None:
    def poison(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # of scores that nobody used
            return None
        return grad.masked_fill(invalid if grad.dim() == 1 else invalid.unsqueeze(1), float("nan"))

    if tensor.requires_grad:
        tensor.register_hook(poison)


def _grad(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise AssertionError(f"no gradient came to a tensor of shape {list(tensor.shape)}")
    return tensor.grad
