"""One dispatcher for many layers and micro-batches, and several dispatchers side by side."""

from __future__ import annotations

import torch

from ... import InvalidInput, TokenDispatcher
from ..checks import check_trial, finish, judge
from ..compare import assert_bit_equal
from ..oracle import expected
from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat
from ..solving import Attempt, forward, send


def _problem(seat: Seat) -> Problem:
    experts = "swiglu" if seat.traits.ordered_rows else "linear"
    return seat.problem("skewed", alignment=16, experts=experts)


def _redrawn(problem: Problem, seed: int) -> Problem:
    """The same configuration, with other rows and scores and with the tokens' ids in another order."""
    generator = torch.Generator().manual_seed(seed)
    ids = [part[torch.randperm(len(part), generator=generator)].flip(1) for part in problem.topk_expert_ids]
    return problem.redrawn(ids, seed)


def combines_in_any_order(seat: Seat) -> None:
    """Dispatch A, dispatch B, combine B, combine A, combine A again: all that matters is in the handle."""
    a = _problem(seat)
    b = _redrawn(a, 1)
    with seat.open(a.config) as dispatcher:
        one, two = dispatcher.layer("one"), dispatcher.layer("two")
        sent_a = send(one, a, seat.rank, seat.device)
        sent_b = send(two, b, seat.rank, seat.device)
        home_b = sent_b.home(two)
        home_a = sent_a.home(one)
        again = sent_a.home(one)
        for problem, attempt in ((a, home_a), (b, home_b), (a, again)):
            assert_bit_equal(attempt.out, expected(problem, seat.device)[seat.rank].outcome.out, "output")
        finish(home_a)
        finish(home_b)


def micro_batches(seat: Seat) -> None:
    """Three layers, three micro-batches, backward in two orders; no call disturbs what another one saved."""
    problems = [_redrawn(_problem(seat), seed) for seed in range(3)]
    with seat.open(problems[0].config) as dispatcher:
        layers = [dispatcher.layer(f"blocks.{i}") for i in range(3)]

        def step(batch: int) -> list[Attempt]:
            return [forward(layer, problems[batch], seat.rank, seat.device) for layer in layers]

        def back(attempts: list[Attempt]) -> None:
            for attempt in reversed(attempts):
                finish(attempt)

        f1, f2, f3 = step(0), step(1), step(2)
        for attempts in (f3, f2, f1):
            back(attempts)
        f1, f2 = step(0), step(1)
        back(f1)
        f3 = step(2)
        back(f2)
        back(f3)


def odd_numbers_of_calls(seat: Seat) -> None:
    """Any number of dispatches in flight; a call that is refused on one rank only counts on none."""
    problem = _problem(seat)
    too_many = torch.zeros(problem.config.num_max_tokens_per_rank + 1, problem.config.hidden_dim, device=seat.device)
    orders = ("AaBb", "ABab", "ABba", "ABCabc", "AaBCbc", "ABCcba")
    with seat.open(problem.config) as dispatcher:
        for number, order in enumerate(orders):
            in_flight = {}
            for letter in order:
                if letter.isupper():
                    in_flight[letter] = send(dispatcher, problem, seat.rank, seat.device)
                else:
                    finish(in_flight[letter.upper()].home(dispatcher))
            if seat.rank == number % seat.size:
                _assert_refused(dispatcher, too_many, problem)


def _assert_refused(dispatcher: TokenDispatcher, x: torch.Tensor, problem: Problem) -> None:
    top_k = problem.config.top_k
    try:
        dispatcher.dispatch(x, x.new_zeros(len(x), top_k), x.new_zeros(len(x), top_k, dtype=torch.int64))
    except InvalidInput:
        return
    raise AssertionError(f"{len(x)} tokens were not refused")


def dispatchers_side_by_side(seat: Seat) -> None:
    """Two dispatchers of different shapes over the same ranks, called in turn while token counts change."""
    small = _problem(seat)
    wide = seat.problem("K above local experts", dtype=torch.bfloat16, scores="inside", hidden_dim=256)
    with seat.open(small.config) as first, seat.open(wide.config) as second:
        for tokens in (4, 2, 6):
            a = forward(first, _first_tokens(small, tokens), seat.rank, seat.device)
            b = forward(second, _first_tokens(wide, tokens), seat.rank, seat.device)
            check_trial(judge(a, a.backward()))
            check_trial(judge(b, b.backward()))


def _first_tokens(problem: Problem, num_tokens: int) -> Problem:
    names = ("x", "topk_scores", "topk_expert_ids", "grad_out")
    return problem.replace(**{name: tuple(part[:num_tokens] for part in getattr(problem, name)) for name in names})


SCENARIOS = (
    Scenario("sharing", "handles are combined in any order, and twice", combines_in_any_order),
    Scenario("sharing", "layers and micro-batches share a dispatcher", micro_batches),
    Scenario("sharing", "any number of handles in flight; refused calls do not count", odd_numbers_of_calls),
    Scenario("sharing", "dispatchers of different shapes side by side", dispatchers_side_by_side),
)
