"""Ranks that do not come to a guard's step: named to every other rank, in time, and nothing is applied."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossdock as cd
from crossdock.group.fingerprint import CallFacts
from crossdock.testing import start_ranks
from tests.conftest import Ranks
from tests.faults.play import TIMEOUT_S, Account, assert_named, config, die_here, step

pytestmark = pytest.mark.alone


def guarded(dispatcher: cd.TokenDispatcher, *groups: Any) -> tuple[cd.OverflowGuard, torch.nn.Parameter]:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return cd.OverflowGuard(dispatcher, torch.optim.SGD([weight], lr=0.5), groups), weight


def observe(guard: cd.OverflowGuard, weight: torch.nn.Parameter, steps: int = 1) -> Account:
    """How a step ends that others do not come to; nothing of it is applied, and the next one fails alike."""
    begun, before = time.monotonic(), weight.tolist()
    try:
        for _ in range(steps):
            before = weight.tolist()
            begun = time.monotonic()
            guard.step()
    except (cd.PeerTimeout, cd.ContractViolation) as error:
        took_s = time.monotonic() - begun
        assert weight.tolist() == before, "the step was applied"
        again = [_fault_of(guard.step) for _ in range(2)]
        repeats = again == [(type(error).__name__, str(error))] * 2
        return Account(
            error=type(error).__name__, ranks=error.ranks, message=str(error), took_s=took_s, repeats=repeats
        )
    return Account()


def _fault_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except cd.CrossdockError as error:
        return type(error).__name__, str(error)
    return "", ""


def absent(rank: int, at_fault: tuple[int, ...], num_before: int) -> Account:
    """Ranks at fault leave one step out, wait until the others are done with it, and come too late."""
    with cd.TokenDispatcher(config()) as dispatcher:
        guard, weight = guarded(dispatcher)
        for _ in range(num_before):
            step(dispatcher)
            guard.step()
        step(dispatcher)
        account = None if rank in at_fault else observe(guard, weight)
        dist.barrier()
        account = account or observe(guard, weight)
        dist.barrier()
        step(dispatcher)  # the dispatcher itself is as good as before
        return account


ONE_GUARD = "step 2 (global ranks [{}]) of an overflow guard"


@pytest.mark.parametrize(("size", "at_fault"), [(2, (1,)), (4, (0,)), (4, (1, 3))])
def test_ranks_that_leave_a_step_out_or_come_too_late(ranks: Ranks, size: int, at_fault: tuple[int, ...]):
    accounts = dict(enumerate(ranks(size).run(absent, at_fault, 2)))
    survivors = {rank: account for rank, account in accounts.items() if rank not in at_fault}
    where = ONE_GUARD.format(", ".join(map(str, range(size))))
    told = (f"were missing in {where}", "it is alive but has not come; its last call was step 1 (")
    assert_named(survivors, at_fault, "PeerTimeout", *told)
    assert all(account.took_s > TIMEOUT_S for account in survivors.values())
    for rank in at_fault:
        late = f"this rank ({rank}) is one of them: the others have given it up"
        assert_named({rank: accounts[rank]}, at_fault, "PeerTimeout", where, late, limit_s=TIMEOUT_S)


def leaves_the_first_step_out(rank: int) -> Account:
    with cd.TokenDispatcher(config()) as dispatcher:
        guard, weight = guarded(dispatcher)
        step(dispatcher)
        account = Account() if rank == 0 else observe(guard, weight)
        dist.barrier()
        step(dispatcher)
        return account


def test_a_rank_that_leaves_the_first_step_out(ranks: Ranks):
    first, *others = ranks(4).run(leaves_the_first_step_out)
    assert first == Account()
    words = "ranks [0] did not open an overflow guard (at its first step) over global ranks [0, 1, 2, 3] within"
    assert_named(dict(enumerate(others, 1)), (0,), "PeerTimeout", words)


def steps_more_often(rank: int, at_fault: int) -> Account:
    """One rank makes step 1 at once; the others come to theirs when they have dispatched once more."""
    with cd.TokenDispatcher(config()) as dispatcher:
        guard, weight = guarded(dispatcher)
        step(dispatcher)
        guard.step()
        if rank != at_fault:
            time.sleep(0.2)
            dispatcher._open.session.num_calls += 2  # as if it had: they cannot dispatch without that rank
        account = observe(guard, weight)
        dist.barrier()
        return account


def test_steps_of_different_points_of_training_do_not_meet(ranks: Ranks):
    accounts = ranks(4).run(steps_more_often, 2)
    words = ("ranks [2] came to step 1 (global ranks", "had made [4, 4, 2, 4] calls before it, by rank")
    assert_named(dict(enumerate(accounts)), (2,), "ContractViolation", *words)


def dies(rank: int, at_fault: int) -> Account:
    dispatcher = cd.TokenDispatcher(config(timeout_s=20.0))
    guard, weight = guarded(dispatcher)
    step(dispatcher)
    guard.step()
    if rank == at_fault:
        die_here()
    return observe(guard, weight)


def test_a_rank_that_dies_is_named_at_once():
    with start_ranks(dies, 4, 1) as started:
        results = started.results(timeout_s=40.0)
    survivors = {result.rank: result.value for result in results if result.rank != 1}
    assert_named(survivors, (1,), "PeerTimeout", "step 1 (global ranks", "its process has ended", limit_s=6.0)


def drops(rank: int) -> Account:
    """Rank 1 drops its guard, and makes another."""
    with cd.TokenDispatcher(config(timeout_s=20.0)) as dispatcher:
        guard, weight = guarded(dispatcher)
        step(dispatcher)
        guard.step()
        if rank == 1:
            del guard
            guarded(dispatcher)
        account = Account() if rank == 1 else observe(guard, weight)
        dist.barrier()
        return account


def test_a_guard_that_is_dropped_is_named_as_what_it_is(ranks: Ranks):
    first, _ = ranks(2).run(drops)
    assert_named({0: first}, (1,), "PeerTimeout", "rank 1: its process has ended or its overflow guard was dropped")


def stepped_elsewhere(rank: int) -> list[str]:
    """What a forked child and a second thread are told that step while this thread may."""
    told: list[str] = []
    with cd.TokenDispatcher(config(timeout_s=20.0)) as dispatcher:
        guard, _ = guarded(dispatcher)
        step(dispatcher)
        guard.step()
        told.append(_in_child(lambda: _fault_of(guard.step)[1]))
        agreement: Any = guard._agreements[0]
        thread = threading.Thread(target=lambda: told.append(_fault_of(guard.step)[1]))
        with agreement._session.call(CallFacts(-1, "step", "1 (here)")):
            thread.start()
            thread.join()
        dist.barrier()
    return told


def _in_child(call: Callable[[], str]) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, call().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_and_a_second_thread_are_told_that_it_is_a_guard(ranks: Ranks):
    for child, thread in ranks(2).run(stepped_elsewhere):
        refusal = r"this overflow guard was opened by process \d+; a forked child \(\d+\) cannot use it"
        assert re.fullmatch(refusal, child)
        assert thread == (
            "step 1 (global ranks [0, 1]) of an overflow guard was entered from a second thread while step 1 (here) of"
            " an overflow guard is running; one overflow guard serves one thread at a time"
        )


# -- several groups ---------------------------------------------------------------------------------------------------


def of_two_replicas(rank: int, at_fault: int) -> Account:
    """EP 2 x DP 2: rank 3 leaves a step out; 2 waits in the EP group, 1 in that of data parallelism, 0 for rank 2."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    own, across = (
        next(groups[ranks] for ranks in pair if rank in ranks) for pair in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    )
    with cd.TokenDispatcher(config(num_experts=8), own) as dispatcher:
        guard, weight = guarded(dispatcher, own, across)
        for _ in range(2):
            step(dispatcher)
            guard.step()
        account = Account() if rank == at_fault else observe(guard, weight)
        dist.barrier()
        return account


