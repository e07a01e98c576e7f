"""What a problem should come out as: the reference's answer, by rank, with the same experts run on its rows."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..reference import ReferenceRows
from .problems import Experts, Problem
from .solving import Outcome

_NUM_ORDERS = 64
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, eq=False)
class Expected:
    """One rank's answer, on the CPU.

    Attributes:
        outcome: to the bit, but for `grad_scores` where combine applies the scores.
        grad_scores_fp64: `[T, top_k]` float64, the true score gradient, for which `outcome.grad_scores` is what plain
            float32 loops lose; None where the experts apply the scores: then that is to the bit as well.
        without_row: `[T, top_k]` bool: slots that name no expert, and slots that were dropped.

    """

    outcome: Outcome
    grad_scores_fp64: Tensor | None
    without_row: Tensor


def expected(problem: Problem, device: torch.device) -> list[Expected]:
    """The answer for every rank. `device` is where the experts run: their bits depend on it, all others do not."""
    with _one_at_a_time:  # ranks that are threads ask for the same problem at the same time
        return _expected(problem, device)


@functools.lru_cache(maxsize=4)
def _expected(problem: Problem, device: torch.device) -> list[Expected]:
    there = reference.dispatch(
        problem.x,
        problem.topk_scores,
        problem.topk_expert_ids,
        problem.config.num_experts,
        problem.config.expert_alignment,
        problem.num_rows,
    )
    runs = [_ExpertsRun.of(problem, rank, rows, device) for rank, rows in enumerate(there)]
    results = [run.out_with_nan_padding() for run in runs]
    scores = problem.topk_scores if problem.apply_scores else None
    reduction, num_tokens = problem.config.reduction, problem.num_tokens
    out = reference.combine(results, there, scores, num_tokens, reduction)
    grad_rows, grad_scores_fp64 = reference.combine_backward(problem.grad_out, results, there, scores)
    for run, grad in zip(runs, grad_rows, strict=True):
        run.backward(grad)
    grad_x = reference.combine([run.grad_rows() for run in runs], there, None, num_tokens, reduction)
    if problem.apply_scores:
        grad_scores = _plain_score_gradients(problem, there, results)
    else:
        grad_scores = _scalars_home(problem, there, [run.grad_scores() for run in runs])
    return [
        Expected(
            Outcome(
                rows=rows.rows,
                scores=rows.scores,
                row_valid=run.valid.cpu(),
                out=out[rank],
                grad_rows=grad_rows[rank],
                tokens_per_expert=torch.tensor(rows.tokens_per_expert),
                expert_offsets=torch.tensor(rows.expert_offsets, dtype=torch.int32),
                grad_x=grad_x[rank],
                grad_scores=grad_scores[rank],
                grad_weights=run.grad_weights(),
            ),
            grad_scores_fp64[rank] if problem.apply_scores else None,
            _without_row(problem, there, rank),
        )
        for rank, (rows, run) in enumerate(zip(there, runs, strict=True))
    ]


@dataclass(frozen=True, eq=False)
class _ExpertsRun:
    """The experts of one rank on the reference's rows."""

    experts: Experts
    rows: Tensor
    scores: Tensor
    valid: Tensor
    out: Tensor

    @classmethod
    def of(cls, problem: Problem, rank: int, there: ReferenceRows, device: torch.device) -> _ExpertsRun:
        rows = there.rows.to(device, copy=True).requires_grad_()
        scores = there.scores.to(device, copy=True).requires_grad_()
        valid = torch.tensor([place is not None for place in there.origin], dtype=torch.bool, device=device)
        offsets = torch.tensor(there.expert_offsets, dtype=torch.int32, device=device)
        experts = Experts(problem, rank, device)
        with torch.enable_grad():
            out = experts(rows, offsets, None if problem.apply_scores else scores)
        return cls(experts, rows, scores, valid, out)

    def out_with_nan_padding(self) -> Tensor:
        return self.out.detach().masked_fill(~self.valid.unsqueeze(1), float("nan")).cpu()

    def backward(self, grad: Tensor) -> None:
        torch.autograd.backward(self.out, grad.to(self.out.device))

    def grad_rows(self) -> Tensor:
        return _grad_or_zeros(self.rows).cpu()

    def grad_scores(self) -> Tensor:
        return _grad_or_zeros(self.scores).cpu()

    def grad_weights(self) -> tuple[Tensor, ...]:
        return tuple(_grad_or_zeros(weight).cpu() for weight in self.experts.parameters())


def _grad_or_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _plain_score_gradients(problem: Problem, there: list[ReferenceRows], results: list[Tensor]) -> list[Tensor]:
    """Dot products by plain float32 loops, by slot: `[T, top_k]`."""
    dots = []
    for rank, rows in enumerate(there):
        grads = torch.zeros_like(results[rank])
        for row, place in enumerate(rows.origin):
            if place is not None:
                grads[row] = problem.grad_out[place[0]][place[1]]
        dots.append(_worst_of_plain_dots(torch.nan_to_num(results[rank]), grads))
    return _scalars_home(problem, there, dots)


def _worst_of_plain_dots(a: Tensor, b: Tensor) -> Tensor:
    """Dots of rows `[R, D]` in float32, one element after the other, in the worst of many orders.

    A row or two are too few to tell how much a single order loses: it can be right by luck.
    """
    terms, truth = a.float() * b.float(), (a.double() * b.double()).sum(1)
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(terms.shape[1], generator=generator) for _ in range(_NUM_ORDERS)])
    # No cumsum: on a CPU it adds float32 in double.
    sums = functools.reduce(torch.add, terms[:, orders].unbind(2))
    worst = (sums.double() - truth.unsqueeze(1)).abs().argmax(1, keepdim=True)
    return sums.gather(1, worst).squeeze(1)


def _without_row(problem: Problem, there: list[ReferenceRows], source: int) -> Tensor:
    without = torch.ones(problem.topk_expert_ids[source].shape, dtype=torch.bool)
    for rows in there:
        for place in rows.origin:
            if place is not None and place[0] == source:
                without[place[1:]] = False
    return without


def _scalars_home(problem: Problem, there: list[ReferenceRows], scalars: list[Tensor]) -> list[Tensor]:
    """One number per row `[R]` to the slot it came from: `[T, top_k]`, 0 where there is no row."""
    home = [torch.zeros(ids.shape) for ids in problem.topk_expert_ids]
    for rows, values in zip(there, scalars, strict=True):
        for row, place in enumerate(rows.origin):
            if place is not None:
                source, token, slot = place
                home[source][token, slot] = values[row]
    return home
