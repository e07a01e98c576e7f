"""A rank that comes to a call at the last moment, and stops in the middle of it: its time counts from there."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import crossdock as cd
from crossdock.testing import start_ranks
from tests.faults.play import config, step

TIMEOUT_S, LATE_S = 2.0, 1.5


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


@pytest.mark.full
def test_a_late_rank_that_stops_in_mid_call_is_named():
    with start_ranks(comes_late_and_stops, 3) as started:
        deadline, results = time.monotonic() + 4 * TIMEOUT_S, started.results(timeout_s=0.2)
        while any(results[rank].silent for rank in (0, 2)) and time.monotonic() < deadline:
            results = started.results(timeout_s=0.2)  # the one that is stopped stays silent
    for rank in (0, 2):
        took_s, blamed, message = results[rank].value
        assert blamed == (1,) and "does not answer (stopped" in message, message
        assert LATE_S + TIMEOUT_S < took_s < LATE_S + TIMEOUT_S + 5.0
