"""How a time is taken: behind a barrier; on a CPU with the processor's clock, on a GPU see `cuda_clock`."""

from __future__ import annotations

import ctypes
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from ..memory import peak_growth_bytes
from .group import agree

Work = Callable[[int], object]  # one call; the number says which set of inputs has its turn

_WARM_UP, _MIN_REPEATS = 3, 2
_CPU_BUDGET_US = 5e5


class Clock(ABC):
    """Takes times of calls that all ranks make together. Microseconds, one for each repeat, of this rank."""

    device: torch.device

    @abstractmethod
    def eager(self, work: Work, repeats: int) -> list[float]:
        """Times of one call after the other, each behind a barrier."""

    def capture(self, work: Work, calls: int) -> Callable[[], None]:
        """Capture `calls` calls in one CUDA graph, and return what replays it.

        Raises:
            RuntimeError: they cannot be captured.
        """
        raise RuntimeError(f"there are no graphs on {self.device.type}")

    def host(self, work: Work) -> float | None:
        """How long the host is busy with a call while the device is idle, the median; None where that is all of it."""
        return None

    @abstractmethod
    def peak_bytes(self, work: Work) -> int | None:
        """Memory that a call needs beyond what there was, its results included; None if it cannot be told."""


class CpuClock(Clock):
    """The processor's clock."""

    device = torch.device("cpu")

    def eager(self, work: Work, repeats: int) -> list[float]:
        """Fewer repeats where a call is slow, as kernels in an interpreter are."""
        first_us = self._timed(work, 0)
        slow_us = max(agree(first_us))
        enough = max(_MIN_REPEATS, int(_CPU_BUDGET_US / slow_us))
        if enough < repeats:
            return [first_us, *(self._timed(work, number) for number in range(1, enough))]
        return [self._timed(work, number) for number in range(-_WARM_UP, repeats)][_WARM_UP:]

    def _timed(self, work: Work, number: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        result = work(number)
        taken_us = (time.perf_counter() - start) * 1e6
        del result  # not within the time
        return taken_us

    def peak_bytes(self, work: Work) -> int | None:
        """Of resident memory, once what the process has freed is given back."""
        gc.collect()
        _give_back_freed()
        return peak_growth_bytes(lambda: work(0))


def _give_back_freed() -> None:
    """Return freed memory to the system, which glibc does late or never by itself."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
