"""Bounds every wait of a kernel: no kernel has a clock, so a thread of the host sets the word on which it gives up."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

_POLL_S = 0.02
_Note = TypeVar("_Note")


class _Begun(NamedTuple, Generic[_Note]):
    """A wait: its place in the count, when the host asked for it, and what it belongs to."""

    place: int
    since: float
    note: _Note


class Watch(Generic[_Note]):
    """Sets `abort [1]` int64 once a wait has not ended within `timeout_s`.

    Waits are counted as the host asks for them; the device counts in `ended [1]` int64, which the host can read without
    waiting, how many have ended. They end in the order in which they began.

    Args:
        timeout_s: the limit of one wait.
        abort: what waiting kernels look at.
        ended: what they count up.
        on_expiry: is told, from the watch's thread, what the overdue wait belongs to.
    """

    def __init__(
        self, timeout_s: float, abort: torch.Tensor, ended: torch.Tensor, on_expiry: Callable[[_Note], None]
    ) -> None:
        self.timeout_s, self._abort, self._ended, self._on_expiry = timeout_s, abort, ended, on_expiry
        self.has_expired = False
        self.num_begun = 0
        self._begun: deque[_Begun[_Note]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stop), name="crossdock-memory-watch", daemon=True
        )
        self._thread.start()

    def begin(self, note: _Note) -> int:
        """Count a wait before the device gets it; returns its place."""
        self.num_begun += 1
        self._begun.append(_Begun(self.num_begun, time.monotonic(), note))
        return self.num_begun

    def num_ended(self) -> int:
        """How many waits are known to have ended."""
        return int(self._ended[0])

    def look(self) -> bool:
        """Give up if something is overdue; whether the watch is over."""
        ended = self.num_ended()
        while self._begun and self._begun[0].place <= ended:
            self._begun.popleft()
        if not self._begun or time.monotonic() - self._begun[0].since <= self.timeout_s:
            return False
        self.has_expired = True
        self._abort.fill_(1)
        self._on_expiry(self._begun[0].note)
        return True

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)


def _watch(watch_ref: weakref.ref[Watch[_Note]], stop: threading.Event) -> None:
    while not stop.wait(_POLL_S):
        watch = watch_ref()
        if watch is None or watch.look():
            return
        del watch
