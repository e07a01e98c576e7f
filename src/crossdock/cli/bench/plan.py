"""What one `bench` will measure: options checked, ranks, device and workloads chosen, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from crossdock.bench.movements.capacities import CapacityChoice
from crossdock.bench.movements.cells import Effort
from crossdock.errors import ConfigError
from crossdock.testing import traits_of
from crossdock.types import Reduction

from ..extras import why_not_installed
from ..output import counted
from ..paths import why_not_written
from ..torchrun import num_ranks_here, ranks_of_torchrun
from .sizes import Job, Options, jobs_of

_REPEATS = {"cuda": 20, "cpu": 10}


class Place(NamedTuple):
    """Where something is measured: on the CPU or on GPUs, by how many ranks, and whether they are torchrun's."""

    device_type: str
    num_ranks: int
    torchrun: bool

    @property
    def words(self) -> str:
        """As in `2 cpu ranks`."""
        return counted(self.num_ranks, f"{self.device_type} rank")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked `bench`.

    Attributes:
        backends: names; empty is all that can serve.
        num_ranks: ranks of the group.
        device_type: "cpu" or "cuda".
        torchrun: whether the ranks are torchrun's.
        jobs: what is measured.
        capacities: of rows; empty lets each backend have its best.
        reductions: what is summed up how.
        effort: repeats and runs.
        bars: whether figures are held against the bars.
        json, plot: files to write.
    """

    backends: tuple[str, ...]
    num_ranks: int
    device_type: str
    torchrun: bool
    jobs: tuple[Job, ...]
    capacities: tuple[CapacityChoice, ...]
    reductions: tuple[Reduction, ...]
    effort: Effort
    bars: bool
    json: Path | None
    plot: Path | None

    @property
    def place(self) -> Place:
        """Where it is measured."""
        return Place(self.device_type, self.num_ranks, self.torchrun)


def make_plan(options: Options) -> Plan:
    """Check all options.

    Raises:
        ConfigError: a value that cannot work, in one sentence.
        BackendUnavailable: a backend that cannot be loaded.
    """
    device_type, num_ranks, torchrun = place_of(options.device, options.ranks)
    repeats = _REPEATS[device_type] if options.repeats is None else options.repeats
    for name, value in (("--repeats", repeats), ("--runs", options.runs), ("--num-sms", options.num_sms)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if trouble := why_not_written(name, path):
            raise ConfigError(trouble)
    if options.plot is not None and options.plot.suffix != ".png":
        raise ConfigError(f"--plot {options.plot} must end in .png")
    if options.plot is not None and (trouble := why_not_installed("matplotlib")):
        raise ConfigError(f"of --plot: {trouble}")
    for backend in options.backends:
        traits_of(backend)
    return Plan(
        backends=options.backends,
        num_ranks=num_ranks,
        device_type=device_type,
        torchrun=torchrun,
        jobs=jobs_of(options, device_type, num_ranks),
        capacities=tuple(map(CapacityChoice.parse, options.capacities)),
        reductions=("fast", "exact") if options.exact else ("fast",),
        effort=Effort(repeats, options.runs),
        bars=options.bars,
        json=options.json,
        plot=options.plot,
    )


def place_of(device: str, ranks: int | None) -> Place:
    """Where to measure, from what was typed.

    Raises:
        ConfigError: a device or a number of ranks that cannot be had.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, got {device!r}")
    num_gpus, by_torchrun = torch.cuda.device_count(), ranks_of_torchrun(ranks)
    on_gpus = device == "cuda" or (device == "auto" and num_gpus > 0)
    num_ranks = by_torchrun or (ranks if ranks is not None else num_gpus if on_gpus else 2)
    if num_ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, got {num_ranks}")
    on_this_host = num_ranks_here(num_ranks) if by_torchrun else num_ranks
    if on_gpus and num_gpus < on_this_host:
        if device == "cuda":
            raise ConfigError(f"--device cuda needs {on_this_host} CUDA devices on this host, torch sees {num_gpus}")
        on_gpus = False
    return Place("cuda" if on_gpus else "cpu", num_ranks, by_torchrun is not None)