def test_who_waits_elsewhere_is_not_taken_for_missing(ranks: Ranks):
    zero, one, two, three = ranks(4).run(of_two_replicas, 3)
    assert three == Account()
    assert_named({2: two}, (1,), "PeerTimeout", "ranks [1] were missing in step 2 (global ranks [2, 3])")
    assert_named({1: one}, (1,), "PeerTimeout", "ranks [1] were missing in step 2 (global ranks [1, 3])")
    told = (
        "although every rank still answers: rank 1: it gave up: PeerTimeout: ranks [1] were missing in step 2 (global"
    )
    assert_named({0: zero}, (), "PeerTimeout", "step 2 (global ranks [0, 2]) of an overflow guard failed", told)


def broken_in_the_middle(rank: int) -> Account:
    """Rank 0's dispatcher tells of an overflow while rank 1 waits for it in the step: both raise that."""
    capacity = cd.RowCapacity.rows(4)
    with cd.TokenDispatcher(config(row_capacity=capacity, timeout_s=20.0)) as dispatcher:
        guard, weight = guarded(dispatcher)
        guard.step()
        ids = torch.zeros(8, 2, dtype=torch.int64)
        dispatcher.dispatch(torch.ones(8, 8), torch.ones(8, 2), ids)
        time.sleep(0.5 * (rank == 0))
        before, begun = weight.tolist(), time.monotonic()
        try:
            guard.step()
            while time.monotonic() < begun + 10.0:
                dispatcher.check()
        except cd.CapacityOverflow as error:
            assert rank == 0 or weight.tolist() == before
            dispatcher._open.close()
            return Account(error="CapacityOverflow", ranks=error.ranks, message=str(error))
    return Account()


def test_a_dispatcher_s_own_fault_goes_first(ranks: Ranks):
    first, second = ranks(2).run(broken_in_the_middle)
    assert first == second
    assert first.ranks == (0,) and "row_capacity rows(4) had room for 4" in first.message


def swaps(rank: int) -> list[tuple[str, str]]:
    """Two guards over one group, whose first steps rank 1 makes in another order."""
    with cd.TokenDispatcher(config()) as first, cd.TokenDispatcher(config()) as second:
        guards = [guarded(first)[0], guarded(second)[0]]
        return [_fault_of(guard.step) for guard in (guards if rank == 0 else guards[::-1])]


def test_guards_that_step_in_another_order_do_not_pair_up(ranks: Ranks):
    """Or a truncated step would be applied on some ranks."""
    for told in ranks(2).run(swaps):
        for error, words in told:
            assert error == "ContractViolation" and "ranks [1] open another overflow guard than ranks [0]" in words


def turns_round(rank: int) -> tuple[str, str]:
    """A mesh of two by two; rank 1 names its column before its row."""
    lines = [dist.new_group(line) for line in ([0, 1], [2, 3], [0, 2], [1, 3])]
    alone = [dist.new_group([each]) for each in range(4)][rank]
    groups = [lines[rank // 2], lines[2 + rank % 2]]
    with cd.TokenDispatcher(config(), alone, backend="local") as dispatcher:
        return _fault_of(guarded(dispatcher, *(groups[::-1] if rank == 1 else groups))[0].step)


def test_groups_that_a_rank_turns_round_are_refused(ranks: Ranks):
    told = ranks(4).run(turns_round)
    assert {error for error, _ in told} <= {"ContractViolation", "PeerTimeout"}
    assert "place in groups is 0 on rank 0, 1 on rank 1" in " ".join(words for _, words in told)
