"""What `symmetric` has to reach on four NVLink GPUs of the Hopper class, as data, and whether figures reach it.

Rows are bfloat16, top-8, routing uniform unless a bar names another, reduction `fast`, no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .movements.figures import Figure, Mode
from .movements.operations import (
    COMBINE,
    COMBINE_BACKWARD,
    COMBINE_BACKWARD_NO_SCORES,
    DISPATCH,
    DISPATCH_BACKWARD,
    PAIR,
)

NUM_RANKS = 4
NUM_SMS = 32  # of the bars for a bounded number of blocks

Unit = Literal["f", "us", "dispatch", "combine", "host us", "host us in grad mode"]


@dataclass(frozen=True)
class Bar:
    """A limit for one operation of one workload.

    Attributes:
        workload: its name.
        operation: its name.
        limit: at most this many units.
        unit: "f" is the floor; "dispatch" and "combine" are the forward figures beside; "host us" is the call alone.
        mode: "eager", or "graph" where operations in a CUDA graph count.
        routing: of the tokens.
        num_sms: the setting that the bar is for; None lets the backend choose.
    """

    workload: str
    operation: str
    limit: float
    unit: Unit = "f"
    mode: Mode = "eager"
    routing: str = "uniform"
    num_sms: int | None = None

    def __str__(self) -> str:
        routing = "" if self.routing == "uniform" else f", {self.routing}"
        blocks = "" if self.num_sms is None else f", num_sms={self.num_sms}"
        return f"{self.workload}{routing}{blocks}: {self.operation}"


_LARGE = ("prefill", "train", "train-small")
BARS = (
    Bar("prefill", DISPATCH, 1.10),
    Bar("prefill", COMBINE, 1.12),
    Bar("train", DISPATCH, 1.12),
    Bar("train", COMBINE, 1.15),
    Bar("train-small", DISPATCH, 1.20),
    Bar("train-small", COMBINE, 1.25),
    Bar("train", DISPATCH, 1.22, num_sms=NUM_SMS),
    Bar("train", COMBINE, 1.25, num_sms=NUM_SMS),
    Bar("train", DISPATCH, 1.25, routing="zipf"),
    Bar("train", COMBINE, 1.25, routing="zipf"),
    Bar("decode-128", PAIR, 48.0, "us", "graph"),
    Bar("decode-16", PAIR, 20.0, "us", "graph"),
    Bar("decode-1", PAIR, 16.0, "us", "graph"),
    *(
        bar
        for workload in _LARGE
        for bar in (
            Bar(workload, DISPATCH_BACKWARD, 1.10, "combine"),
            Bar(workload, COMBINE_BACKWARD, 1.25, "dispatch"),
            Bar(workload, COMBINE_BACKWARD_NO_SCORES, 1.10, "dispatch"),
        )
    ),
    Bar("train", DISPATCH, 60.0, "host us"),
    Bar("train", COMBINE, 40.0, "host us"),
    Bar("train", DISPATCH, 90.0, "host us in grad mode"),
    Bar("train", COMBINE, 70.0, "host us in grad mode"),
)


@dataclass(frozen=True)
class Verdict:
    """A bar beside what a backend reached; None where that was not measured."""

    bar: Bar
    backend: str
    reached: float | None

    @property
    def met(self) -> bool | None:
        """Whether the figure is within the limit."""
        return None if self.reached is None else self.reached <= self.bar.limit


def hold_against_bars(figures: Sequence[Figure], backend: str = "symmetric") -> list[Verdict]:
    """Every bar beside the figure of a backend, `fast` and without a host synchronisation."""
    own = [
        figure
        for figure in figures
        if figure.contender.backend == backend
        and figure.contender.reduction == "fast"
        and figure.contender.capacity.kind != "exact"
    ]
    return [Verdict(bar, backend, next(_reached(bar, own), None)) for bar in BARS]


def _reached(bar: Bar, figures: Sequence[Figure]) -> Iterator[float]:
    for figure in figures:
        if not _is_for(bar, figure, bar.operation):
            continue
        if bar.unit == "f" and figure.pct_of_floor is not None:
            yield figure.pct_of_floor / 100
        elif bar.unit == "us":
            yield figure.us.median
        elif bar.unit == "host us" and figure.host_us is not None:
            yield figure.host_us
        elif bar.unit == "host us in grad mode" and figure.host_grad_us is not None:
            yield figure.host_grad_us
        elif bar.unit in (DISPATCH, COMBINE):
            yield from (
                figure.us.median / other.us.median
                for other in figures
                if other.contender == figure.contender and _is_for(bar, other, bar.unit)
            )


def _is_for(bar: Bar, figure: Figure, operation: str) -> bool:
    workload = figure.workload
    asked = (bar.workload, bar.routing, bar.mode, bar.num_sms, operation)
    return asked == (workload.name, workload.routing, figure.mode, figure.contender.num_sms, figure.operation)
