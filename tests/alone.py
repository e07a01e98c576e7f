"""Tests whose clock matters (marker `alone`) run while no other worker of pytest-xdist runs one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HAS_WORKERS = "PYTEST_XDIST_WORKER" in os.environ
_TURN, _GATE = Path(__file__), Path(__file__).with_name("conftest.py")  # locked only, which any file will do for


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Hold this worker's turn: one of many, or the only one."""
    if not _HAS_WORKERS:
        yield
        return
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with _GATE.open("r+") as gate, _TURN.open("r+") as held:  # NFS wants to see that it may be written
        # Who wants to be alone keeps the gate shut while it waits: the others would never all be out otherwise.
        fcntl.flock(gate, kind)
        fcntl.flock(held, kind)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
