"""Opening a dispatcher: ranks that ask for something else, do not come, come late, come twice, or die on the way."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossdock as cd
from crossdock.backends.all_to_all import AllToAllBackend
from crossdock.backends.base import Link, Transport, TransportSpec
from crossdock.group.session import Session
from crossdock.testing import RankResult, StartedRanks, run_ranks, start_ranks
from tests.faults.conftest import Crowd
from tests.faults.play import LIMIT_S, TIMEOUT_S, Account, config, die_here, reopen, step, stop_here

pytestmark = pytest.mark.alone


def open_alone(group: Any = None, *, backend: str = "auto", **changes: Any) -> Account:
    """Try to open; what happened, without a step."""
    begun = time.monotonic()
    try:
        cd.TokenDispatcher(config(**changes), group, backend).close()
    except (cd.PeerTimeout, cd.ContractViolation) as error:
        took_s = time.monotonic() - begun
        return Account(error=type(error).__name__, ranks=error.ranks, message=str(error), took_s=took_s)
    return Account(took_s=time.monotonic() - begun)


# -- ranks that ask for something else --------------------------------------------------------------------------------

# Another value for every field of the configuration that ranks must agree on.
OTHERWISE: dict[str, Any] = {
    "num_experts": 16,
    "top_k": 1,
    "hidden_dim": 16,
    "dtype": torch.bfloat16,
    "num_max_tokens_per_rank": 64,
    "expert_alignment": 4,
    "reduction": "exact",
    "equal_token_counts": True,
    "distinct_experts": True,
    "zero_tail": True,
}


def open_otherwise(rank: int, at_fault: tuple[int, ...], allowed: bool = False) -> dict[str, Account]:
    changes: dict[str, Any] = {"num_sms": 3, "timeout_s": 2.5} if allowed else OTHERWISE
    return {field: open_alone(**({field: value} if rank in at_fault else {})) for field, value in changes.items()}


def open_with_another_backend(rank: int, at_fault: tuple[int, ...]) -> Account:
    return open_alone(backend="symmetric" if rank in at_fault else "all_to_all")


def open_with_backend(rank: int) -> str:
    names = ["all_to_all", "loopback"]
    try:
        cd.TokenDispatcher(config(), backend=names[rank == 2]).close()
    except (cd.PeerTimeout, cd.BackendUnavailable) as error:
        return f"{type(error).__name__} {error}"
    return ""


# -- ranks that do not come -------------------------------------------------------------------------------------------


def open_without(rank: int, at_fault: tuple[int, ...]) -> Account:
    account = Account() if rank in at_fault else open_alone()
    dist.barrier()
    return reopen(account)


def open_late(rank: int, late_s: float) -> tuple[Account, Account]:
    """Rank 1 is late; all others try a second time at once."""
    if rank == 1:
        time.sleep(late_s)
    first = open_alone()
    second = Account() if rank == 1 and not first.error else open_alone()
    return first, second


def open_twice(rank: int) -> tuple[Account, Account]:
    """Rank 2 opens a second dispatcher where the others use the first one."""
    dispatcher = cd.TokenDispatcher(config())
    step(dispatcher)
    if rank == 2:
        account = open_alone()
    else:
        begun = time.monotonic()
        with pytest.raises(cd.PeerTimeout) as fault:
            step(dispatcher)
        took_s = time.monotonic() - begun
        account = Account(error="PeerTimeout", ranks=fault.value.ranks, message=str(fault.value), took_s=took_s)
    dispatcher.close()
    dist.barrier()
    return account, reopen(account)


# -- groups (B90, B91) ------------------------------------------------------------------------------------------------


def pass_groups_that_do_not_match(rank: int) -> tuple[Account, Account]:
    """Three pairs, made alike on all ranks; but only ranks 1 and 2 pass the same one."""
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2), (2, 3))}
    account = open_alone(pairs[((0, 1), (1, 2), (1, 2), (2, 3))[rank]])
    dist.barrier()
    return account, reopen(account, pairs[((0, 1), (0, 1), (2, 3), (2, 3))[rank]])


def open_after_unequal_numbers_of_groups(rank: int) -> list[bool | None]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    return [reopen(Account(), pairs[rank // 2]).reopened, reopen(Account()).reopened]


def use_a_group_of_the_last_two(rank: int) -> tuple[int, int] | None:
    pair = dist.new_group([2, 3])
    if rank < 2:
        return None  # takes part in nothing
    with cd.TokenDispatcher(config(num_experts=4, top_k=1), pair) as dispatcher:
        x = torch.arange(1.0, 33.0).reshape(4, 8)
        ids = torch.tensor([[3], [0], [1], [2]])
        routed = dispatcher.dispatch(x, torch.ones(4, 1), ids)
        first = dispatcher.ep_rank * dispatcher.num_local_experts
        factor = torch.tensor([first + 1, first + 2]).repeat_interleave(routed.tokens_per_expert).unsqueeze(1)
        assert torch.equal(dispatcher.combine(routed.rows * factor, routed.handle), x * (ids + 1))
        return dispatcher.ep_rank, first


# -- deaths on the way ------------------------------------------------------------------------------------------------


class FailsToConnect(AllToAllBackend):
    """The real backend, in a process that has agreed to open and then comes to an end."""

    def __init__(self, fate: Callable[[], None]) -> None:
        self.fate = fate

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        time.sleep(0.3)  # all have met by now
        self.fate()
        return super().open(spec, link)


def open_with_failing_peers(rank: int, fate: Callable[[], None], at_fault: tuple[int, ...], when: str) -> Account:
    dist.barrier()
    if rank not in at_fault:
        return open_alone()
    if when == "before":
        fate()
    if when == "offered":  # the others have its offer, and are about to ask it for its status
        setattr(Session, "_find_peers", lambda *_: fate())  # noqa: B010
    cd.TokenDispatcher(config(), backend=FailsToConnect(fate))
    return Account()


def results_of_running(started: StartedRanks, stopped: tuple[int, ...]) -> list[RankResult]:
    """The results, without waiting for ranks that are stopped."""
    deadline = time.monotonic() + LIMIT_S
    results = started.results(timeout_s=0.2)
    while any(r.silent for r in results if r.rank not in stopped) and time.monotonic() < deadline:
        results = started.results(timeout_s=0.2)
    return results


def fall(fate: Callable[[], None], at_fault: tuple[int, ...], when: str) -> list[RankResult]:
    with start_ranks(open_with_failing_peers, 4, fate, at_fault, when) as started:
        return results_of_running(started, at_fault if fate is stop_here else ())


# -- the cases, side by side ------------------------------------------------------------------------------------------

OTHERS: list[tuple[int, ...]] = [(0,), (1, 3)]
ABSENT: list[tuple[int, ...]] = [(0,), (3,), (0, 2)]
WHEN = ("before", "offered", "connecting")
FATES: list[tuple[Callable[[], None], tuple[int, ...]]] = [(die_here, (0,)), (die_here, (1, 2)), (stop_here, (3,))]

Ran = dict[object, Future[list[Any]]]


@pytest.fixture(scope="module")
def ran(crowd: Crowd) -> Ran:
    runs: Ran = {("otherwise", at_fault): crowd.run(open_otherwise, at_fault) for at_fault in OTHERS}
    runs |= {("backend", at_fault): crowd.run(open_with_another_backend, at_fault) for at_fault in OTHERS}
    runs["otherwise, as allowed"] = crowd.run(open_otherwise, (2,), True)
    runs |= {("without", at_fault): crowd.run(open_without, at_fault) for at_fault in ABSENT}
    runs |= {"too late": crowd.run(open_late, TIMEOUT_S + 0.5), "in time": crowd.run(open_late, TIMEOUT_S - 0.7)}
    pooled = (open_with_backend, open_twice, pass_groups_that_do_not_match, use_a_group_of_the_last_two)
    runs |= {fn: crowd.run(fn) for fn in pooled}
    fresh = open_after_unequal_numbers_of_groups  # it leaves groups behind that later ones would trip over
    runs[fresh] = crowd.submit(run_ranks, fresh, 4)
    runs |= {(*fate, when): crowd.submit(fall, *fate, when) for fate in FATES for when in WHEN}
    return runs


@pytest.mark.parametrize("at_fault", OTHERS, ids=str)
def test_every_field_of_the_configuration_is_compared_and_named(ran: Ran, at_fault: tuple[int, ...]):
    for accounts in ran["otherwise", at_fault].result():
        for field, account in accounts.items():
            assert (account.error, account.ranks) == ("ContractViolation", at_fault), account
            assert field in account.message, account
            assert account.took_s < 5.0, account


@pytest.mark.parametrize("at_fault", OTHERS, ids=str)
def test_ranks_that_want_another_backend_are_told_so_on_all(ran: Ran, at_fault: tuple[int, ...]):
    pytest.importorskip("triton", reason="the backend symmetric needs triton, which is published for Linux only")
    accounts = ran["backend", at_fault].result()
    for account in accounts:
        assert (account.error, account.ranks) == ("ContractViolation", at_fault), account
        for rank in range(4):
            assert f"'{'symmetric' if rank in at_fault else 'all_to_all'}' on rank {rank}" in account.message, account
        assert account.took_s < 5.0, account


def test_what_ranks_need_not_agree_on(ran: Ran):
    assert all(
        account.error == "" for accounts in ran["otherwise, as allowed"].result() for account in accounts.values()
    )


def test_a_rank_that_cannot_have_its_backend_is_missed_by_the_others(ran: Ran):
    told = ran[open_with_backend].result()
    assert told[2].startswith("BackendUnavailable")
    assert all(told[rank].startswith("PeerTimeout ranks [2] did not open a dispatcher") for rank in (0, 1, 3))


@pytest.mark.parametrize("at_fault", ABSENT, ids=str)
def test_ranks_that_do_not_open_are_named_by_all_others(ran: Ran, at_fault: tuple[int, ...]):
    accounts = ran["without", at_fault].result()
    for rank, account in enumerate(accounts):
        assert account.reopened
        if rank not in at_fault:
            assert (account.error, account.ranks) == ("PeerTimeout", at_fault), account
            assert f"ranks {list(at_fault)} did not open a dispatcher over global ranks [0, 1, 2, 3]" in account.message
            assert account.took_s < LIMIT_S


def test_a_rank_that_comes_too_late_meets_the_others_next_attempt(ran: Ran):
    accounts = ran["too late"].result()
    for rank in (0, 2, 3):
        assert (accounts[rank][0].error, accounts[rank][0].ranks) == ("PeerTimeout", (1,))
        assert accounts[rank][1].error == ""
    assert accounts[1][0].error == ""


def test_a_rank_that_is_late_by_less_than_the_limit_is_waited_for(ran: Ran):
    accounts = ran["in time"].result()
    assert all(first.error == "" for first, _ in accounts)


def test_a_rank_that_opens_twice(ran: Ran):
    for rank, (account, after) in enumerate(ran[open_twice].result()):
        assert (account.error, account.ranks) == ("PeerTimeout", (0, 1, 3) if rank == 2 else (2,)), account
        assert after.reopened


def test_ranks_that_pass_different_groups(ran: Ran):
    accounts = ran[pass_groups_that_do_not_match].result()
    assert [account.error for account, _ in accounts] == ["PeerTimeout", "", "", "PeerTimeout"]
    assert [account.ranks for account, _ in accounts] == [(1,), (), (), (0,)]
    assert "rank 1 last opened one over global ranks [1,2]" in accounts[0][0].message
    assert "rank 0 last opened one over global ranks [1,2]" in accounts[3][0].message
    assert all(after.reopened for _, after in accounts)


def test_members_that_have_made_different_numbers_of_groups(ran: Ran):
    assert ran[open_after_unequal_numbers_of_groups].result() == [[True, True]] * 4


def test_experts_are_numbered_by_the_rank_in_the_group(ran: Ran):
    assert ran[use_a_group_of_the_last_two].result() == [None, None, (0, 0), (1, 2)]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("fate", "at_fault"), FATES, ids=["0 dies", "1, 2 die", "3 stops"])
def test_ranks_that_fall_while_opening(ran: Ran, fate: Callable[[], None], at_fault: tuple[int, ...], when: str):
    results = ran[fate, at_fault, when].result()
    for rank, result in enumerate(results):
        if rank not in at_fault:
            account = result.value
            assert (account.error, account.ranks) == ("PeerTimeout", at_fault), account
            assert account.took_s < LIMIT_S, account
        elif fate is die_here:
            assert result.exit_code == -signal.SIGKILL
