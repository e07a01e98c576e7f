"""The same bits for every group size and in every run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ... import TokenDispatcher
from ...backends.loopback import LoopbackGroup
from ..compare import assert_bit_equal
from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat
from ..solving import Outcome, solve
from ..workloads import NotOffered

_REPEATS = 5


def one_rank_equals_many(seat: Seat) -> None:
    """EP 1 on all tokens at once against the world on its parts, under `exact`: everything is equal to the bit."""
    offered = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtype in seat.traits.dtypes]
    if not offered:
        raise NotOffered("dtypes: none of those that are tried")
    for dtype in offered[:2]:
        for placement in ("after", "inside"):
            choices: dict[str, Any] = {"dtype": dtype, "scores": placement, "experts": "swiglu", "alignment": 16}
            _one_rank_equals_many(seat, seat.problem("uneven token counts", reduction="exact", **choices))


def _one_rank_equals_many(seat: Seat, problem: Problem) -> None:
    rank, num_local, num_tokens = seat.rank, problem.num_local_experts, problem.num_tokens
    with seat.open(problem.config) as dispatcher:
        part = solve(dispatcher, problem, rank, seat.device)
    together = problem.concatenated()
    with TokenDispatcher(together.config, LoopbackGroup(1).member(0), "local", device=seat.device) as alone:
        whole = solve(alone, together, 0, seat.device)
    start, end = sum(num_tokens[:rank]), sum(num_tokens[: rank + 1])
    for name in ("out", "grad_x", "grad_scores"):
        assert_bit_equal(getattr(part, name), getattr(whole, name)[start:end], f"{name} of EP {seat.size} against EP 1")
    first = rank * num_local
    ends = [0, *whole.expert_offsets.tolist()]
    rows = slice(ends[first], ends[first + num_local])
    for name in ("rows", "scores", "grad_rows"):
        assert_bit_equal(getattr(part, name), getattr(whole, name)[rows], f"{name} of EP {seat.size} against EP 1")
    for mine, all_experts in zip(part.grad_weights, whole.grad_weights, strict=True):
        assert_bit_equal(
            mine, all_experts[first : first + num_local], f"gradient of weights, EP {seat.size} against EP 1"
        )


def same_bits_every_time(seat: Seat) -> None:
    """Forward and backward, again and again."""
    problem = seat.problem("skewed", dtype=torch.bfloat16, experts="swiglu")
    with seat.open(problem.config) as dispatcher:
        first = solve(dispatcher, problem, seat.rank, seat.device)
        for repeat in range(1, _REPEATS):
            again = solve(dispatcher, problem, seat.rank, seat.device)
            for name, mine, theirs in _pairs(again, first):
                assert_bit_equal(mine, theirs, f"{name} in repeat {repeat}")


def _pairs(a: Outcome, b: Outcome) -> list[tuple[str, Tensor, Tensor]]:
    named = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(Outcome) if f.name != "grad_weights"]
    return [*named, *(("grad_weights", x, y) for x, y in zip(a.grad_weights, b.grad_weights, strict=True))]


def token_alone_or_in_a_crowd(seat: Seat) -> None:
    """A token's result does not depend on the other tokens, nor on the rank that brings it."""
    problem = seat.problem("balanced", reduction="exact", dtype=torch.bfloat16)
    x, scores, ids = problem.x[0][:1], problem.topk_scores[0][:1], problem.topk_expert_ids[0][:1]

    def with_token_at(rank: int, others: int) -> Problem:
        parts = []
        for r in range(seat.size):
            mine = (x, scores, ids) if r == rank else (x[:0], scores[:0], ids[:0])
            crowd = (problem.x[r][:others], problem.topk_scores[r][:others], problem.topk_expert_ids[r][:others])
            parts.append([torch.cat(pair) for pair in zip(crowd, mine, strict=True)])
        by_kind = [tuple(part[i] for part in parts) for i in range(3)]
        return problem.replace(x=by_kind[0], topk_scores=by_kind[1], topk_expert_ids=by_kind[2], grad_out=by_kind[0])

    results: list[Tensor] = []
    with seat.open(problem.config) as dispatcher:
        for rank, others in ((0, 0), (0, 5), (seat.size - 1, 0), (seat.size - 1, 7)):
            outcome = solve(dispatcher, with_token_at(rank, others), seat.rank, seat.device)
            results += [outcome.out[-1:]] if seat.rank == rank else []
    for result in results[1:]:
        assert_bit_equal(result, results[0], "one token's output in another batch")


SCENARIOS = (
    Scenario(
        "same bits",
        "EP 1 on all tokens and this group on its parts agree to the bit",
        one_rank_equals_many,
        needs=(("reductions", "exact"),),
    ),
    Scenario("same bits", "repeats agree to the bit", same_bits_every_time, needs=(("reductions", "fast"),)),
    Scenario(
        "same bits",
        "a token's result does not depend on its batch",
        token_alone_or_in_a_crowd,
        needs=(("reductions", "exact"),),
    ),
)
