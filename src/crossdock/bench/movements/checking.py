"""Before anything is timed: whether what came out of a contender is what the contract says, in every set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...testing import assert_bit_equal
from .expected import Arrivals, arrivals, home, rows_by_slot, score_gradients
from .group import agree
from .operations import (
    COMBINE,
    COMBINE_BACKWARD,
    COMBINE_BACKWARD_NO_SCORES,
    DISPATCH,
    DISPATCH_BACKWARD,
    PAIR,
    Opened,
)


class WrongResult(AssertionError):
    """A contender moved something else than the contract says; raised on every rank alike, with the numbers."""


def check(opened: Opened) -> None:
    """Compare every operation's results with what is expected. Collective.

    Rows, counts, outputs and their gradients to the bit; gradients of the scores within the bound of a float32 dot. A
    backend whose traits say that it keeps no order is compared row by row all the same, rows being told apart by
    their scores, and its sums may lie within the documented bound of the reduction.

    Raises:
        WrongResult: what differs, where, and on which ranks.
    """
    trouble = ""
    try:
        for number in range(opened.problem.num_sets):
            for name, differs in _differences(opened, number):
                if differs and not trouble:
                    trouble = f"{name}, set {number}: {differs}"
    except AssertionError as error:
        trouble = trouble or str(error)
    told = [f"on rank {rank}: {trouble}" for rank, trouble in enumerate(agree(trouble)) if trouble]
    if told:
        raise WrongResult("; ".join(told))


def _differences(opened: Opened, number: int) -> Iterator[tuple[str, str]]:
    """Every operation is called, also after a difference, since peers call it too."""
    there = arrivals(opened.problem, number)
    num_rows = there.slot_of_row.shape[0]
    outputs = {name: operation(number) for name, operation in opened.operations.items()}
    routed = outputs[DISPATCH] if DISPATCH in outputs else opened.dispatch(number)
    counts = _differ(routed.tokens_per_expert, there.tokens_per_expert)
    yield "tokens_per_expert", counts
    if counts:
        return
    ends = there.tokens_per_expert.cumsum(0).to(torch.int32)
    yield "expert_offsets", _differ(routed.expert_offsets, ends)
    if not opened.traits.ordered_rows:
        there = there.reordered(_order_found(there, routed.scores[:num_rows]))
    yield "scores", _differ(routed.scores[:num_rows], there.row_scores)
    rows = rows_by_slot(opened.problem, number, there.slot_of_row)
    yield "rows", _differ(routed.rows[:num_rows], rows)
    del rows
    yield from _differences_at_home(opened, number, outputs)
    if COMBINE_BACKWARD in outputs:
        yield from _differences_of_combine_backward(opened, number, there, outputs)


def _differences_at_home(opened: Opened, number: int, outputs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    problem, reduction = opened.problem, opened.contender.reduction
    grad_x, grad_scores = outputs[DISPATCH_BACKWARD]
    results = {
        "output of combine": (outputs[COMBINE], True, True),
        "output of the pair": (outputs.get(PAIR), True, False),
        "gradient of x": (grad_x, False, True),
    }
    for name, (actual, weighted, scaled) in results.items():
        if actual is None:
            continue
        expected = home(problem, number, reduction, weighted=weighted, scaled=scaled)
        differs = _differ(actual, expected)
        if differs and not opened.traits.ordered_rows:
            differs = _beyond_bound(actual, expected, problem.workload.top_k)
        yield name, differs
    yield "gradient of the scores of dispatch", _differ(grad_scores, 2 * problem.sets[number].topk_scores)


def _differences_of_combine_backward(
    opened: Opened, number: int, there: Arrivals, outputs: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    num_rows = there.slot_of_row.shape[0]
    grad_rows, grad_scores = outputs[COMBINE_BACKWARD]
    (grad_rows_no_scores,) = outputs[COMBINE_BACKWARD_NO_SCORES]
    grads = rows_by_slot(opened.problem, number, there.slot_of_row, grads=True)
    yield "gradient of the rows, no scores", _differ(grad_rows_no_scores[:num_rows], grads)
    weighted = (grads.float() * there.row_scores.unsqueeze(1)).to(grads.dtype)
    yield "gradient of the rows", _differ(grad_rows[:num_rows], weighted)
    truth, bound = score_gradients(opened.problem, number)
    error = (grad_scores.double() - truth).abs()
    worst = (error - bound).argmax()
    ok = bool((error <= bound).all())
    yield (
        "gradient of the scores of combine",
        "" if ok else f"off by {error.flatten()[worst]:.3g}, allowed are {bound.flatten()[worst]:.3g}",
    )


def _order_found(there: Arrivals, scores: torch.Tensor) -> torch.Tensor:
    """Which expected row stands at each place, by expert and score: `[R]` int64."""
    wanted = _by_expert_and_score(there.expert_of_row, there.row_scores)
    found = _by_expert_and_score(there.expert_of_row, scores)  # groups are as long here as there
    return torch.empty_like(found).scatter_(0, found, wanted)


def _by_expert_and_score(expert: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    by_score = scores.argsort(stable=True)
    return by_score[expert[by_score].argsort(stable=True)]


def _differ(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """What differs in a sentence, or nothing."""
    actual = actual.detach()
    same_kind = actual.dtype == expected.dtype and actual.shape == expected.shape
    if same_kind and torch.equal(_bits(actual), _bits(expected)):
        return ""  # told on the device, where the rows are
    try:
        assert_bit_equal(actual, expected, "it")
    except AssertionError as error:
        return str(error).removeprefix("it: ")
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    bits = {2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(bits[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _beyond_bound(actual: torch.Tensor, expected: torch.Tensor, top_k: int) -> str:
    """Whether two sums may both keep the documented bound of `fast`; no term is negative where another is positive."""
    u, g = torch.finfo(actual.dtype).eps / 2, top_k * 2.0**-24
    error = (actual.double() - expected.double()).abs()
    bound = 2 * (2 * u + u * u + 2 * g) * expected.double().abs()
    excess = float((error - bound).max())
    return "" if excess <= 0 else f"the largest error is {float(error.max()):.3g}, {excess:.3g} over the bound"
