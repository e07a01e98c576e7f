"""How many programs of a kernel share its work, and in which pieces: chosen once for a dispatcher."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.blocks import Tile, row_tile
from ...kernels.bulk_rows import why_not
from ...kernels.signal import NUM_CHUNKS
from ...kernels.small import fits_small
from ..base import TransportSpec

_CHUNK_MULTIPLE = 64  # of tokens: more than a tile's rows, and a multiple of them


class Plan(NamedTuple):
    """The sizes of one dispatcher's launches.

    Attributes:
        chunk_len: tokens of a chunk: what is laid out is told chunk by chunk.
        arrangers: programs that arrange.
        copy: tile and programs that lay out rows meanwhile, or alone.
        pull: of the kernel that pulls rows.
        give: of the programs of a combine that lay out shares.
        take: of those that add them up.
        bulk_blocks: blocks that pull rows by bulk copies; 0: `pull` does it.
        small: programs of a kernel for small batches, where it serves (see `kernels/small.py`); 0: the others do.
    """

    chunk_len: int
    arrangers: int
    copy: Tile
    pull: Tile
    give: Tile
    take: Tile
    bulk_blocks: int = 0
    small: int = 0

    @classmethod
    def of(cls, spec: TransportSpec, device: torch.device) -> Plan:
        """With `num_sms`, no kernel that moves data has more programs; else as measured, see docs/measurements.md."""
        tokens = -(-spec.num_max_tokens_per_rank // NUM_CHUNKS)
        chunk_len = -(-tokens // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
        num_rows, sms = spec.num_max_tokens_per_rank * spec.ep_size, _processors(device)
        small = sms if serves_small(spec) else 0

        def tile(programs: int, rows: int = 4) -> Tile:
            return row_tile(device, spec.hidden_dim, num_rows, max(1, programs), rows)

        if spec.num_sms is not None:
            half = max(1, spec.num_sms // 2)
            rest = spec.num_sms - half
            pull, give, take = tile(spec.num_sms, 8), tile(rest, 8), tile(half, 8)
            small = min(small, spec.num_sms)
            return cls(chunk_len, half, tile(rest), pull, give, take, _bulk_blocks(spec, device), small)
        # All that wait for each other fit the device at once: two programs of arranging and copying to a processor,
        # and four of a combine.
        return cls(chunk_len, sms, tile(sms), tile(2 * sms), tile(3 * sms, 2), tile(sms, 4), small=small)

    def __str__(self) -> str:
        """Programs of each kernel at most, as `crossdock.explain` prints them."""
        pull = f"{self.bulk_blocks} pull in bulk" if self.bulk_blocks else f"{self.pull.max_programs} pull"
        dispatch = f"{self.arrangers} arrange, {self.copy.max_programs} publish, {pull}"
        combine = f"{self.give.max_programs} give, {self.take.max_programs} take"
        told = f"programs of a dispatch: {dispatch}; of a combine: {combine}"
        return f"{told}; with kernels for small batches {self.small} of either" if self.small else told


def serves_small(spec: TransportSpec) -> bool:
    """Whether a dispatcher has the kernels for small batches, and the memory that they need."""
    sizes = (spec.num_max_tokens_per_rank, spec.top_k, spec.hidden_dim, spec.num_local_experts, spec.ep_size)
    return spec.row_capacity.kind != "exact" and fits_small(*sizes)


def _processors(device: torch.device) -> int:
    """Of a GPU; in the interpreter one program does all."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _bulk_blocks(spec: TransportSpec, device: torch.device) -> int:
    """Few programs move more by bulk copies (docs/measurements.md); many do without."""
    if device.type != "cuda" or why_not(device, spec.dtype, spec.hidden_dim, spec.top_k, spec.ep_size) is not None:
        return 0
    return spec.num_sms or 0
