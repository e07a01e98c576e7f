"""Groups that share ranks: one within another, opened first, and two that overlap, used by turns."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

import crossdock as cd
from crossdock.testing import Problem, Seat, assert_bit_equal
from crossdock.testing.checks import check_trial, judge
from crossdock.testing.solving import forward, solve
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, problem, random_ids

Ranks = tuple[int, ...]


def trial_of(ranks: Ranks) -> Problem:
    num_tokens = [5 + 2 * rank for rank in ranks]
    return problem(make_config(12, 2), random_ids(num_tokens, 2, 12, seed=sum(ranks)), seed=len(ranks))


class Member:
    """A dispatcher over some ranks on one of them, and its work; every answer is that of the first time, to the bit."""

    def __init__(self, seat: Seat, ranks: Ranks, dispatcher: cd.TokenDispatcher) -> None:
        self._seat, self._rank, self._dispatcher = seat, ranks.index(seat.rank), dispatcher
        self._trial = trial_of(ranks)
        attempt = forward(dispatcher, self._trial, self._rank, seat.device)
        self._first = attempt.backward()
        check_trial(judge(attempt, self._first))

    def work(self) -> None:
        again = solve(self._dispatcher, self._trial, self._rank, self._seat.device)
        for name in ("rows", "out", "grad_x", "grad_scores"):
            assert_bit_equal(getattr(again, name), getattr(self._first, name), name)


def by_turns(seat: Seat, orders: tuple[Ranks, ...], num_turns: int) -> None:
    """Open a dispatcher over each of these ranks in this order and let them work in turn, rank 1 always late."""
    groups = {ranks: seat.group(ranks) for ranks in orders}
    with ExitStack() as stack:
        members = [
            Member(seat, ranks, stack.enter_context(seat.open(trial_of(ranks).config, groups[ranks])))
            for ranks in orders
            if seat.rank in ranks
        ]
        for _ in range(num_turns):
            for member in members:
                time.sleep(0.01 if seat.rank == 1 else 0.0)
                member.work()


@every_backend(4)
def test_some_of_the_ranks_first_and_all_of_them_later(on: On, backend: str, ep_size: int):
    on(backend, 4)(by_turns, ((0, 1, 2), (0, 1, 2, 3)), 10)


@pytest.mark.parametrize("num_turns", [20, pytest.param(100, marks=pytest.mark.full)])
def test_two_groups_that_share_a_rank_by_turns(on: On, num_turns: int):
    """The suite's scenario of such groups runs on every backend; here they go on for longer."""
    on("all_to_all", 4)(by_turns, ((0, 1), (0, 2)), num_turns)
