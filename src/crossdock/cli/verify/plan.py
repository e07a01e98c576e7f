"""What one `verify` will do: options checked, ranks and device chosen, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from crossdock.backends.base import BackendTraits
from crossdock.errors import ConfigError
from crossdock.testing import Cell, conformance_cells, traits_of

from ..output import counted
from ..paths import why_not_written
from ..torchrun import num_ranks_here, ranks_of_torchrun

IN_THREADS = ("local", "loopback")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked `verify`.

    Attributes:
        backend: name.
        traits: of the backend.
        num_ranks: ranks of the group.
        device_type: "cpu" or "cuda".
        share_gpus: whether there are more ranks than CUDA devices, and ranks share them.
        jobs: sets of ranks that share the cells.
        full: the whole grid.
        torchrun: whether the ranks are torchrun's.
        cells: what will be run.
        only: the text by which cells were chosen; None: they are all that the backend can run.
        json: where to write the record.

    """

    backend: str
    traits: BackendTraits
    num_ranks: int
    device_type: str
    share_gpus: bool
    jobs: int
    full: bool
    torchrun: bool
    cells: tuple[Cell, ...]
    only: str | None
    json: Path | None

    @property
    def group_backend(self) -> str:
        """Of the default process group: NCCL where every rank has a GPU of its own."""
        return "nccl" if self.device_type == "cuda" and not self.share_gpus else "gloo"

    @property
    def where(self) -> str:
        """As in `2 cpu ranks`."""
        return counted(self.num_ranks, f"{self.device_type} rank")

    @property
    def in_threads(self) -> bool:
        """Whether the ranks are threads of this process."""
        return self.backend in IN_THREADS


def make_plan(
    backend: str,
    ranks: int | None,
    device: str,
    share_gpus: bool,
    jobs: int,
    full: bool,
    only: str | None,
    json: Path | None,
) -> Plan:
    """Check all options.

    Raises:
        ConfigError: a value that cannot work, in one sentence.

    """
    traits = traits_of(backend)
    num_ranks, torchrun = _num_ranks(backend, ranks)
    if jobs < 1 or (jobs > 1 and torchrun):
        raise ConfigError(f"--jobs must be at least 1, and 1 under torchrun, got {jobs}")
    if trouble := why_not_written("--json", json):
        raise ConfigError(trouble)
    device_type = _device_type(backend, device, share_gpus, num_ranks, traits)
    cells = conformance_cells(num_ranks, full=full, traits=traits, device_type=device_type)
    chosen = tuple(cells) if only is None else cells_with(only, cells)
    if not chosen:
        raise ConfigError(f"--only {only!r} is in no cell's description; one is {str(cells[0])!r}")
    return Plan(
        backend=backend,
        traits=traits,
        num_ranks=num_ranks,
        device_type=device_type,
        share_gpus=share_gpus and torch.cuda.device_count() < _num_ranks_here(backend, num_ranks),
        jobs=jobs,
        full=full,
        torchrun=torchrun,
        cells=chosen,
        only=only,
        json=json,
    )


def cells_with(only: str, cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Cells of whose description the text is a part, between commas; if there are none, those that contain it."""
    parts = f", {only.strip(' ,')}, "
    whole = tuple(cell for cell in cells if parts in f", {cell}, ")
    return whole or tuple(cell for cell in cells if only in str(cell))


def _num_ranks(backend: str, asked: int | None) -> tuple[int, bool]:
    by_torchrun = ranks_of_torchrun(asked)
    if by_torchrun is not None and backend in IN_THREADS:
        raise ConfigError(f"the ranks of backend {backend!r} are threads of one process: run it without torchrun")
    default = 1 if backend == "local" else 2
    num_ranks = by_torchrun if by_torchrun is not None else default if asked is None else asked
    if num_ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, got {num_ranks}")
    if backend == "local" and num_ranks > 1:
        raise ConfigError(f"backend 'local' serves one rank, got --ranks {num_ranks}")
    return num_ranks, by_torchrun is not None


def _num_ranks_here(backend: str, num_ranks: int) -> int:
    """Devices that the ranks of this host need: one each, or one for all threads."""
    return 1 if backend in IN_THREADS else num_ranks_here(num_ranks)


def _device_type(backend: str, device: str, share_gpus: bool, num_ranks: int, traits: BackendTraits) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, got {device!r}")
    num_gpus, on_this_host = torch.cuda.device_count(), _num_ranks_here(backend, num_ranks)
    if share_gpus:
        if device != "cuda" or not traits.ranks_share_gpus:
            raise ConfigError(
                "--share-gpus goes with --device cuda and a backend that has the trait ranks_share_gpus; got"
                f" --device {device} and --backend {backend}"
            )
        on_this_host = 1
    if device == "cuda" and num_gpus < on_this_host:
        raise ConfigError(f"--device cuda needs {on_this_host} CUDA devices on this host, torch sees {num_gpus}")
    if device == "auto":
        device = "cuda" if num_gpus >= on_this_host and "cuda" in traits.devices else "cpu"
    if device not in traits.devices:
        raise ConfigError(f"the backend's rows live on {', '.join(sorted(traits.devices))}, not on {device}")
    return device
