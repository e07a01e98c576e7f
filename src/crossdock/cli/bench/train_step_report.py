"""What `crossdock bench train-step` found, as tables and as a record."""

from __future__ import annotations

import json as json_module
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from crossdock.bench.train_step import StepCase, StepRun
    from crossdock.bench.train_step_model import StepSizes

    from .plan import Place

COMMAND = "bench train-step"
_NOISE = "within noise"


@dataclass(frozen=True)
class Measured:
    """One way of a routing: its runs, one after the other, each from the same beginning."""

    case: StepCase
    runs: tuple[StepRun, ...]

    def middle(self, name: str) -> float:
        """Of the runs' medians of a `Spread`."""
        return statistics.median(self._medians(name))

    def noise_pct(self, name: str) -> float | None:
        """How far the runs' medians lie apart; None of one run."""
        from crossdock.bench.timing import apart_pct

        return apart_pct(self._medians(name))

    def _medians(self, name: str) -> list[float]:
        return [getattr(run, name).median for run in self.runs]

    @property
    def idle_pct(self) -> float | None:
        """Of the device, the mean of the runs; None on a CPU."""
        found = [run.device_idle_pct for run in self.runs if run.device_idle_pct is not None]
        return statistics.mean(found) if found else None


@dataclass(frozen=True)
class Pair:
    """Both ways of one routing."""

    waiting: Measured
    free: Measured

    @property
    def same_bits(self) -> bool:
        """Whether all losses of all runs are the same."""
        return len({run.losses for run in (*self.waiting.runs, *self.free.runs)}) == 1

    def gain(self, name: str) -> float | None:
        """How many times as long the waiting way takes; None where runs of one way lie as far apart as the two ways."""
        waiting, free = self.waiting.middle(name), self.free.middle(name)
        noise = [pct for way in (self.waiting, self.free) if (pct := way.noise_pct(name)) is not None]
        apart_pct = 100 * (max(waiting, free) / min(waiting, free) - 1)
        return None if noise and apart_pct <= max(noise) else waiting / free


@dataclass(frozen=True)
class Steps:
    """What was measured: both ways of every routing; `reports` on the rank that tells of it."""

    sizes: StepSizes
    place: Place
    pairs: tuple[Pair, ...]
    experts_wait: bool
    seconds: float
    reports: bool


def report(found: Steps, json: Path | None) -> bool:
    """Print a table of each routing, and write the record; whether that could be written."""
    from ..output import print_prose, print_whole, stdout_console
    from ..paths import write_record

    console = stdout_console()
    for pair in found.pairs:
        print_prose(console, title_of(found.sizes, found.place, pair), "bold")
        print_whole(console, table_of(pair, found.experts_wait))
        for remark in remarks_of(pair, found.experts_wait):
            print_prose(console, remark)
        print_prose(console, "")
    if json is None:
        return True
    return write_record(COMMAND, "--json", json, json_module.dumps(_as_dict(found), indent=1) + "\n")


def title_of(sizes: StepSizes, place: Place, pair: Pair) -> str:
    """What was measured, and where."""
    case = pair.free.case
    return f"{case.routing} routing, {case.backend}, {place.words}: {sizes}"


def table_of(pair: Pair, experts_wait: bool) -> Table:
    """Both ways of a routing side by side."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    free = "fixed rows" if _reads(pair) or experts_wait else "sync-free"
    for column in ("", "waiting", free, "gain"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for line in _lines(pair):
        table.add_row(*line)
    return table


def remarks_of(pair: Pair, experts_wait: bool) -> list[str]:
    """What to know of the table, a sentence each."""
    case = pair.free.case
    remarks = ["losses of all steps: " + ("the same bits" if pair.same_bits else "THEY DIFFER")]
    if _reads(pair):
        remarks.append(f"{case.backend} takes its sizes from the host here: with fixed rows it reads counts too")
    if experts_wait:
        dtype = case.sizes.dtype
        remarks.append(f"experts of {dtype} in these widths read counts on the host here: both columns wait")
    return remarks


def _reads(pair: Pair) -> bool:
    """Whether the way with fixed rows reads counts on the host."""
    return pair.free.runs[0].host_reads_per_step > 0


def _lines(pair: Pair) -> Iterator[tuple[str, ...]]:
    both = (pair.waiting, pair.free)
    yield "row_capacity", *(str(way.case.row_capacity) for way in both), ""
    for name, told in (("step_ms", "step, ms (runs apart)"), ("dispatch_host_us", "host, us a dispatch (runs apart)")):
        texts = (f"{way.middle(name):,.4g} ({_pct(way.noise_pct(name))})" for way in both)
        gain = pair.gain(name)
        yield told, *texts, _NOISE if gain is None else f"{gain:.2f} x"
    speeds, gain = [statistics.median(run.tokens_per_s for run in way.runs) for way in both], pair.gain("step_ms")
    told = _NOISE if gain is None else f"{100 * (speeds[1] / speeds[0] - 1):+.1f} %"
    yield "tokens a second", *(f"{speed:,.0f}" for speed in speeds), told
    yield "host reads of counts a step", *(f"{way.runs[0].host_reads_per_step:g}" for way in both), ""
    if any(way.idle_pct is not None for way in both):
        yield "device idle", *(_pct(way.idle_pct) for way in both), ""
    yield "rows of a layer, MB", *(f"{way.runs[0].bytes_per_layer / 1e6:,.4g}" for way in both), ""


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def _as_dict(found: Steps) -> dict[str, Any]:
    from ..environment import describe_run

    return {
        **describe_run(),
        "ranks": found.place.num_ranks,
        "device": found.place.device_type,
        "sizes": asdict(found.sizes),
        "seconds": round(found.seconds, 1),
        "pairs": [
            {
                "routing": pair.free.case.routing,
                "backend": pair.free.case.backend,
                "same_bits": pair.same_bits,
                **{name: _way(way) for name, way in (("waiting", pair.waiting), ("sync_free", pair.free))},
            }
            for pair in found.pairs
        ],
    }


def _way(way: Measured) -> dict[str, Any]:
    return {
        "row_capacity": str(way.case.row_capacity),
        "step_ms": way.middle("step_ms"),
        "step_noise_pct": way.noise_pct("step_ms"),
        "dispatch_host_us": way.middle("dispatch_host_us"),
        "dispatch_host_noise_pct": way.noise_pct("dispatch_host_us"),
        "device_idle_pct": way.idle_pct,
        "runs": [asdict(run) for run in way.runs],
    }
