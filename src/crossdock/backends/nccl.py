"""The wire over NCCL: nothing but dispatch's counts is ever read on the host, and nothing waits without a bound.

NCCL's own watchdog ends the process when a collective does not finish. Ours comes first: a device counter in pinned
memory tells it which exchanges have finished; when one is overdue it lets the session find out who is missing, sets the
flag that turns the outputs of waiting calls into NaN, and aborts the communicator, which frees the device.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from ..group.faults import TransportFault
from .base import Call, Link, TransportSpec
from .wire import Finish, Wire, nothing
from .wire_layout import COUNTS as FIXED_WORDS

_POLL_S = 0.02
_NUM_NUMBERS = 1 << 16  # more than can be in flight
_NCCL_MARGIN_S = 600.0  # NCCL's own limit lies this far behind ours


class _Begun(NamedTuple):
    """Work in flight: its place in the count, when it began, and the call it belongs to."""

    place: int
    since: float
    call: Call | None


class NcclWire(Wire):
    """An NCCL communicator of its own over the group's members; nothing else uses it."""

    def __init__(self, spec: TransportSpec, link: Link) -> None:
        super().__init__(spec.rank, spec.ep_size)
        assert link.members.device is not None  # NCCL groups live on one
        self.device = link.members.device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=spec.timeout_s + _NCCL_MARGIN_S)
        store = dist.PrefixStore(f"{link.store_prefix}/nccl", link.members.store)
        with _errors_only_clean_up():
            self._group: Any = dist.ProcessGroupNCCL(store, spec.rank, spec.ep_size, options)
        self._group.eager_connect_single_device(self.device)
        self._watch = _Watch(spec.timeout_s, self.device, link.on_expiry, self._group)
        self.given_up = self._watch.given_up
        self._header_host = torch.empty(
            2, spec.ep_size, FIXED_WORDS + spec.num_local_experts, dtype=torch.int64, pin_memory=True
        )
        self._call: Call | None = None
        self._unread: deque[tuple[int, Call, torch.Tensor]] = deque()

    def swap_headers(self, headers: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        self.look_back()
        self._call = call
        came = torch.empty_like(headers)
        self._exchange(came, headers, [], []).wait()
        self._header_host.copy_(torch.stack([headers, came]), non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # bounded: the watch aborts what is overdue
        self._raise_if_expired()
        self._watch.finish_all()
        left, arrived = self._header_host.clone().unbind()
        return left, arrived

    def open_call(self, headers: torch.Tensor, call: Call) -> Finish:
        self.look_back()
        self._call = call
        came = torch.empty_like(headers)
        self._exchange(came, headers, [], []).wait()
        slot = torch.empty(came.shape, dtype=torch.int64, pin_memory=True)
        slot.copy_(came, non_blocking=True)
        self._unread.append((self._watch.num_begun, call, slot))
        return nothing  # `look_back` compares

    def look_back(self) -> None:
        """Compare the fingerprints of finished calls that only the device has seen; does not wait."""
        self._raise_if_expired()
        while self._unread and self._unread[0][0] <= self._watch.finished():
            _, call, slot = self._unread.popleft()
            call.verify(slot.tolist())

    def start(self, out: torch.Tensor, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> Finish:
        work = self._exchange(out, rows.contiguous(), arriving, leaving)
        place = self._watch.num_begun

        def finish() -> None:
            work.wait()  # the stream waits, not the host
            self._watch.note(place)

        return finish

    def _exchange(self, out: torch.Tensor, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> Any:
        self._raise_if_expired()
        self._watch.begin(self._call)
        return self._group.alltoall_base(out, rows, arriving, leaving, dist.AllToAllOptions())

    def _raise_if_expired(self) -> None:
        if self._watch.has_expired:
            raise self._watch.fault()

    def close(self) -> None:
        self._watch.stop()
        self._group.abort()


@contextmanager
def _errors_only_clean_up() -> Iterator[None]:
    """While a process group is built: have it abort its communicator on an error, not end the process.

    torch has no argument for this, only a variable of the environment, which it reads when it builds the group.
    """
    name, clean_up_only = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
    before = os.environ.get(name)
    os.environ[name] = clean_up_only
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Watch:
    """Knows from pinned memory alone what the device has finished, and acts when something is overdue or has failed.

    Exchanges are numbered as they begin. Where the stream waits for one, its number is copied to the host in stream
    order; exchanges finish in the order in which they began.

    Attributes:
        has_expired: whether everything was given up.
        failed_after_s: how long the oldest exchange had been under way then, where it was not for being overdue.
    """

    def __init__(self, timeout_s: float, device: torch.device, on_expiry: Callable[..., None], group: Any) -> None:
        self.timeout_s, self.group, self.on_expiry = timeout_s, group, on_expiry
        self.given_up = torch.zeros(1, dtype=torch.int64, device=device)
        self._given_up_host = _seen_by_the_device(device)
        self.has_expired = False
        self.failed_after_s: float | None = None
        self.num_begun = 0
        self._numbers = torch.arange(_NUM_NUMBERS, device=device)
        self._finished_number = _seen_by_the_device(device)
        self._num_known = 0
        self._begun: deque[_Begun] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stop), name="crossdock-nccl-watch", daemon=True
        )
        self._thread.start()

    def begin(self, call: Call | None) -> None:
        """Number an exchange before NCCL gets it."""
        self.num_begun += 1
        self._begun.append(_Begun(self.num_begun, time.monotonic(), call))

    def note(self, place: int) -> None:
        """Let the device say that it has come past exchange `place` when it gets here, and learn if all was given up.

        Kernels read the flag from the device: one that reads pinned memory crosses the host's bus in every program.
        """
        self.given_up.copy_(self._given_up_host, non_blocking=True)
        number = place % _NUM_NUMBERS
        self._finished_number.copy_(self._numbers[number : number + 1], non_blocking=True)

    def finish_all(self) -> None:
        """The host has waited for everything that was begun."""
        self._num_known = self.num_begun

    def finished(self) -> int:
        """The last exchange that is known to have finished: the latest one with the number that the device noted."""
        behind = (self.num_begun - int(self._finished_number[0])) % _NUM_NUMBERS
        self._num_known = max(self._num_known, self.num_begun - behind)
        return self._num_known

    def look(self) -> bool:
        """Act if something is overdue or the communicator has failed; whether the watch is over."""
        finished = self.finished()
        while self._begun and self._begun[0].place <= finished:
            self._begun.popleft()
        oldest = self._begun[0] if self._begun else None
        waited_s = 0.0 if oldest is None else time.monotonic() - oldest.since
        is_late, has_failed = waited_s > self.timeout_s, self.group.get_error() != ErrorType.SUCCESS
        if not (is_late or has_failed):
            return False
        self.failed_after_s = None if is_late else waited_s
        self.has_expired = True
        self._given_up_host.fill_(1)
        self.on_expiry(None if oldest is None or oldest.call is None else oldest.call.facts, self.failed_after_s)
        self.group.abort()
        return True

    def fault(self) -> TransportFault:
        """Why everything was given up."""
        if self.failed_after_s is None:
            return TransportFault(f"an exchange did not finish within {self.timeout_s:g} s and was aborted")
        return TransportFault(
            f"an exchange failed {self.failed_after_s:.1f} s after it had begun, and was aborted", expired=False
        )

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)


def _seen_by_the_device(device: torch.device) -> torch.Tensor:
    """`[1]` int64 on the host: 0, in memory that the device reaches."""
    return torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")


def _watch(watch_ref: weakref.ref[_Watch], stop: threading.Event) -> None:
    while not stop.wait(_POLL_S):
        watch = watch_ref()
        if watch is None or watch.look():
            return
        del watch
