"""What was measured, as plain values with units in their names, put together from all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..timing import Spread, apart_pct, skew_pct
from .ceilings import Ceilings
from .contenders import Contender
from .traffic import Count, Traffic
from .workloads import Workload

Mode = Literal["eager", "graph"]


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank has of one contender in one workload.

    Attributes:
        capacity: of rows, as it was opened.
        times_us: by operation and mode, a list of repeats for each run.
        no_graph: by operation, why it could not be captured.
        host_us, host_grad_us: by operation, without and in grad mode.
        peak_bytes: by operation.
        persistent_bytes: as the dispatcher tells them.
        opening_bytes: memory of the GPU that opening took.
        interpreted: see `Contender.is_interpreted`.
    """

    capacity: str
    times_us: dict[tuple[str, Mode], list[list[float]]] = field(default_factory=dict)
    no_graph: dict[str, str] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    host_grad_us: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    persistent_bytes: int | None = None
    opening_bytes: int | None = None
    interpreted: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One operation of one contender in one workload, over all ranks.

    Attributes:
        workload: what was moved.
        contender: who moved it.
        capacity: of rows, as it was opened.
        operation: its name.
        mode: "eager", or "graph": among others in a CUDA graph.
        us: of the slowest rank: the median of all repeats, and where 10 and 90 % of them lie.
        run_medians_us: the slowest rank's median of each run: how far they differ is noise.
        skew_pct: how much longer the slowest rank's median is than the fastest rank's.
        once_bytes: remote bytes of the busiest rank where a token goes once to each rank that wants it.
        copies_bytes: the same where it goes once to each expert.
        gb_per_s: `once_bytes` over the time (`copies_bytes` for an exact reduction's combine).
        floor_us: the floor of the slowest rank.
        pct_of_floor: the time over the floor, in percent: 100 is the floor itself; None where kernels are interpreted.
        host_us: of the call, the device idle; None where the device is the host.
        host_grad_us: the same in grad mode.
        persistent_bytes: what the dispatcher holds all its life, as it tells.
        opening_bytes: memory of the GPU that opening took, whoever allocated it.
        peak_bytes: what a call needs beyond that, its results included.
        no_graph: why there is no figure for graphs.
    """

    workload: Workload
    contender: Contender
    capacity: str
    operation: str
    mode: Mode
    us: Spread
    run_medians_us: tuple[float, ...]
    skew_pct: float
    once_bytes: float
    copies_bytes: float
    gb_per_s: float
    floor_us: float
    pct_of_floor: float | None
    host_us: float | None
    host_grad_us: float | None
    persistent_bytes: int | None
    opening_bytes: int | None
    peak_bytes: int | None
    no_graph: str | None

    @property
    def noise_pct(self) -> float | None:
        """How much longer the slowest run's median is than the fastest run's; None of one run."""
        return apart_pct(self.run_medians_us)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        contender = {**vars(self.contender), "capacity": self.capacity}
        plain = {name: value for name, value in vars(self).items() if name not in ("workload", "contender", "capacity")}
        return {
            "workload": self.workload.as_dict(),
            **contender,
            **plain,
            "us": vars(self.us),
            "noise_pct": self.noise_pct,
        }


def put_together(
    workload: Workload,
    contender: Contender,
    by_rank: Sequence[RankFigures],
    traffic: Mapping[str, tuple[Traffic, ...]],
    ceilings: Ceilings,
) -> list[Figure]:
    """One figure for each operation and mode; `traffic` is by operation, of each movement that it makes."""
    figures = []
    for operation, mode in by_rank[0].times_us:
        of_ranks = [rank.times_us[operation, mode] for rank in by_rank]
        pooled = [[time for run in runs for time in run] for runs in of_ranks]
        slowest = max(range(len(by_rank)), key=lambda rank: statistics.median(pooled[rank]))
        us = Spread.of(pooled[slowest])
        moved = traffic[operation]
        must: Count = "copies" if contender.reduction == "exact" else "once"
        once, copies = (sum(part.busiest(count) for part in moved) for count in get_args(Count))
        floor_us = sum(part.floor_us(ceilings, must=must) for part in moved)
        figures.append(
            Figure(
                workload=workload,
                contender=contender,
                capacity=by_rank[0].capacity,
                operation=operation,
                mode=mode,
                us=us,
                run_medians_us=tuple(max(map(statistics.median, runs)) for runs in zip(*of_ranks, strict=True)),
                skew_pct=skew_pct(pooled),
                once_bytes=once,
                copies_bytes=copies,
                gb_per_s=(once if must == "once" else copies) / us.median / 1e3,
                floor_us=floor_us,
                pct_of_floor=None if by_rank[0].interpreted else us.median / floor_us * 100,
                host_us=_largest(rank.host_us.get(operation) for rank in by_rank),
                host_grad_us=_largest(rank.host_grad_us.get(operation) for rank in by_rank),
                persistent_bytes=_largest(rank.persistent_bytes for rank in by_rank),
                opening_bytes=_largest(rank.opening_bytes for rank in by_rank),
                peak_bytes=_largest(rank.peak_bytes.get(operation) for rank in by_rank),
                no_graph=by_rank[0].no_graph.get(operation),
            )
        )
    return figures


def _largest(values: Any) -> Any:
    return max((value for value in values if value is not None), default=None)
