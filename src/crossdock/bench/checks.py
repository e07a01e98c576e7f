"""Before anything is timed: whether what came out of a contestant is what the workload means."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from .. import reference
from ..reference import ReferenceRows
from ..testing import assert_bit_equal, assert_within_baseline
from ..types import Reduction
from .workloads import Inputs, Moved, Workload


def check_to_the_bit(workload: Workload, reduction: Reduction, moved: Sequence[Moved]) -> None:
    """Hold every rank's results against `crossdock.reference`: rows to the bit, score gradients by the baseline rule.

    Raises:
        AssertionError: naming the tensor, the rank and the place.
    """
    expected = _reference(workload, len(moved), reduction)
    for rank, (got, want) in enumerate(zip(moved, expected, strict=True)):
        assert_bit_equal(got.out, want.out, f"output of rank {rank}")
        assert_bit_equal(got.grad_x, want.grad_x, f"gradient of x of rank {rank}")
        _check_scores(got.grad_scores, workload.inputs(rank), rank)


def check_within_baseline(workload: Workload, moved: Sequence[Moved]) -> None:
    """Hold results that promise no bits against float64, with the error of plain torch in the same dtype as measure.

    Raises:
        AssertionError: naming the tensor, the rank and the place.
    """
    for rank, got in enumerate(moved):
        inputs = workload.inputs(rank)
        plain, truth = _without_exchange(inputs, workload.dtype), _without_exchange(inputs, torch.float64)
        for name, actual, baseline, exact in zip(Moved._fields, got, plain, truth, strict=True):
            assert_within_baseline(actual, exact, baseline, factor=4.0, what=f"{name} of rank {rank}")


def _without_exchange(inputs: Inputs, dtype: torch.dtype) -> Moved:
    """What identity experts mean, on one rank: every token times its scores, added up."""
    x, scores = inputs.x.to(dtype).requires_grad_(), inputs.topk_scores.to(inputs.x.dtype).to(dtype).requires_grad_()
    out = (x.unsqueeze(1) * scores.unsqueeze(2)).sum(1)
    grad_x, grad_scores = torch.autograd.grad(out, (x, scores), inputs.grad_out.to(dtype))
    return Moved(out.detach(), grad_x, grad_scores)


def _check_scores(grad_scores: torch.Tensor, inputs: Inputs, rank: int) -> None:
    products = inputs.grad_out.float() * inputs.x.float()
    truth = (inputs.grad_out.double() * inputs.x.double()).sum(1, keepdim=True).expand_as(grad_scores)
    plain = products.sum(1, keepdim=True).expand_as(grad_scores)
    assert_within_baseline(grad_scores, truth, plain, factor=4.0, what=f"gradient of the scores of rank {rank}")


@cache
def _dispatched(workload: Workload, num_ranks: int) -> list[ReferenceRows]:
    x, scores, ids = _columns(workload, num_ranks)[:3]
    return reference.dispatch(x, scores, ids, workload.num_experts)


@cache
def _grad_rows(workload: Workload, num_ranks: int) -> list[torch.Tensor]:
    _, scores, _, grads = _columns(workload, num_ranks)
    dispatched = _dispatched(workload, num_ranks)
    return reference.combine_backward(grads, [there.rows for there in dispatched], dispatched, scores)[0]


def _reference(workload: Workload, num_ranks: int, reduction: Reduction) -> list[Moved]:
    scores, dispatched = _columns(workload, num_ranks)[1], _dispatched(workload, num_ranks)
    num_tokens = [workload.num_tokens] * num_ranks
    out = reference.combine([there.rows for there in dispatched], dispatched, scores, num_tokens, reduction)
    grad_x = reference.combine(_grad_rows(workload, num_ranks), dispatched, None, num_tokens, reduction)
    return [Moved(*moved, torch.empty(0)) for moved in zip(out, grad_x, strict=True)]


def _columns(workload: Workload, num_ranks: int) -> list[list[torch.Tensor]]:
    return [list(column) for column in zip(*(workload.inputs(rank) for rank in range(num_ranks)), strict=True)]
