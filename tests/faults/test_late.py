"""A rank that comes to a call at the last moment, and stops in the middle of it: the waits do not add up."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import crossdock as cd
from crossdock.backends import call_clock
from crossdock.backends.call_clock import CallClock
from crossdock.testing import start_ranks
from tests.faults.play import config, step

TIMEOUT_S, LATE_S = 4.0, 3.4


def comes_late_and_stops(rank: int) -> tuple[float, tuple[int, ...], str]:
    dispatcher: Any = cd.TokenDispatcher(config(timeout_s=TIMEOUT_S, num_experts=6))
    step(dispatcher)
    if rank == 1:
        time.sleep(LATE_S)
        dispatcher._open.transport.wire.start = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # behind the header
    begun = time.monotonic()
    with pytest.raises(cd.PeerTimeout) as told:
        step(dispatcher)
    took_s = time.monotonic() - begun
    dispatcher.close()
    return took_s, told.value.ranks, str(told.value)


def test_a_late_rank_that_stops_in_mid_call_is_named_in_time():
    with start_ranks(comes_late_and_stops, 3) as started:
        deadline, results = time.monotonic() + 4 * TIMEOUT_S, started.results(timeout_s=0.2)
        while any(results[rank].silent for rank in (0, 2)) and time.monotonic() < deadline:
            results = started.results(timeout_s=0.2)  # the one that is stopped stays silent
    for rank in (0, 2):
        took_s, blamed, message = results[rank].value
        assert blamed == (1,) and "does not answer (stopped" in message, message
        assert TIMEOUT_S < took_s < TIMEOUT_S + 5.0


def test_the_exchanges_of_a_call_share_its_time(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(call_clock, "_now", lambda: now[0])
    clock = CallClock(10.0)
    clock.enter(0)
    assert clock.deadline() == 110.0
    now[0] = 109.0
    clock.enter(0)  # a second header of the same call
    assert clock.deadline() == 112.0 and clock.left_s(112.0) == 3.0
    now[0] = 150.0
    assert clock.is_over(112.0) and 0.0 < clock.left_s(112.0) < 0.1 and 150.0 < clock.deadline() < 150.1
    clock.enter(1)
    assert clock.deadline() == 160.0
