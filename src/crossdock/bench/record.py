"""What was measured, as plain values with units in their names, and where."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .timing import Spread

_PACKAGES = ("crossdock", "torch", "numpy", "transformers", "accelerate")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One contestant in one workload.

    Attributes:
        name: of the contestant.
        slowest_rank_ms: the slowest rank's time of a round: median, 10th and 90th percentile over the rounds.
        skew_pct: how much longer the slowest rank's median is than the fastest rank's.
        sent_bytes_per_rank: bytes to other ranks in one round, of the rank that sends most.
        peak_memory_bytes: rise of the resident memory at its peak, of the rank that needs most; None if not measured.
        times_as_fast: how many times as long the baseline takes, round by round; None for the baseline.
    """

    name: str
    slowest_rank_ms: Spread
    skew_pct: float
    sent_bytes_per_rank: int
    peak_memory_bytes: int | None = None
    times_as_fast: Spread | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contestants side by side in one workload.

    Attributes:
        workload: `Workload.as_dict()`.
        num_ranks: ranks that took part.
        rounds: rounds that counted.
        measurements: one for each contestant.
    """

    workload: dict[str, Any]
    num_ranks: int
    rounds: int
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run of a benchmark: where it ran, and what came out."""

    machine: dict[str, Any]
    comparisons: tuple[Comparison, ...]

    def write(self, path: Path) -> None:
        """Write JSON, overwriting what is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what `write` wrote."""
        plain = json.loads(path.read_text())
        return cls(machine=plain["machine"], comparisons=tuple(map(_comparison, plain["comparisons"])))


def _comparison(plain: dict[str, Any]) -> Comparison:
    return Comparison(**{**plain, "measurements": tuple(map(_measurement, plain["measurements"]))})


def _measurement(plain: dict[str, Any]) -> Measurement:
    spreads = {
        name: None if plain[name] is None else Spread(**plain[name]) for name in ("slowest_rank_ms", "times_as_fast")
    }
    return Measurement(**{**plain, **spreads})


def describe_machine(threads_per_rank: int, packages: Sequence[str] = _PACKAGES) -> dict[str, Any]:
    """Where a benchmark runs: the machine, its software, and how busy it was before."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads_per_rank": threads_per_rank,
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: installed for name in packages if (installed := _version(name)) is not None},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
