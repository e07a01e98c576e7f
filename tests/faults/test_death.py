"""Ranks that die: before a call, in the middle of one, while others compute, together and one after the other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import crossdock as cd
from crossdock.testing import RankResult, start_ranks
from tests.faults.conftest import Crowd
from tests.faults.play import (
    LAYER,
    LIMIT_S,
    TIMEOUT_S,
    Account,
    assert_named,
    config,
    die_here,
    observe,
    reopen,
    step,
    stop_here,
)
from tests.faults.test_disagreement import routed_once
from tests.faults.test_opening import open_alone

pytestmark = pytest.mark.alone


def exits_at_once(dispatcher: cd.TokenDispatcher) -> None:
    os._exit(3)


def is_killed(dispatcher: cd.TokenDispatcher) -> None:
    die_here()


def is_terminated(dispatcher: cd.TokenDispatcher) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def is_killed_between_header_and_rows(dispatcher: cd.TokenDispatcher) -> None:
    setattr(dispatcher._open.transport.wire, "start", lambda *_: die_here())  # type: ignore[attr-defined]  # noqa: B010
    step(dispatcher)


def is_killed_before_its_rows_of_combine(dispatcher: cd.TokenDispatcher) -> None:
    routed, rows = routed_once(dispatcher)
    setattr(dispatcher._open.transport.wire, "start", lambda *_: die_here())  # type: ignore[attr-defined]  # noqa: B010
    dispatcher.layer(LAYER).combine(rows, routed.handle)


def is_killed_in_its_experts(dispatcher: cd.TokenDispatcher) -> None:
    routed_once(dispatcher)
    time.sleep(0.1)
    die_here()


# How the ranks at fault end, and the call in which the others learn of it.
DEATHS: dict[Callable[[cd.TokenDispatcher], None], str] = {
    exits_at_once: "call 2 (dispatch of",
    is_killed: "call 2 (dispatch of",
    is_terminated: "call 2 (dispatch of",
    is_killed_between_header_and_rows: "call 2 (dispatch of",
    is_killed_before_its_rows_of_combine: "call 3 (combine of",
    is_killed_in_its_experts: "call 3 (combine of",
}


def with_deaths(
    rank: int,
    act: Callable[[cd.TokenDispatcher], None],
    at_fault: tuple[int, ...],
    apart_s: float,
    late_rank: int | None,
) -> Account:
    survivors = [r for r in range(4) if r not in at_fault]
    group = dist.new_group(survivors)
    dispatcher = cd.TokenDispatcher(config())
    step(dispatcher)
    if rank in at_fault:
        time.sleep(apart_s * at_fault.index(rank))
        act(dispatcher)
    if rank == late_rank:
        time.sleep(0.8 * TIMEOUT_S)
    account = observe(dispatcher, lambda: step(dispatcher))
    return reopen(account, group) if 12 % len(survivors) == 0 else account


def survivors_of(results: list[RankResult], at_fault: tuple[int, ...]) -> dict[int, Any]:
    for rank in at_fault:
        assert results[rank].exit_code is not None, results[rank]
    survivors = {result.rank: result.value for result in results if result.rank not in at_fault}
    assert all(account is not None for account in survivors.values()), "\n".join(map(str, results))
    return survivors


# -- deaths at any moment ---------------------------------------------------------------------------------------------


def step_for_ever(rank: int, begun: Path) -> Account:
    dispatcher = cd.TokenDispatcher(config())

    def train() -> None:
        while True:
            step(dispatcher)
            begun.touch()

    return observe(dispatcher, train)


# -- the process that hosts the store ---------------------------------------------------------------------------------


def with_a_dead_store(rank: int, act: Callable[[], Any]) -> tuple[Account, Account]:
    dispatcher = cd.TokenDispatcher(config())
    step(dispatcher)
    if rank == 0:
        act()
    return observe(dispatcher, lambda: step(dispatcher)), open_alone()


def play(fn: Callable[..., Any], *args: Any, store_rank: int | None = None) -> list[RankResult]:
    with start_ranks(fn, 4, *args, store_rank=store_rank) as started:
        return started.results(timeout_s=30)


def play_with_a_stopped_store() -> list[RankResult]:
    with start_ranks(with_a_dead_store, 4, stop_here, store_rank=0) as started:
        deadline = time.monotonic() + 3 * LIMIT_S
        results = started.results(timeout_s=0.2)
        while any(result.silent for result in results[1:]) and time.monotonic() < deadline:
            results = started.results(timeout_s=0.2)
        return results


def kill_two(wait_s: float, begun: Path) -> list[RankResult]:
    with start_ranks(step_for_ever, 4, begun) as started:
        deadline = time.monotonic() + 20.0
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(wait_s)
        started.kill(3)
        time.sleep(wait_s / 3)
        started.kill(0)
        return started.results(timeout_s=30)


# -- the cases, side by side ------------------------------------------------------------------------------------------

Act = Callable[[cd.TokenDispatcher], None]
TOGETHER: list[tuple[Act, tuple[int, ...]]] = [(act, (2,)) for act in DEATHS]
TOGETHER += [(is_killed, (0, 3)), (is_killed_between_header_and_rows, (1, 2))]
APART_S = (0.01, 0.3)
LATE_RANKS = (0, 3)
MOMENTS_S = (0.01, 0.05, 0.11, 0.173)

Ran = dict[object, Future[list[RankResult]]]


@pytest.fixture(scope="module")
def ran(crowd: Crowd, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("moments")
    runs: Ran = {"store stops": crowd.submit(play_with_a_stopped_store)}
    runs |= {(act, who): crowd.submit(play, with_deaths, act, who, 0.0, None) for act, who in TOGETHER}
    runs |= {("apart", s): crowd.submit(play, with_deaths, is_killed, (1, 3), s, None) for s in APART_S}
    runs |= {("late", rank): crowd.submit(play, with_deaths, is_killed, (2,), 0.0, rank) for rank in LATE_RANKS}
    runs |= {("moment", s): crowd.submit(kill_two, s, folder / f"begun{s}") for s in MOMENTS_S}
    runs["store dies"] = crowd.submit(partial(play, with_a_dead_store, die_here, store_rank=0))
    return runs


@pytest.mark.parametrize(
    ("act", "at_fault"), TOGETHER, ids=lambda value: value.__name__ if callable(value) else str(value)
)
def test_ranks_that_die(ran: Ran, act: Callable[[cd.TokenDispatcher], None], at_fault: tuple[int, ...]):
    accounts = survivors_of(ran[act, at_fault].result(), at_fault)
    assert_named(accounts, at_fault, "PeerTimeout", DEATHS[act], LAYER, "its process has ended")
    assert all(account.reopened for account in accounts.values())


@pytest.mark.parametrize("apart_s", APART_S)
def test_ranks_that_die_a_little_apart_are_both_named(ran: Ran, apart_s: float):
    accounts = survivors_of(ran["apart", apart_s].result(), (1, 3))
    assert_named(accounts, (1, 3), "PeerTimeout", "call 2 (dispatch of", LAYER)


@pytest.mark.parametrize("late_rank", LATE_RANKS)
def test_a_slow_rank_is_not_blamed_for_another_ones_death(ran: Ran, late_rank: int):
    """The others are done with the fault, and have closed, when the slow one comes; it names the same rank, at once."""
    accounts = survivors_of(ran["late", late_rank].result(), (2,))
    assert_named(accounts, (2,), "PeerTimeout", "call 2 (dispatch of", LAYER)
    assert all(account.reopened for account in accounts.values())
    assert accounts[late_rank].took_s < 0.5


@pytest.mark.parametrize("wait_s", MOMENTS_S)
def test_ranks_killed_at_any_moment(ran: Ran, wait_s: float):
    accounts = survivors_of(ran["moment", wait_s].result(), (0, 3))
    assert_named(accounts, (0, 3), "PeerTimeout", limit_s=30)


def test_the_rank_that_hosts_the_store_dies(ran: Ran):
    accounts = survivors_of(ran["store dies"].result(), (0,))
    assert_named({rank: first for rank, (first, _) in accounts.items()}, (0,), "PeerTimeout", LAYER, "call 2",
                 "the rendezvous store at", "is gone too", "until the job is started again")  # fmt: skip
    for _, attempt in accounts.values():
        assert attempt.error == "PeerTimeout"
        assert "the rendezvous store does not answer, the process that hosts it may be dead" in attempt.message
        assert attempt.took_s < 5.0


def test_the_rank_that_hosts_the_store_is_stopped(ran: Ran):
    results = ran["store stops"].result()
    accounts = {result.rank: result.value for result in results[1:]}
    assert_named({rank: first for rank, (first, _) in accounts.items()}, (0,), "PeerTimeout", LAYER, "call 2")
    for _, attempt in accounts.values():
        assert attempt.error == "PeerTimeout"
        assert "the rendezvous store has not answered for" in attempt.message
        assert attempt.took_s < LIMIT_S
