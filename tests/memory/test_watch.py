"""The watch gives up what is overdue, and nothing else."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from crossdock.memory.watch import Watch

pytestmark = pytest.mark.alone


class Watched:
    """A watch over words that a test counts in the device's place.

    Attributes:
        abort: the word that it sets.
        waits: begun and ended.
        told: how often it has told of an expiry, and whether the word was set by then.
    """

    def __init__(self, timeout_s: float) -> None:
        self.abort, self.waits = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        self.told: list[int] = []
        self.watch = Watch(timeout_s, self.abort, self.waits, lambda: self.told.append(int(self.abort)))

    def begin(self) -> None:
        self.waits[0] += 1

    def end(self) -> None:
        self.waits[1] += 1

    def expires_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not self.watch.has_expired and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.watch.has_expired


def _assert_left_alone(watched: Watched) -> None:
    assert not watched.watch.has_expired and watched.abort.tolist() == [0] and watched.told == []


def test_an_overdue_wait_is_given_up_once():
    watched = Watched(0.2)
    for act in (watched.begin, watched.end, watched.begin):
        act()
    begun = time.monotonic()
    assert watched.expires_within(5.0)
    assert 0.15 < time.monotonic() - begun < 3.0
    watched.watch._thread.join(timeout=5.0)
    assert not watched.watch._thread.is_alive()  # there is no more to do
    assert watched.abort.tolist() == [1] and watched.told == [1]
    watched.watch.stop()


def test_waits_that_end_are_left_alone():
    watched = Watched(0.3)
    watched.begin()
    for _ in range(8):  # in all longer than the limit; one of them is always under way
        time.sleep(0.1)
        watched.begin()
        watched.end()
    _assert_left_alone(watched)
    watched.watch.stop()


def test_idle_time_is_no_part_of_a_wait():
    watched = Watched(0.3)
    time.sleep(0.5)
    for _ in range(2):
        watched.begin()
        time.sleep(0.15)
        _assert_left_alone(watched)
        watched.end()
        time.sleep(0.5)
        _assert_left_alone(watched)
    # An end may be seen before its beginning: the device writes the two words one after the other.
    watched.end()
    time.sleep(0.5)
    _assert_left_alone(watched)
    watched.watch.stop()


def test_a_wait_that_hangs_behind_others_is_overdue():
    watched = Watched(0.2)
    for act in (watched.begin, watched.begin, watched.end):
        act()
    assert watched.expires_within(5.0)
    watched.watch.stop()


def test_the_thread_goes_with_the_watch():
    before = threading.active_count()
    watched = Watched(10.0)
    assert threading.active_count() == before + 1
    watched.watch.stop()
    watched.watch.stop()
    assert threading.active_count() == before
    watched = Watched(10.0)
    del watched
    gc.collect()
    deadline = time.monotonic() + 5.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_it_may_be_stopped_from_its_own_thread():
    stopped: list[bool] = []
    abort, waits = torch.zeros(1, dtype=torch.int64), torch.tensor([1, 0])
    watches: list[Watch] = []

    def stop() -> None:
        watches[0].stop()
        stopped.append(True)

    watches.append(Watch(0.05, abort, waits, stop))
    watches[0]._thread.join(timeout=5.0)
    assert stopped == [True] and not watches[0]._thread.is_alive()
