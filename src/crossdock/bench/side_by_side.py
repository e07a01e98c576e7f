"""Contestants side by side in one workload: checked first, then timed in turns, then weighed in fresh processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Protocol

import torch.distributed as dist

from ..testing import RankPool, run_ranks
from .exchanges import Exchange
from .memory import peak_growth_bytes
from .record import Comparison, Measurement
from .timing import Spread, ratio, skew_pct, slowest_rank, time_in_turns
from .workloads import Moved, Workload

_TIMEOUT_S = 600.0
_WEIGHED_STEPS = 5  # of which only the highest counts


class Contestant(Protocol):
    """Names an exchange and opens it on a rank; travels to the ranks, so it is a plain value."""

    @property
    def name(self) -> str:
        """As it stands in results."""

    def open(self, workload: Workload) -> Exchange:
        """Open the exchange over the default group; collective."""

    def check(self, workload: Workload, moved: Sequence[Moved]) -> None:
        """Raise AssertionError where one step's results, by rank, are not what the workload means."""


def compare(workload: Workload, contestants: Sequence[Contestant], *, num_ranks: int, rounds: int) -> Comparison:
    """Measure all contestants in one workload on fresh ranks of this machine; the first is the baseline of ratios.

    Raises:
        AssertionError: a contestant's results are wrong; nothing is timed then.
    """
    with RankPool(num_ranks) as pool:
        for contestant in contestants:
            contestant.check(workload, pool.run(move_once, workload, contestant, timeout_s=_TIMEOUT_S))
        times = pool.run(time_all, workload, contestants, rounds, timeout_s=_TIMEOUT_S)
        sent = pool.run(count_all, workload, contestants, timeout_s=_TIMEOUT_S)
    peaks = [run_ranks(weigh, num_ranks, workload, contestant, timeout_s=_TIMEOUT_S) for contestant in contestants]
    measurements = [
        _measurement(contestant.name, contestants[0].name, times, sent, peaks_of_ranks)
        for contestant, peaks_of_ranks in zip(contestants, peaks, strict=True)
    ]
    return Comparison(workload=workload.as_dict(), num_ranks=num_ranks, rounds=rounds, measurements=tuple(measurements))


def _measurement(
    name: str,
    baseline: str,
    times: Sequence[dict[str, list[float]]],
    sent: Sequence[dict[str, int]],
    peaks: Sequence[int | None],
) -> Measurement:
    by_rank = [of_rank[name] for of_rank in times]
    slowest, slowest_of_baseline = slowest_rank(by_rank), slowest_rank([of_rank[baseline] for of_rank in times])
    return Measurement(
        name=name,
        slowest_rank_ms=Spread.of(slowest),
        skew_pct=round(skew_pct(by_rank), 1),
        sent_bytes_per_rank=max(of_rank[name] for of_rank in sent),
        peak_memory_bytes=max((peak for peak in peaks if peak is not None), default=None),
        times_as_fast=None if name == baseline else ratio(slowest_of_baseline, slowest),
    )


# -- what runs on every rank ------------------------------------------------------------------------------------------


def move_once(rank: int, workload: Workload, contestant: Contestant) -> Moved:
    """One step's results."""
    with closing(contestant.open(workload)) as exchange:
        return exchange.step(exchange.prepare(workload.inputs(rank)))


def time_all(rank: int, workload: Workload, contestants: Sequence[Contestant], rounds: int) -> dict[str, list[float]]:
    """Milliseconds by contestant and round."""
    inputs = workload.inputs(rank)
    with ExitStack() as opened:
        exchanges = {c.name: opened.enter_context(closing(c.open(workload))) for c in contestants}
        prepared = {name: exchange.prepare(inputs) for name, exchange in exchanges.items()}
        steps = {name: partial(exchange.step, prepared[name]) for name, exchange in exchanges.items()}
        return time_in_turns(steps, rounds, max(3, rounds // 10), dist.barrier)


def count_all(rank: int, workload: Workload, contestants: Sequence[Contestant]) -> dict[str, int]:
    """Bytes sent to other ranks in one step, by contestant."""
    sent = {}
    for contestant in contestants:
        with closing(contestant.open(workload)) as exchange:
            sent[contestant.name] = exchange.sent_bytes_of(exchange.prepare(workload.inputs(rank)))
    return sent


def weigh(rank: int, workload: Workload, contestant: Contestant) -> int | None:
    """Peak memory of a few steps in a fresh process, bytes; opening and a first, small step are not counted."""
    with closing(contestant.open(workload)) as exchange:
        inputs = exchange.prepare(workload.inputs(rank))
        exchange.step(type(inputs)(*(tensor[:16] for tensor in inputs)))  # imports, caches and connections

        def steps() -> None:
            for _ in range(_WEIGHED_STEPS):
                exchange.step(inputs)

        return peak_growth_bytes(steps)
