"""The ceiling of the link between GPUs: put and get over symmetric memory, all ranks at once."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .clock import Clock
from .group import agree

_TILE_ROWS, _HIDDEN_DIM = 8, 7168
_NUM_ROWS = 8192  # of 14336 bytes: 117 MB a rank, more than any cache
_BLOCKS = (32, 64, 132)
_REPEATS = 10


@dataclass(frozen=True)
class LinkRates:
    """GB/s of the slowest rank by number of blocks: of bytes leaving (put) or entering (get) one GPU."""

    put: dict[int, float]
    get: dict[int, float]


@dataclass(frozen=True)
class Refused:
    """Why there is no symmetric memory here, in a part of a sentence."""

    why: str


def probe_link(clock: Clock) -> LinkRates | Refused:
    """Measure the link between the CUDA devices of the default group, of at least two ranks. Collective.

    Raises:
        RuntimeError: rows that were put are not what was sent: the link, or the probe, is broken.
    """
    from ...kernels.link import BLOCK_ROWS, launch_copy_tiles  # needs triton

    assert BLOCK_ROWS == _TILE_ROWS
    rank, ep_size, device = dist.get_rank(), dist.get_world_size(), clock.device
    tiles_per_peer = _NUM_ROWS // _TILE_ROWS // (ep_size - 1)
    part = tiles_per_peer * _TILE_ROWS  # rows of the buffer that one rank writes
    shared = _symmetric(ep_size * part, device)
    if isinstance(shared, Refused):
        return shared
    buffer, table = shared
    # Any rank can make them again, so that what arrived can be compared with what was sent.
    own = _rows_sent(rank, (ep_size - 1) * part, device)
    num_bytes = own.numel() * own.element_size()
    rates: dict[str, dict[int, float]] = {"put": {}, "get": {}}
    for name, put in (("put", True), ("get", False)):
        for blocks in _BLOCKS:

            def work(_: int, blocks: int = blocks, put: bool = put) -> None:
                launch_copy_tiles(table, own, rank, tiles_per_peer, blocks, put=put)

            median_us = statistics.median(clock.eager(work, _REPEATS))
            rates[name][blocks] = num_bytes / max(agree(median_us)) / 1e3
        if put:
            _check(buffer, part, rank, ep_size)
    dist.barrier()  # no rank frees what another still reads
    return LinkRates(**rates)


def _symmetric(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | Refused:
    """A buffer `[num_rows, _HIDDEN_DIM]` bfloat16 of this rank, and the addresses of all ranks': `[ep_size]` int64."""
    import torch.distributed._symmetric_memory as symmetric_memory

    world, failure, buffer, addresses = dist.group.WORLD, "", torch.empty(0), [0]
    assert world is not None
    try:
        buffer = symmetric_memory.empty(num_rows, _HIDDEN_DIM, dtype=torch.bfloat16, device=device)
        handle: Any = symmetric_memory.rendezvous(buffer, world)
        addresses = handle.buffer_ptrs
        buffer.zero_()
    except RuntimeError as error:
        failure = str(error).partition("\n")[0]
    told = [failure for failure in agree(failure) if failure]
    if told:
        return Refused(f"the devices share no memory ({told[0]})")
    return buffer, torch.tensor(addresses, dtype=torch.int64, device=device)


def _rows_sent(rank: int, num_rows: int, device: torch.device) -> torch.Tensor:
    draw = torch.Generator(device).manual_seed(rank)
    return torch.randn(num_rows, _HIDDEN_DIM, generator=draw, device=device).to(torch.bfloat16)


def _check(buffer: torch.Tensor, part: int, rank: int, ep_size: int) -> None:
    """Compare what peers have put here with what they sent; see `kernels.link` for the places."""
    dist.barrier()
    torch.cuda.synchronize(buffer.device)
    wrong = []
    for source in range(ep_size):
        if source != rank:
            behind = (rank - source - 1) % ep_size  # this rank's place among the peers of `source`
            tiles = _rows_sent(source, (ep_size - 1) * part, buffer.device).view(-1, _TILE_ROWS * _HIDDEN_DIM)
            expected = tiles[behind :: ep_size - 1].reshape(part, _HIDDEN_DIM)
            if not torch.equal(buffer[source * part : (source + 1) * part], expected):
                wrong.append(source)
    told = {number: sources for number, sources in enumerate(agree(wrong)) if sources}
    if told:
        raise RuntimeError(f"the link's probe put wrong rows: by rank, those whose rows arrived wrong: {told}")
