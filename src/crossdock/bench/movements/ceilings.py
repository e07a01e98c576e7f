"""How fast this machine moves bytes between its ranks and inside their memory: measured, all ranks at once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from .clock import Clock
from .group import agree, slowest
from .link import Refused, probe_link

_REPEATS = 10
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
_SWAP_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}
_SHARED_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What no implementation can go beyond here; GB/s of the slowest rank while all ranks do the same.

    Attributes:
        link: how the link was measured, in words.
        put_gb_per_s: out of a rank into its peers' memory; None for a rank alone.
        get_gb_per_s: out of the peers' memory into this rank's; None for a rank alone.
        copy_gb_per_s: of a copy inside a rank's memory, bytes read plus bytes written.
        collective_gb_per_s: of torch's `all_to_all_single`, bytes sent; to compare with, not a ceiling.
        by_blocks: GB/s of put and get by the number of blocks of the probe, where the link was probed on GPUs.
    """

    link: str
    put_gb_per_s: float | None
    get_gb_per_s: float | None
    copy_gb_per_s: float
    collective_gb_per_s: float | None
    by_blocks: dict[str, dict[int, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"copy {self.copy_gb_per_s:.1f} GB/s read + written"]
        if self.put_gb_per_s is not None and self.get_gb_per_s is not None:
            parts = [f"put {self.put_gb_per_s:.1f}, get {self.get_gb_per_s:.1f} GB/s ({self.link})", *parts]
        if self.collective_gb_per_s is not None:
            parts.append(f"beside: all_to_all_single {self.collective_gb_per_s:.1f} GB/s sent")
        return "; ".join(parts)


def measure_ceilings(clock: Clock) -> Ceilings:
    """Measure on every rank of the default group. Collective."""
    device = clock.device
    copy = _copy_rate(clock)
    if dist.get_world_size() == 1:
        return Ceilings(
            link="one rank, no link", put_gb_per_s=None, get_gb_per_s=None, copy_gb_per_s=copy, collective_gb_per_s=None
        )
    collective = _collective_rate(clock)
    put, get, link = collective, collective, f"torch's {dist.get_backend()} all_to_all_single"
    by_blocks: dict[str, dict[int, float]] = {}
    if device.type == "cpu":
        put, get = _shared_memory_rates(clock)
        link = "copies through memory that the ranks share"
    else:
        probed = probe_link(clock)
        if isinstance(probed, Refused):
            link = f"{link}, as {probed.why}"
        else:
            by_blocks = {"put": probed.put, "get": probed.get}
            put, get = max(probed.put.values()), max(probed.get.values())
            link = "Triton tiles of 8 rows x 1024 over symmetric memory"
    return Ceilings(
        link=link,
        put_gb_per_s=put,
        get_gb_per_s=get,
        copy_gb_per_s=copy,
        collective_gb_per_s=collective,
        by_blocks=by_blocks,
    )


def _rate(clock: Clock, work: Callable[[int], object], num_bytes: int) -> float:
    """GB/s of the slowest rank's median."""
    return num_bytes / slowest(clock.eager(work, _REPEATS)) / 1e3


def _copy_rate(clock: Clock) -> float:
    source = torch.randint(-128, 128, (_COPY_BYTES[clock.device.type],), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    return _rate(clock, lambda _: target.copy_(source), 2 * source.numel())


def _collective_rate(clock: Clock) -> float:
    ep_size = dist.get_world_size()
    part = _SWAP_BYTES[clock.device.type] // ep_size
    leaving = torch.randint(-128, 128, (ep_size * part,), dtype=torch.int8, device=clock.device).view(torch.uint8)
    coming = torch.empty_like(leaving)
    return _rate(clock, lambda _: dist.all_to_all_single(coming, leaving), (ep_size - 1) * part)


def _shared_memory_rates(clock: Clock) -> tuple[float, float]:
    """Put and get of ranks on one host, through a file in memory that the next rank maps too."""
    own = torch.randint(-128, 128, (_SHARED_BYTES,), dtype=torch.int8).view(torch.uint8)
    with _mapped_of_next_rank() as there:
        put = _rate(clock, lambda _: there.copy_(own), _SHARED_BYTES)
        get = _rate(clock, lambda _: own.copy_(there), _SHARED_BYTES)
    return put, get


@contextmanager
def _mapped_of_next_rank() -> Iterator[torch.Tensor]:
    """`[_SHARED_BYTES]` uint8, written by the next rank and now mapped here."""
    rank, ep_size = dist.get_rank(), dist.get_world_size()
    in_memory = Path("/dev/shm")
    folder = in_memory if in_memory.is_dir() else Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(dir=folder, prefix="crossdock-bench-") as file:
        paths = agree(file.name)
        torch.from_file(file.name, shared=True, size=_SHARED_BYTES, dtype=torch.uint8).fill_(1)
        dist.barrier()
        yield torch.from_file(paths[(rank + 1) % ep_size], shared=True, size=_SHARED_BYTES, dtype=torch.uint8)
        dist.barrier()
