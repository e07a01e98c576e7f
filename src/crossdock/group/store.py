"""The rendezvous store of torch.distributed, with a bound on every wait: its host may be dead, stopped or cut off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

_T = TypeVar("_T")


def store_endpoint(store: Any) -> tuple[str | None, int]:
    """Host and port of a TCPStore, however wrapped; (None, 0) for any other kind."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None), int(getattr(store, "port", 0) or 0)


def store_fault(store: Any) -> str | None:
    """What is wrong with the store, in a sentence; None if it listens. Takes half a second at most."""
    host, port = store_endpoint(store)
    if host is None:
        return None
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except ConnectionRefusedError:
        return (
            f"the rendezvous store at {host}:{port} is gone too, its process hosted it: a new dispatcher cannot be"
            " opened until the job is started again"
        )
    except OSError:
        return f"the rendezvous store at {host}:{port} cannot be reached from here"
    return None


def within(limit_s: float, work: Callable[[], _T]) -> _T:
    """Return `work()`, or leave it behind in its thread.

    A client of a TCPStore whose host is stopped waits in `recv` without any limit, even in `wait(keys, timeout)`.

    Raises:
        TimeoutError: it has not returned after `limit_s` seconds.

    """
    outcome: _Outcome[_T] = _Outcome()

    def run() -> None:
        with outcome:
            outcome.value = work()

    threading.Thread(target=run, name="crossdock-store", daemon=True).start()
    if not outcome.is_there.wait(limit_s):
        reason = "its host is stopped or cut off"
        raise TimeoutError(f"the rendezvous store has not answered for {limit_s:g} s: {reason}")
    if outcome.error is not None:
        raise outcome.error
    return cast(_T, outcome.value)


class _Outcome(Generic[_T]):
    """Takes what a block leaves behind, whatever it is, from its thread to another, which raises it."""

    def __init__(self) -> None:
        self.value: _T | None = None
        self.error: BaseException | None = None
        self.is_there = threading.Event()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self.error = error
        self.is_there.set()
        return True
