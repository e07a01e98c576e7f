"""Times of calls on a GPU: device events, CUDA graphs, and what the host is busy with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from .clock import Clock, CpuClock, Work

_WARM_UP = 3
_HOST_CALLS = 200
_SLEEP_MARGIN_US = 300.0
_MAX_SLEEP_US = 20_000.0


class CudaClock(Clock):
    """Device events on the current stream, the host well ahead of the device.

    Before a call is timed the device sleeps while the host queues it, and then meets the other devices in a small
    all-reduce; so launches do not count where the host need not wait, and no rank counts another's delay. What the
    host takes is told by `host`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._meeting = torch.zeros(1, device=device)
        self._cycles_per_us = self._measure_cycles()

    def eager(self, work: Work, repeats: int) -> list[float]:
        for number in range(_WARM_UP):
            work(number)
        host_us = self._host(work, 3)
        return [self._between_events(work, number, host_us) for number in range(repeats)]

    def capture(self, work: Work, calls: int) -> Callable[[], None]:
        for number in range(calls):
            work(number)
        dist.barrier()
        torch.cuda.synchronize(self.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        # Other threads (NCCL's watchdog) may ask for events meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for number in range(calls):
                work(number)
        return graph.replay

    def host(self, work: Work) -> float | None:
        return self._host(work, _HOST_CALLS)

    def peak_bytes(self, work: Work) -> int | None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = work(0)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del result
        return peak

    def _host(self, work: Work, calls: int) -> float:
        times = []
        for number in range(calls):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            result = work(number)
            times.append((time.perf_counter() - start) * 1e6)
            del result  # not within the time
        return statistics.median(times)

    def _between_events(self, work: Work, number: int, host_us: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize(self.device)
        self._sleep(min(2 * host_us + _SLEEP_MARGIN_US, _MAX_SLEEP_US))
        dist.all_reduce(self._meeting)
        start.record()
        result = work(number)
        end.record()
        torch.cuda.synchronize(self.device)
        del result
        taken_us: float = start.elapsed_time(end) * 1e3
        return taken_us

    def _sleep(self, microseconds: float) -> None:
        torch.cuda._sleep(int(microseconds * self._cycles_per_us))

    def _measure_cycles(self) -> float:
        """Cycles of the device's sleep in a microsecond."""
        cycles = 2_000_000
        times = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        fastest: float = min(times)
        return cycles / fastest


def clock_of(device: torch.device) -> Clock:
    """The clock for tensors on a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
