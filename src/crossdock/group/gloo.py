"""A Gloo communicator of one's own over a group's members; nothing else uses it."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .faults import TransportFault
from .members import Members
from .store import within

_CONNECT_MARGIN_S = 1.0
_DROP_S = 0.5  # of the collector's time, for one that is in the middle of an exchange


class OwnGloo:
    """A communicator whose members meet under a store prefix that no other one has. Collective.

    Raises:
        TransportFault: a member did not connect within `timeout_s`.
    """

    def __init__(self, members: Members, prefix: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        store = dist.PrefixStore(f"{prefix}/gloo", members.store)
        limit = timedelta(seconds=timeout_s)

        def connect() -> Any:  # its stubs lack the collectives
            group: Any = dist.ProcessGroupGloo(store, members.rank, members.size, limit)
            group.barrier().wait()  # who closes at once must not take the connection from one that still connects
            return group

        try:
            group = within(timeout_s + _CONNECT_MARGIN_S, connect)
        except RuntimeError as error:
            raise TransportFault(f"could not connect: {first_line(error)}") from error
        except TimeoutError as error:
            raise TransportFault(f"could not connect within {timeout_s:g} s", expired=True) from error
        self._held = [group]
        self._dropped = weakref.finalize(self, _drop, self._held, os.getpid())
        self._dropped.atexit = False

    @property
    def group(self) -> Any:
        """The `ProcessGroupGloo`, with its own methods: it is none of `torch.distributed`'s."""
        return self._held[0]

    def close(self, wait_s: float | None = None) -> None:
        """End it; peers that wait notice. Waits no longer than `wait_s` (None is `timeout_s`) for it to be gone."""
        if self._dropped.detach() is not None:
            _end(self._held, self._timeout_s if wait_s is None else wait_s)


def _drop(held: list[Any], pid: int) -> None:
    """Nobody uses it any longer. In a forked child it stays: its end would wait for threads that the child lacks."""
    if os.getpid() == pid:
        _end(held, _DROP_S)
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _end(held: list[Any], wait_s: float) -> None:
    """Empty the list, which holds the group alone, in a thread: Gloo's destructor waits for an exchange in flight.

    That may be waiting for a rank that has gone. And the one to empty it may be a collection in the middle of anything,
    also of a `threading.Thread.start`, whose lock another one would wait for: hence `_thread`.
    """
    is_gone = _thread.allocate_lock()
    is_gone.acquire()
    _ending[is_gone] = os.getpid()

    def end() -> None:
        held.clear()
        del _ending[is_gone]
        is_gone.release()

    try:
        _thread.start_new_thread(end, ())
    except RuntimeError:  # no new threads while the interpreter ends
        end()
    else:
        is_gone.acquire(timeout=wait_s)


_ending: dict[_thread.LockType, int] = {}  # held until a group is gone, by the process that ends it


@atexit.register
def _await_ends() -> None:
    """A destructor that came back while the interpreter ends would abort the process; Gloo's own limit bounds it."""
    for is_gone, pid in list(_ending.items()):
        if pid == os.getpid():
            is_gone.acquire()


def first_line(error: Exception) -> str:
    """What Gloo says, without its advice for other programs."""
    return str(error).partition("\n")[0].partition(". ")[0]
