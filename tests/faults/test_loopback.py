"""Faults among ranks of one process: the same errors, naming the same ranks, on the loopback backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import crossdock as cd
from crossdock.testing import LoopbackGroup
from tests.faults.play import LAYER, TIMEOUT_S, Account, Batch, assert_named, config, observe, step

pytestmark = pytest.mark.alone


def on_threads(work: Callable[[int, Any], Account], group: LoopbackGroup) -> dict[int, Account]:
    """`work(rank, member)` on a thread a rank."""
    with ThreadPoolExecutor(group.size) as pool:
        return dict(enumerate(pool.map(lambda rank: work(rank, group.member(rank)), range(group.size))))


def opened(member: Any, **changes: Any) -> cd.TokenDispatcher:
    dispatcher = cd.TokenDispatcher(config(**changes), member)
    step(dispatcher)
    return dispatcher


def open_only(member: Any, **changes: Any) -> Account:
    begun = time.monotonic()
    try:
        cd.TokenDispatcher(config(**changes), member).close()
    except (cd.PeerTimeout, cd.ContractViolation) as error:
        took_s = time.monotonic() - begun
        return Account(error=type(error).__name__, ranks=error.ranks, message=str(error), took_s=took_s)
    return Account()


@pytest.mark.parametrize("at_fault", [(0,), (1, 3)], ids=str)
def test_a_rank_that_does_not_come(at_fault: tuple[int, ...]):
    group = LoopbackGroup(4)
    done = threading.Barrier(4)

    def work(rank: int, member: Any) -> Account:
        dispatcher = opened(member)
        account = Account() if rank in at_fault else observe(dispatcher, lambda: step(dispatcher))
        done.wait(10.0)
        return account

    accounts = on_threads(work, group)
    survivors = {rank: account for rank, account in accounts.items() if rank not in at_fault}
    assert_named(survivors, at_fault, "PeerTimeout", "call 2 (dispatch of", LAYER)
    assert all(open_only(member).error == "" for member in [LoopbackGroup(1).member(0)])
    again = on_threads(lambda rank, member: observe(opened(member), lambda: None), group)
    assert all(account.error == "" for account in again.values())


def test_a_rank_that_closes_early_is_not_waited_for():
    def work(rank: int, member: Any) -> Account:
        dispatcher = opened(member)
        if rank == 2:
            dispatcher.close()
            return Account()
        return observe(dispatcher, lambda: step(dispatcher))

    accounts = on_threads(work, LoopbackGroup(4))
    del accounts[2]
    assert_named(accounts, (2,), "PeerTimeout", "call 2 (dispatch of", limit_s=TIMEOUT_S)


def test_a_rank_that_comes_too_late_gets_no_result():
    def work(rank: int, member: Any) -> Account:
        dispatcher = opened(member)
        time.sleep((TIMEOUT_S + 0.3) * (rank == 1))
        return observe(dispatcher, lambda: step(dispatcher))

    assert_named(on_threads(work, LoopbackGroup(3 + 1)), (1,), "PeerTimeout", "call 2 (dispatch of")


@pytest.mark.parametrize("at_fault", [(0,), (1, 2)], ids=str)
def test_ranks_that_call_something_else(at_fault: tuple[int, ...]):
    def work(rank: int, member: Any) -> Account:
        dispatcher = opened(member)
        return observe(dispatcher, lambda: step(dispatcher, num_tokens_per_rank=9 if rank in at_fault else 8))

    accounts = on_threads(work, LoopbackGroup(4 + len(at_fault) // 2 * 4))
    assert_named(accounts, at_fault, "ContractViolation", "call 2 (dispatch of", "num_tokens_per_rank is", limit_s=1.0)


@pytest.mark.parametrize("at_fault", [(0,), (1, 3)], ids=str)
def test_ranks_that_open_something_else(at_fault: tuple[int, ...]):
    group = LoopbackGroup(4)
    accounts = on_threads(lambda rank, member: open_only(member, top_k=1 + (rank in at_fault)), group)
    for account in accounts.values():
        assert (account.error, account.ranks) == ("ContractViolation", at_fault)
        assert "top_k is" in account.message
    again = on_threads(lambda rank, member: observe(opened(member), lambda: None), group)
    assert all(account.error == "" for account in again.values())


def test_a_rank_that_does_not_open():
    group = LoopbackGroup(4)
    accounts = on_threads(lambda rank, member: Account() if rank == 3 else open_only(member), group)
    for rank in range(3):
        assert (accounts[rank].error, accounts[rank].ranks) == ("PeerTimeout", (3,))
        assert "ranks [3] did not open a dispatcher" in accounts[rank].message


def test_two_threads_in_one_dispatcher():
    """The second thread is refused, with the call that is running; the call itself ends as if nothing had been."""
    group = LoopbackGroup(2)
    inside = threading.Event()

    def work(rank: int, member: Any) -> Account:
        dispatcher = opened(member)
        batch = Batch.of(rank, 4)
        if rank == 1:
            inside.wait(5.0)
            time.sleep(0.3)
            return observe(dispatcher, lambda: step(dispatcher, num_tokens=4))

        def intrude() -> None:
            inside.set()
            time.sleep(0.15)
            with pytest.raises(cd.ContractViolation, match="entered from a second thread while dispatch of layer"):
                dispatcher.dispatch(batch.x, batch.scores, batch.ids)

        intruder = threading.Thread(target=intrude)
        intruder.start()
        account = observe(dispatcher, lambda: step(dispatcher, num_tokens=4))
        intruder.join(5.0)
        return account

    assert all(account.error == "" for account in on_threads(work, group).values())
