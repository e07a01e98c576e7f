"""Small trials by hand: problems from token counts and ids, and what runs them on a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import crossdock as cd
from crossdock.testing import Problem, Seat
from crossdock.testing.checks import check_trial, judge
from crossdock.testing.solving import Outcome, forward, solve

Ids = Sequence[Sequence[int]]


def make_config(num_experts: int, top_k: int, hidden_dim: int = 16, **fields: Any) -> cd.DispatcherConfig:
    known: dict[str, Any] = {"dtype": torch.float32, "num_max_tokens_per_rank": 64, "timeout_s": 20.0}
    return cd.DispatcherConfig(num_experts=num_experts, top_k=top_k, hidden_dim=hidden_dim, **(known | fields))


def random_ids(
    num_tokens: Sequence[int], top_k: int, num_experts: int, *, seed: int = 0, among: Sequence[int] | None = None
) -> list[Tensor]:
    """Distinct ids for every token, by rank: of all experts, or of some."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.arange(num_experts) if among is None else torch.tensor(among)

    def token() -> Tensor:
        return pool[torch.randperm(len(pool), generator=generator)[:top_k]]

    return [
        torch.stack([token() for _ in range(n)]) if n else torch.zeros(0, top_k, dtype=torch.int64) for n in num_tokens
    ]


def problem(config: cd.DispatcherConfig, ids: Sequence[Tensor | Ids], *, seed: int = 0, **changes: Any) -> Problem:
    """Random rows, scores and gradients for these ids; `changes` replace some."""
    tensors = [part if isinstance(part, Tensor) else torch.tensor(part).reshape(-1, config.top_k) for part in ids]
    return Problem.draw(config, tensors, torch.Generator().manual_seed(seed)).replace(**changes)


def position_code(config: cd.DispatcherConfig, num_tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """`x[r, t, :] = 16 r + t + 1`: exact in every dtype up to 256."""
    return tuple(
        (16.0 * rank + torch.arange(n) + 1).to(config.dtype).unsqueeze(1).repeat(1, config.hidden_dim)
        for rank, n in enumerate(num_tokens)
    )


def integers(trial: Problem, *, seed: int = 1) -> Problem:
    """Small whole numbers, and quarters for scores, so that every sum is exact in float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(part: Tensor) -> Tensor:
        return torch.randint(-8, 9, part.shape, generator=generator).to(part.dtype)

    return trial.replace(
        x=tuple(map(draw, trial.x)),
        grad_out=tuple(map(draw, trial.grad_out)),
        topk_scores=tuple(draw(part) / 4 for part in trial.topk_scores),
    )


def checked(seat: Seat, trial: Problem) -> Outcome:
    """Solve one problem on every rank, make all checks, and return what came out."""
    return checked_steps(seat, [trial])[0]


def checked_steps(seat: Seat, trials: Sequence[Problem]) -> list[Outcome]:
    """Solve problems of one configuration one after the other on one dispatcher."""
    outcomes = []
    with seat.open(trials[0].config) as dispatcher:
        for trial in trials:
            attempt = forward(dispatcher, trial, seat.rank, seat.device)
            outcomes.append(attempt.backward())
            check_trial(judge(attempt, outcomes[-1]))
    return outcomes


def exact_steps(seat: Seat, trials: Sequence[Problem]) -> list[Outcome]:
    """`checked_steps` for many or large problems: of numbers as `integers` draws, so that a formula gives every bit.

    Experts are identities, or linear: then expert e multiplies by e + 1.
    """
    outcomes = []
    with seat.open(trials[0].config) as dispatcher:
        for trial in trials:
            outcome = solve(dispatcher, trial, seat.rank, seat.device)
            x, grad, ids = (part[seat.rank] for part in (trial.x, trial.grad_out, trial.topk_expert_ids))
            factor = torch.where(ids < 0, 0, ids + 1 if trial.experts == "linear" else 1).float()
            weight = (trial.topk_scores[seat.rank] * factor).sum(1, keepdim=True)
            assert torch.equal(outcome.out, (weight * x.float()).to(x.dtype)), "out"
            assert torch.equal(outcome.grad_x, (weight * grad.float()).to(x.dtype)), "gradient of x"
            dots = (x.float() * grad.float()).sum(1, keepdim=True)
            assert torch.equal(outcome.grad_scores, factor * dots), "gradient of the scores"
            first = seat.rank * trial.num_local_experts
            counts = torch.bincount(
                torch.cat(trial.topk_expert_ids).flatten() + 1, minlength=trial.config.num_experts + 1
            )
            assert torch.equal(outcome.tokens_per_expert, counts[first + 1 :][: trial.num_local_experts]), "counts"
            outcomes.append(outcome)
    return outcomes


def refused(call: Callable[[], object], error: type[cd.CrossdockError] = cd.InvalidInput) -> str:
    """Return the message of the error that a call must raise."""
    try:
        call()
    except error as refusal:
        return str(refusal)
    raise AssertionError(f"was not refused with {error.__name__}")


def with_config(trial: Problem, **fields: Any) -> Problem:
    return trial.replace(config=dataclasses.replace(trial.config, **fields))
