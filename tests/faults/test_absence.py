"""Ranks that live and do not take part: a `PeerTimeout` on every other rank, in time, that names exactly them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossdock as cd
from crossdock import recompute
from tests.conftest import Ranks
from tests.faults.conftest import Crowd
from tests.faults.play import LAYER, TIMEOUT_S, Account, assert_named, config, observe, reopen, step, stop_here
from tests.faults.test_disagreement import routed_once

pytestmark = pytest.mark.alone


def idles(dispatcher: cd.TokenDispatcher) -> None:
    """The rank takes no further part until the others are done with it."""


def skips_combine_and_idles(dispatcher: cd.TokenDispatcher) -> None:
    routed_once(dispatcher)


def fails_in_its_experts(dispatcher: cd.TokenDispatcher) -> None:
    with pytest.raises(ZeroDivisionError), dispatcher:
        routed_once(dispatcher)
        raise ZeroDivisionError


def fails_in_its_experts_and_lives_on(dispatcher: cd.TokenDispatcher) -> None:
    with pytest.raises(ZeroDivisionError):
        routed_once(dispatcher)
        raise ZeroDivisionError


def closes_early(dispatcher: cd.TokenDispatcher) -> None:
    dispatcher.close()
    with pytest.raises(cd.ContractViolation, match="closed"):
        step(dispatcher)


def fails_inside_the_call(dispatcher: cd.TokenDispatcher) -> None:
    """Between the header and the rows, as when memory runs out: the wire must not be used for anything again."""

    def out_of_memory(*_: Any) -> None:
        raise MemoryError("no room for the rows")

    setattr(dispatcher._open.transport.wire, "start", out_of_memory)  # type: ignore[attr-defined]  # noqa: B010
    with pytest.raises(MemoryError):
        step(dispatcher)
    with pytest.raises(cd.ContractViolation, match=r"call 2 \(dispatch of .* failed on this rank: MemoryError"):
        step(dispatcher)


def leaves_its_output_out(dispatcher: cd.TokenDispatcher) -> None:
    routed, rows = routed_once(dispatcher)
    dispatcher.layer(LAYER).combine(rows, routed.handle)


def backward(dispatcher: cd.TokenDispatcher) -> None:
    routed, rows = routed_once(dispatcher)
    dispatcher.layer(LAYER).combine(rows, routed.handle).sum().backward()


# What the ranks at fault do instead of one more step, whether they are found at once, and what is said of them.
ABSENCES: dict[Callable[[cd.TokenDispatcher], None], tuple[bool, tuple[str, ...]]] = {
    idles: (False, ("call 2 (dispatch of", "it is alive but has not come; its last call was combine")),
    skips_combine_and_idles: (False, ("call 3 (combine of", "its last call was dispatch of layer")),
    fails_in_its_experts: (True, ("call 3 (combine of", "its process has ended or its dispatcher was closed")),
    fails_in_its_experts_and_lives_on: (False, ("call 3 (combine of", "its last call was dispatch of layer")),
    closes_early: (True, ("call 2 (dispatch of", "its process has ended or its dispatcher was closed")),
    fails_inside_the_call: (False, ("call 2 (dispatch of", "it failed inside dispatch", "an error of its own")),
    leaves_its_output_out: (False, ("call 4 (combine_backward of", "its last call was combine of layer")),
}


def absent(rank: int, at_fault: tuple[int, ...], act: Callable[[cd.TokenDispatcher], None]) -> Account:
    dispatcher = cd.TokenDispatcher(config())
    step(dispatcher)
    if rank in at_fault:
        act(dispatcher)
        account = Account()
    else:
        work = backward if act is leaves_its_output_out else step
        account = observe(dispatcher, lambda: work(dispatcher))
    dist.barrier()
    return reopen(account)


# -- stopped ranks ----------------------------------------------------------------------------------------------------


def with_stopped_ranks(rank: int, at_fault: tuple[int, ...], late_rank: int | None) -> tuple[Account, Account]:
    """Ranks at fault stop themselves; rank 0 or 1, which never is, lets them go on when the others have given up."""
    pids: list[int] = [0] * 4
    dist.all_gather_object(pids, os.getpid())
    dispatcher = cd.TokenDispatcher(config())
    step(dispatcher)
    if rank in at_fault:
        stop_here()
    if rank == late_rank:
        time.sleep(0.8 * TIMEOUT_S)
    account = observe(dispatcher, lambda: step(dispatcher))
    if rank not in at_fault:
        dispatcher.close()  # nobody answers a stopped one any more
    if rank == min(r for r in range(4) if r not in at_fault):
        time.sleep(2.0)  # the late one has its time too
        for stopped in at_fault:
            os.kill(pids[stopped], signal.SIGCONT)
    dist.barrier()
    return account, reopen(Account())


# -- late ranks -------------------------------------------------------------------------------------------------------


def late(rank: int, late_s: dict[int, float]) -> tuple[Account, Account]:
    dispatcher = cd.TokenDispatcher(config())
    step(dispatcher)
    time.sleep(late_s.get(rank, 0.0))
    account = observe(dispatcher, lambda: step(dispatcher))
    dist.barrier()
    return account, reopen(Account())


# -- the cases, side by side ------------------------------------------------------------------------------------------

AT_FAULT: list[tuple[int, ...]] = [(2,), (0, 3)]
STOPPED: list[tuple[tuple[int, ...], int | None]] = [((3,), None), ((0, 1), None), ((1,), 2)]
TOO_LATE = (0, 2)

Ran = dict[object, Future[list[Any]]]


@pytest.fixture(scope="module")
def ran(crowd: Crowd) -> Ran:
    runs: Ran = {(act, at_fault): crowd.run(absent, at_fault, act) for act in ABSENCES for at_fault in AT_FAULT}
    runs |= {("stopped", *case): crowd.run(with_stopped_ranks, *case) for case in STOPPED}
    runs |= {("too late", rank): crowd.run(late, {rank: TIMEOUT_S + 1.3}) for rank in TOO_LATE}
    runs["in time"] = crowd.run(late, {0: 0.3, 1: TIMEOUT_S - 0.6})
    return runs


@pytest.mark.parametrize("at_fault", AT_FAULT, ids=str)
@pytest.mark.parametrize("act", ABSENCES, ids=lambda act: act.__name__)
def test_ranks_that_do_not_take_part(ran: Ran, act: Callable[[cd.TokenDispatcher], None], at_fault: tuple[int, ...]):
    at_once, words = ABSENCES[act]
    accounts = ran[act, at_fault].result()
    assert all(account.reopened for account in accounts)
    survivors = {rank: account for rank, account in enumerate(accounts) if rank not in at_fault}
    assert_named(survivors, at_fault, "PeerTimeout", *words, f"timeout_s is {TIMEOUT_S:g}")
    if at_once:
        assert all(account.took_s < TIMEOUT_S + 0.4 for account in survivors.values())


@pytest.mark.parametrize(("at_fault", "late_rank"), STOPPED, ids=["3", "0, 1", "1 while 2 is late"])
def test_stopped_ranks(ran: Ran, at_fault: tuple[int, ...], late_rank: int | None):
    accounts = ran["stopped", at_fault, late_rank].result()
    assert all(after.reopened for _, after in accounts)
    survivors = {rank: account for rank, (account, _) in enumerate(accounts) if rank not in at_fault}
    assert_named(
        survivors, at_fault, "PeerTimeout", LAYER, "it does not answer (stopped, or its host cannot be reached"
    )
    stopped = {rank: accounts[rank][0] for rank in at_fault}  # they go on when it is too late, and find what was agreed
    assert_named(stopped, at_fault, "PeerTimeout", LAYER, "the others have given it up")


def test_a_rank_that_is_late_by_less_than_the_limit_is_waited_for(ran: Ran):
    accounts = ran["in time"].result()
    assert all(account.error == "" and after.reopened for account, after in accounts)


@pytest.mark.parametrize("late_rank", TOO_LATE)
def test_a_rank_that_comes_too_late_learns_that_it_was_given_up(ran: Ran, late_rank: int):
    """Everyone names it, itself included; it learns so at once, and nothing it computes then is taken for a result."""
    accounts = {rank: account for rank, (account, _) in enumerate(ran["too late", late_rank].result())}
    assert_named(accounts, (late_rank,), "PeerTimeout", "call 2 (dispatch of", LAYER)
    assert accounts[late_rank].took_s < 0.5
    assert "the others have given it up" in accounts[late_rank].message


def late_once_then_in_time(rank: int) -> list[str]:
    """B94: the limit is a setting; what is too late with one is in time with another."""
    errors = []
    for timeout_s in (0.8, 6.0):
        dispatcher = cd.TokenDispatcher(config(num_experts=4, timeout_s=timeout_s))
        step(dispatcher)
        time.sleep(2.0 * rank)
        errors.append(observe(dispatcher, lambda d=dispatcher: step(d)).error)  # type: ignore[misc]
        dist.barrier()
    return errors


def test_the_limit_is_what_was_set(ranks: Ranks):
    assert ranks(2).run(late_once_then_in_time) == [["PeerTimeout", ""]] * 2


# -- the caller's own collectives (B92) -------------------------------------------------------------------------------


def train_with_reductions_in_backward(rank: int, how_often: float) -> bool:
    """A hook reduces on the group that dispatchers were given, while ranks fall behind by up to 50 ms.

    Args:
        rank: this one.
        how_often: the share of places where a rank may dawdle and does.
    """
    generator = torch.Generator().manual_seed(rank)

    def dawdle() -> None:
        chance, share = torch.rand(2, generator=generator).tolist()
        time.sleep(0.05 * share if chance < how_often else 0.0)

    def layer(dispatcher: cd.TokenDispatcher, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        routed = dispatcher.dispatch(x, torch.ones(3, 2), ids)
        dawdle()
        return dispatcher.combine(routed.rows, routed.handle)

    settings = [config(num_experts=4, equal_token_counts=equal, timeout_s=30) for equal in (False, True)]
    with cd.TokenDispatcher(settings[0]) as plain, cd.TokenDispatcher(settings[1]) as declared:
        for turn in range(200):
            x = torch.full((3, 8), float(rank + 1), requires_grad=True)
            x.register_hook(lambda grad: dist.all_reduce(grad) or grad)
            ids = torch.tensor([[0, 3], [2, 1], [turn % 4, -1]])
            out = recompute.checkpoint(layer, declared if turn % 2 else plain, x, ids)
            dawdle()
            out.sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad[:, 0], torch.tensor([4.0, 4.0, 2.0]))  # two ranks, a slot each
    return True


@pytest.mark.parametrize("how_often", [0.02, pytest.param(1.0, marks=pytest.mark.full)])
def test_reductions_of_the_caller_on_the_same_group(ranks: Ranks, how_often: float):
    assert ranks(2).run(train_with_reductions_in_backward, how_often) == [True, True]
