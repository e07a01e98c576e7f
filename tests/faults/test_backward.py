"""Ranks that die or stop inside a backward, as they begin to send its rows or its scalars; and under `exact`."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch.distributed as dist

import crossdock as cd
from tests.faults.conftest import Crowd
from tests.faults.play import LAYER, Account, assert_named, config, die_here, observe, reopen, step, stop_here
from tests.faults.test_death import play, survivors_of
from tests.faults.test_disagreement import routed_once

pytestmark = pytest.mark.alone

# Exchanges behind a dispatch, in their order, and the calls that they belong to: a whole step of two came before.
EXCHANGES = {
    "rows of combine": "call 3 (combine of",
    "rows of combine_backward": "call 4 (combine_backward of",
    "scalars of combine_backward": "call 4 (combine_backward of",
    "rows of dispatch_backward": "call 5 (dispatch_backward of",
    "scalars of dispatch_backward": "call 5 (dispatch_backward of",
}


def fall_at(dispatcher: cd.TokenDispatcher, exchange: str, fate: Callable[[], None]) -> None:
    """Let this rank fall as it begins an exchange; the call's header is behind it."""
    wire: Any = dispatcher._open.transport.wire  # type: ignore[attr-defined]
    start, begun = wire.start, itertools.cycle(EXCHANGES)

    def starting(*args: Any) -> Any:
        if next(begun) == exchange:
            fate()
        return start(*args)

    wire.start = starting


def falling(rank: int, exchange: str, fate: Callable[[], None], at_fault: tuple[int, ...], reduction: str) -> Account:
    """A step and half of another one, then combine and backward, in which the ranks at fault fall."""
    dispatcher = cd.TokenDispatcher(config(reduction=reduction))
    step(dispatcher)
    routed, rows = routed_once(dispatcher)
    if rank in at_fault:
        fall_at(dispatcher, exchange, fate)
    layer = dispatcher.layer(LAYER)
    return observe(dispatcher, lambda: layer.combine(rows, routed.handle).sum().backward())


def dying(rank: int, exchange: str, at_fault: tuple[int, ...], reduction: str) -> Account:
    survivors = dist.new_group([r for r in range(4) if r not in at_fault])
    return reopen(falling(rank, exchange, die_here, at_fault, reduction), survivors)


def stopping(rank: int, exchange: str, at_fault: tuple[int, ...], reduction: str) -> Account:
    """Rank 1, which is never at fault, lets the others go on when those that are left have given up."""
    pids: list[int] = [0] * 4
    dist.all_gather_object(pids, os.getpid())
    account = falling(rank, exchange, stop_here, at_fault, reduction)
    if rank == 1:
        time.sleep(0.5)
        for stopped in at_fault:
            os.kill(pids[stopped], signal.SIGCONT)
    dist.barrier()
    return reopen(account)


# -- the cases, side by side ------------------------------------------------------------------------------------------

Case = tuple[str, tuple[int, ...], str]
ALL: list[Case] = list(itertools.product(EXCHANGES, ((2,), (0, 3)), ("fast", "exact")))
USUAL: list[Case] = [
    ("rows of combine_backward", (2,), "fast"),
    ("scalars of combine_backward", (0, 3), "exact"),
    ("rows of dispatch_backward", (0, 3), "fast"),
    ("scalars of dispatch_backward", (2,), "exact"),
]
each_case = pytest.mark.parametrize(
    "case", [case if case in USUAL else pytest.param(case, marks=pytest.mark.full) for case in ALL], ids=str
)

Ran = dict[object, Future[list[Any]]]


@pytest.fixture(scope="module")
def ran(crowd: Crowd, full: bool) -> Ran:
    cases = ALL if full else USUAL
    runs: Ran = {("dying", case): crowd.submit(play, dying, *case) for case in cases}
    return runs | {("stopping", case): crowd.run(stopping, *case) for case in cases}


@each_case
def test_ranks_that_die_in_an_exchange(ran: Ran, case: Case):
    exchange, at_fault, _ = case
    accounts = survivors_of(ran["dying", case].result(), at_fault)
    assert_named(accounts, at_fault, "PeerTimeout", EXCHANGES[exchange], LAYER, "its process has ended")
    assert all(account.reopened for account in accounts.values())


@each_case
def test_ranks_that_stop_in_an_exchange(ran: Ran, case: Case):
    exchange, at_fault, _ = case
    accounts = dict(enumerate(ran["stopping", case].result()))
    assert all(account.reopened for account in accounts.values())
    stopped = {rank: accounts.pop(rank) for rank in at_fault}
    assert_named(accounts, at_fault, "PeerTimeout", EXCHANGES[exchange], LAYER, "it does not answer (stopped, or")
    for account in stopped.values():  # it goes on when it is too late, and must not take what it has for a result
        assert account.error == "PeerTimeout"
