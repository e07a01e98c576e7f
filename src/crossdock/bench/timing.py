"""How it is measured: in rounds in which everyone takes a turn, so that a disturbed machine disturbs them all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The middle of many values, and how far they lie apart.

    >>> Spread.of([3.0, 1.0, 2.0])
    Spread(median=2.0, p10=1.2, p90=2.8)
    """

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quantiles with linear interpolation."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), _quantile(ordered, 0.1), _quantile(ordered, 0.9))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.p10:{spec}} to {self.p90:{spec}})"


def apart_pct(medians: Sequence[float]) -> float | None:
    """How much longer the slowest of several runs took than the fastest, in percent; None of one run."""
    return 100 * (max(medians) / min(medians) - 1) if len(medians) > 1 else None


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return round(ordered[below] + (ordered[above] - ordered[below]) * (place - below), 6)


def time_in_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int, warmup: int, meet: Callable[[], object]
) -> dict[str, list[float]]:
    """Milliseconds of every step on this rank, by name and round.

    Every round runs each step once, beginning with another one each time; `meet` lines the ranks up before each step.

    Args:
        steps: what to run, by name; the same names in the same order on every rank.
        rounds: rounds that count.
        warmup: rounds before them that do not.
        meet: a barrier over the ranks.
    """
    names = list(steps)
    taken_ms: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            meet()
            start = time.perf_counter()
            steps[name]()
            elapsed_ms = (time.perf_counter() - start) * 1e3
            if number >= warmup:
                taken_ms[name].append(elapsed_ms)
    return taken_ms


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank's time in every round, from the rounds of each rank."""
    return [max(of_round) for of_round in zip(*by_rank, strict=True)]


def skew_pct(by_rank: Sequence[Sequence[float]]) -> float:
    """How much longer the slowest rank's median is than the fastest rank's, in percent."""
    medians = [statistics.median(of_rank) for of_rank in by_rank]
    return (max(medians) / min(medians) - 1) * 100


def ratio(slower: Sequence[float], faster: Sequence[float]) -> Spread:
    """How many times as long `slower` takes, round by round."""
    return Spread.of([a / b for a, b in zip(slower, faster, strict=True)])
