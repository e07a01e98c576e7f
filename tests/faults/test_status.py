"""The status endpoint and the rounds of opening, each on their own: who answers what, and what a crowd does to it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import crossdock as cd
from crossdock.group.addresses import Address, own_hosts
from crossdock.group.diagnosis import Verdict, agree_on, diagnose
from crossdock.group.fingerprint import CallFacts
from crossdock.group.members import Members
from crossdock.group.rendezvous import open_together
from crossdock.group.status import CallState, StatusServer, ask, find_all
from crossdock.group.store import within

pytestmark = pytest.mark.alone


class Rank:
    """A status endpoint, as an opened dispatcher has one."""

    def __init__(self) -> None:
        self.state = CallState()
        self.server = StatusServer(self.state, ["127.0.0.1"])

    @property
    def address(self) -> Address:
        return self.server.address


@pytest.fixture
def three() -> Iterator[list[Rank]]:
    ranks = [Rank() for _ in range(3)]
    yield ranks
    for rank in ranks:
        rank.server.close()


def test_the_state_is_told(three: list[Rank]):
    three[0].state.enter(7, "combine", "blk", (1, 2))
    answer = ask(three[0].address)
    assert {name: answer[name] for name in ("phase", "call", "operation", "layer", "words")} == {
        "phase": "in_call",
        "call": 7,
        "operation": "combine",
        "layer": "blk",
        "words": [1, 2],
    }


def test_whoever_sends_nothing_does_not_keep_others_waiting(three: list[Rank]):
    crowd = [socket.create_connection(("127.0.0.1", three[0].address.port)) for _ in range(20)]
    begun = time.monotonic()
    assert ask(three[0].address)["phase"] == "idle"
    assert time.monotonic() - begun < 0.5
    for visitor in crowd:
        visitor.close()


@pytest.mark.parametrize(
    "rubbish", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"token": 1}\n', b""]
)
def test_rubbish_is_not_answered_and_does_no_harm(three: list[Rank], rubbish: bytes):
    with socket.create_connection(("127.0.0.1", three[0].address.port), timeout=3.0) as visitor:
        visitor.sendall(rubbish)
        visitor.shutdown(socket.SHUT_WR)
        assert visitor.recv(100) == b""
    assert ask(three[0].address)["phase"] == "idle"


def test_another_process_behind_the_port_is_not_taken_for_the_rank(three: list[Rank]):
    stranger = Address(("127.0.0.1",), three[0].address.port, "another token")
    assert ask(stranger)["phase"] == "dead"
    assert find_all([stranger, three[1].address]) == [None, three[1].address]


def test_a_closed_endpoint_refuses(three: list[Rank]):
    three[0].server.close()
    three[0].server.close()
    assert ask(three[0].address)["phase"] == "dead"


def test_only_the_host_that_leads_to_the_rank_is_kept(three: list[Rank]):
    first = three[0].address
    several = Address(("127.0.0.9", "127.0.0.1"), first.port, first.token)
    with socket.create_server(("127.0.0.9", 0)):
        found = find_all([several])[0]
    assert found is not None
    assert found.hosts[0] in several.hosts  # an endpoint listens everywhere, so the first one does


def test_own_hosts():
    hosts = own_hosts("127.0.0.1")
    assert hosts[0] == "127.0.0.1"
    assert len(set(hosts)) == len(hosts)
    assert "127.0.0.1" in own_hosts(None)


def test_the_first_verdict_stays_and_reaches_everyone(three: list[Rank]):
    addresses = [rank.address for rank in three]
    with ThreadPoolExecutor(3) as pool:
        verdicts = [Verdict((rank,), (f"because of {rank}",), "call 3") for rank in range(3)]
        arguments = [(verdicts[rank], [0, 1, 2], rank, addresses, three[rank].state) for rank in range(3)]
        agreed = list(pool.map(lambda args: agree_on(*args), arguments))
    assert len(set(agreed)) == 1
    assert {json.dumps(rank.state.verdict) for rank in three} == {json.dumps(agreed[0].as_dict())}


def test_a_verdict_that_is_known_is_taken_over(three: list[Rank]):
    known = Verdict((1,), ("rank 1: it stood still",), "call 3", 2.0)
    three[2].state.propose(known.as_dict())
    addresses = [rank.address for rank in three]
    call = CallFacts(3, "dispatch", "blk")
    assert diagnose(call, 0, addresses, three[0].state, 0.1) == known
    assert three[0].state.verdict == known.as_dict()


def test_nobody_to_blame(three: list[Rank]):
    call = CallFacts(3, "dispatch", "blk")
    for rank in three:
        rank.state.enter(3, "dispatch", "blk", tuple(call.words()))
        time.sleep(0.05)
    begun = time.monotonic()
    assert diagnose(call, 0, [rank.address for rank in three], three[0].state, 0.1).ranks == ()
    assert time.monotonic() - begun < 4.5


def test_the_one_in_another_call_is_to_blame(three: list[Rank]):
    calls = [CallFacts(3, "dispatch", "blk"), CallFacts(3, "dispatch", "blk"), CallFacts(3, "combine", "blk")]
    for rank, call in zip(three, calls, strict=True):
        rank.state.enter(3, call.operation, "blk", tuple(call.words()))
    verdict = diagnose(calls[0], 0, [rank.address for rank in three], three[0].state, 0.1)
    assert verdict.ranks == (2,)
    assert "combine of layer 'blk' (call 3)" in verdict.reasons[0]


def test_one_that_waits_in_an_earlier_call_is_not_to_blame_beside_one_that_is_gone(three: list[Rank]):
    """As when a host is cut off: what it sent reached one of the others and not the next."""
    calls = [CallFacts(3, "combine", "blk"), CallFacts(2, "dispatch", "blk")]
    for rank, call in zip(three, calls, strict=False):
        rank.state.enter(call.number, call.operation, "blk", tuple(call.words()))
        rank.state.timed_out = True
    three[2].server.close()
    addresses = [rank.address for rank in three]
    assert diagnose(calls[0], 0, addresses, three[0].state, 2.0).ranks == (2,)
    assert diagnose(calls[1], 1, addresses, three[1].state, 2.0).ranks == (2,)


# -- rounds of opening ------------------------------------------------------------------------------------------------


def members(rank: int, store: dist.Store, size: int = 3) -> Members:
    return Members(rank, tuple(range(size)), torch.device("cpu"), "gloo", store)


def test_many_rounds_of_many_ranks():
    """Ranks that race through openings at their own pace are paired one to one, and never with an earlier attempt."""
    store, size, rounds = dist.HashStore(), 4, 30

    def run(rank: int) -> list[tuple[str, list[int]]]:
        seen = []
        for turn in range(rounds):
            opening = open_together(members(rank, store, size), {"agree": {}, "turn": turn}, 10.0)
            seen.append((opening.prefix, [offer["turn"] for offer in opening.offers]))
        return seen

    with ThreadPoolExecutor(size) as pool:
        seen_by_rank = list(pool.map(run, range(size)))
    assert all(seen == seen_by_rank[0] for seen in seen_by_rank)
    assert [turns for _, turns in seen_by_rank[0]] == [[turn] * size for turn in range(rounds)]
    assert len({prefix for prefix, _ in seen_by_rank[0]}) == rounds


def test_an_attempt_that_was_given_up_is_not_met_later():
    store = dist.HashStore()

    def attempt(rank: int, timeout_s: float) -> str:
        try:
            return open_together(members(rank, store), {"agree": {}, "by": rank}, timeout_s).prefix
        except cd.PeerTimeout as error:
            return str(error.ranks)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(attempt, (0, 1), (0.3, 0.3))) == ["(2,)", "(2,)"]
        late = pool.submit(attempt, 2, 5.0)
        time.sleep(0.2)
        assert not late.done()
        prefixes = {*pool.map(attempt, (0, 1), (5.0, 5.0)), late.result(5.0)}
    assert len(prefixes) == 1


def test_the_first_one_whose_time_is_up_decides_for_all():
    store = dist.HashStore()

    def attempt(rank: int, timeout_s: float) -> tuple[tuple[int, ...], float]:
        begun = time.monotonic()
        with pytest.raises(cd.PeerTimeout) as fault:
            open_together(members(rank, store), {"agree": {}}, timeout_s)
        return fault.value.ranks, time.monotonic() - begun

    with ThreadPoolExecutor(2) as pool:
        for ranks, took_s in pool.map(attempt, (1, 2), (0.3, 20.0)):
            assert ranks == (0,)
            assert took_s < 2.0


def test_a_wait_on_the_store_is_bounded():
    store = dist.HashStore()
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="has not answered for 0.1 s"):
        within(0.1, lambda: store.wait(["never"], timedelta(seconds=0.6)))
    assert time.monotonic() - begun < 0.5
    time.sleep(0.8)  # an abandoned thread must not come back while the interpreter ends: the runtime would abort
    assert within(1.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(1.0, lambda: 1 // 0)
