"""How many programs of a kernel share its work, and in which pieces: chosen once for a dispatcher."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.blocks import Tile, row_tile
from ...kernels.signal import NUM_CHUNKS
from ...kernels.small import fits_small
from ..base import TransportSpec

_A_TILE_EACH = 1 << 30  # programs: as many as there are tiles
_CHUNK_MULTIPLE = 64  # of tokens: more than a tile's rows, and a multiple of them


class Plan(NamedTuple):
    """The sizes of one dispatcher's launches.

    Attributes:
        chunk_len: tokens of a chunk: what is pushed is told chunk by chunk.
        arrangers: programs that arrange.
        push: tile and programs that push rows.
        spread: of those that spread them; these arrange before, where a dispatch is one launch.
        give: of the programs of a combine that push shares.
        take: of those that add them up.
        weigh: of those that weigh gradients, while `push` programs push them; not used with `num_sms`.
        small: programs of a kernel for small batches, where it serves (see `kernels/small.py`); 0: the others do.
        others: programs of any other kernel that moves data.
    """

    chunk_len: int
    arrangers: int
    push: Tile
    spread: Tile
    give: Tile
    take: Tile
    weigh: Tile
    small: int = 0
    others: int = _A_TILE_EACH

    @classmethod
    def of(cls, spec: TransportSpec, device: torch.device) -> Plan:
        """With `num_sms`, so many programs move data at most; else as measured, see docs/measurements.md."""
        tokens = -(-spec.num_max_tokens_per_rank // NUM_CHUNKS)
        chunk_len = -(-tokens // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
        num_rows, sms = spec.num_max_tokens_per_rank * spec.ep_size, _processors(device)
        small = sms if serves_small(spec) else 0

        def tile(programs: int, rows: int = 4, warps: int = 8) -> Tile:
            return row_tile(device, spec.hidden_dim, num_rows, programs, rows)._replace(warps=warps)

        weigh = tile(_A_TILE_EACH, warps=4)
        if spec.num_sms is not None:  # few programs: large tiles, so that enough is under way
            # Some of them wait for each other: one program of so many warps fits a processor.
            num_sms = min(spec.num_sms, sms) if device.type == "cuda" else spec.num_sms
            half, quarter = max(1, num_sms // 2), min(max(1, num_sms // 4), num_sms - 1)
            push, spread = tile(half, 8, 32), tile(num_sms - half, 8, 32)
            give, take = tile(num_sms - quarter, 8, 32), tile(quarter, 8, 32)
            arrangers = max(1, num_sms - half)
            return cls(chunk_len, arrangers, push, spread, give, take, weigh, min(small, num_sms), num_sms)
        # Programs of a dispatch fit the device at once, two to a processor, those of a combine four: some wait for
        # each other. Those that weigh wait for nobody.
        pushers = sms if spec.ep_size > 1 else 1
        push, spread = tile(pushers, 2), tile(2 * sms - pushers)
        return cls(chunk_len, sms, push, spread, tile(3 * sms, 2), tile(sms, 4), weigh, small)

    def __str__(self) -> str:
        """Programs of each kernel at most, as `crossdock.explain` prints them."""
        dispatch = f"{self.push.max_programs} push, {self.spread.max_programs} arrange and spread"
        combine = f"{self.give.max_programs} give, {self.take.max_programs} take"
        told = f"programs of a dispatch: {dispatch}; of a combine: {combine}"
        told = "one program does a whole dispatch or combine" if self.others == 1 else told
        return f"{told}; with kernels for small batches {self.small} of either" if self.small else told


def serves_small(spec: TransportSpec) -> bool:
    """Whether a dispatcher has the kernels for small batches, and the memory that they need."""
    sizes = (spec.num_max_tokens_per_rank, spec.top_k, spec.hidden_dim, spec.num_local_experts, spec.ep_size)
    return spec.row_capacity.kind != "exact" and fits_small(*sizes)


def _processors(device: torch.device) -> int:
    """Of a GPU; in the interpreter one program does all."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
