"""The watch gives up what is overdue, and nothing else."""

from __future__ import annotations

import gc
import threading
import time

import torch

from crossdock.memory.watch import Watch


def _watch(timeout_s: float) -> tuple[Watch[str], torch.Tensor, torch.Tensor, list[str]]:
    abort, ended, told = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), list[str]()
    return Watch(timeout_s, abort, ended, told.append), abort, ended, told


def test_an_overdue_wait_is_given_up():
    watch, abort, ended, told = _watch(0.2)
    assert (watch.begin("first"), watch.begin("second")) == (1, 2)
    ended[0] = 1
    begun = time.monotonic()
    while not watch.has_expired and time.monotonic() - begun < 5.0:
        time.sleep(0.01)
    assert abort.tolist() == [1] and told == ["second"]
    assert 0.1 < time.monotonic() - begun < 2.0
    watch.stop()


def test_waits_that_end_are_left_alone():
    watch, abort, ended, told = _watch(0.1)
    for number in range(5):
        watch.begin(str(number))
        ended[0] += 1
        time.sleep(0.05)
    assert not watch.has_expired and abort.tolist() == [0] and told == []
    watch.stop()


def test_the_thread_goes_with_the_watch():
    before = threading.active_count()
    watch, *_ = _watch(10.0)
    assert threading.active_count() == before + 1
    watch.stop()
    assert threading.active_count() == before
    watch, *_ = _watch(10.0)
    del watch
    gc.collect()
    deadline = time.monotonic() + 5.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
