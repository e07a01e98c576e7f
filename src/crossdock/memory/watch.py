"""Bounds every wait of a kernel: no kernel has a clock, so a thread of the host sets the word on which it gives up."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

_POLL_S = 0.02
_HIGHEST = -8  # priority of a stream; torch takes the highest there is


class Watch:
    """Sets `abort [1]` int64 once a wait has not ended within `timeout_s`.

    The device counts in `waits [2]` int64, which the host can read without waiting, how many waits have begun and how
    many have ended; so a replayed graph is watched like an eager call. Work that waits for nobody is in no hurry.

    Args:
        timeout_s: the limit of one wait.
        abort: what waiting kernels look at; on a GPU in its memory, since they look all the time.
        waits: what they count up.
        on_expiry: is told, from the watch's thread, that a wait is overdue.
    """

    def __init__(
        self, timeout_s: float, abort: torch.Tensor, waits: torch.Tensor, on_expiry: Callable[[], None]
    ) -> None:
        self.timeout_s, self._abort, self._waits, self._on_expiry = timeout_s, abort, waits, on_expiry
        self.has_expired = False
        # The stream is made and used now: while kernels run, a stream's making can wait for their end.
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=abort.is_cuda)
        self._stream = _new_stream(abort.device) if abort.is_cuda else None
        self._set_abort(0)
        self._seen = (0, 0)
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stop), name="crossdock-memory-watch", daemon=True
        )
        self._thread.start()

    def look(self) -> bool:
        """Give up if something is overdue; whether the watch is over."""
        now, seen = time.monotonic(), (int(self._waits[0]), int(self._waits[1]))
        if seen != self._seen or seen[0] <= seen[1]:
            self._seen, self._since = seen, now
        if now - self._since <= self.timeout_s:
            return False
        self.has_expired = True
        self._set_abort(1)
        self._on_expiry()
        return True

    def _set_abort(self, value: int) -> None:
        self._word.fill_(value)
        if self._stream is None:
            self._abort.copy_(self._word)
            return
        with torch.cuda.stream(self._stream):
            # A copy needs no processor, which waiting kernels may all have taken.
            self._abort.copy_(self._word, non_blocking=True)
        self._stream.synchronize()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the highest priority: torch lends its streams by turns, and few ask for one of these."""
    return torch.cuda.Stream(device, priority=_HIGHEST)


def _watch(watch_ref: weakref.ref[Watch], stop: threading.Event) -> None:
    while not stop.wait(_POLL_S):
        watch = watch_ref()
        if watch is None or watch.look():
            return
        del watch
