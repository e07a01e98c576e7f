"""A Gloo communicator of one's own over a group's members; nothing else uses it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .faults import TransportFault
from .members import Members
from .store import within

_CONNECT_MARGIN_S = 1.0


class OwnGloo:
    """A communicator whose members meet under a store prefix that no other one has. Collective.

    Attributes:
        group: the `ProcessGroupGloo`, with its own methods: it is none of `torch.distributed`'s.

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
            self.group: Any = within(timeout_s + _CONNECT_MARGIN_S, connect)
        except RuntimeError as error:
            raise TransportFault(f"could not connect: {first_line(error)}") from error
        except TimeoutError as error:
            raise TransportFault(f"could not connect within {timeout_s:g} s", expired=True) from error
        self._dropped = weakref.finalize(self, _drop, self.group, os.getpid())
        self._dropped.atexit = False

    def close(self, wait_s: float | None = None) -> None:
        """End it; peers that wait notice. Waits no longer than `wait_s` (None is `timeout_s`) for it to be gone."""
        if self.group is None:
            return
        # Gloo's destructor waits for an exchange in flight, which may be waiting for a rank that has gone.
        held, self.group = [self.group], None
        self._dropped.detach()
        ending = threading.Thread(target=held.clear, name="crossdock-gloo-close", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # no new threads while the interpreter ends
            held.clear()
            return
        ending.join(self._timeout_s if wait_s is None else wait_s)


def _drop(group: Any, pid: int) -> None:
    """Nobody holds it any longer. In a forked child it stays: its end would wait for threads that the child lacks."""
    if os.getpid() != pid:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def first_line(error: Exception) -> str:
    """What Gloo says, without its advice for other programs."""
    return str(error).partition("\n")[0].partition(". ")[0]
