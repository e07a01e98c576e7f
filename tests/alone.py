"""Tests whose clock matters (marker `alone`) run while no other worker of pytest-xdist runs one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_HAS_WORKERS = "PYTEST_XDIST_WORKER" in os.environ
_TURN, _GATE = Path(__file__), Path(__file__).with_name("conftest.py")  # locked only, which any file will do for
_kept: list[IO[str]] = []  # what the last test has left to the next one


@contextmanager
def turn(*, alone: bool, next_alone: bool) -> Iterator[None]:
    """Hold this worker's turn: one of many, or the only one, which a next test that is `alone` takes over."""
    if not _HAS_WORKERS:
        yield
        return
    held = _kept.pop() if _kept else _locked(fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    try:
        yield
    finally:
        if alone and next_alone:
            _kept.append(held)
        else:
            held.close()


def _locked(kind: int) -> IO[str]:
    with _GATE.open("r+") as gate:  # NFS wants to see that it may be written
        # Who wants to be alone keeps the gate shut while it waits: the others would never all be out otherwise.
        fcntl.flock(gate, kind)
        held = _TURN.open("r+")
        fcntl.flock(held, kind)
    return held
