"""Worlds of four ranks that run side by side: a fault's time is spent waiting, not computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest

from crossdock.testing import RankPool

NUM_WORLDS = 4
_T = TypeVar("_T")


class Crowd:
    """Runs cases as they come, each in a world of its own, a few at a time."""

    def __init__(self) -> None:
        self._pools: SimpleQueue[RankPool] = SimpleQueue()
        for _ in range(NUM_WORLDS):
            self._pools.put(RankPool(4))
        self._threads = ThreadPoolExecutor(NUM_WORLDS)

    def run(self, fn: Callable[..., _T], *args: Any) -> Future[list[_T]]:
        """`RankPool.run` on the next world that is free."""
        return self._threads.submit(self._run, fn, args)

    def submit(self, case: Callable[..., _T], *args: Any) -> Future[_T]:
        """Something that starts ranks of its own."""
        return self._threads.submit(case, *args)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for _ in range(NUM_WORLDS):
            self._pools.get().close()

    def _run(self, fn: Callable[..., _T], args: tuple[Any, ...]) -> list[_T]:
        pool = self._pools.get()
        try:
            return pool.run(fn, *args, timeout_s=40.0)
        finally:
            self._pools.put(pool)


@pytest.fixture(scope="session")
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.close()
