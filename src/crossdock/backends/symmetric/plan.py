"""How many programs of a kernel share its work, and in which pieces: chosen once for a dispatcher."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.blocks import Tile, row_tile
from ...kernels.signal import NUM_CHUNKS
from ..base import TransportSpec

_CHUNK_MULTIPLE = 64  # of tokens: more than a tile's rows, and a multiple of them


class Plan(NamedTuple):
    """The sizes of one dispatcher's launches.

    Attributes:
        chunk_len: tokens of a chunk: what is laid out is told chunk by chunk.
        arrangers: programs that arrange.
        copy: tile and programs that lay out rows meanwhile, or alone.
        pull: of the kernel that pulls rows.
        combine: of the kernel that lays out shares and adds them up.
        givers: how many programs of that lay out.
    """

    chunk_len: int
    arrangers: int
    copy: Tile
    pull: Tile
    combine: Tile
    givers: int

    @classmethod
    def of(cls, spec: TransportSpec, device: torch.device) -> Plan:
        """With `num_sms`, no kernel that moves data has more programs; else as measured, see docs/measurements.md."""
        most = spec.num_sms or 0
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        tokens = -(-spec.num_max_tokens_per_rank // NUM_CHUNKS)

        def tile(programs: int) -> Tile:
            return row_tile(device, spec.hidden_dim, spec.num_max_tokens_per_rank * spec.ep_size, max(1, programs))

        return cls(
            chunk_len=-(-tokens // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE,
            arrangers=max(1, most // 2) if most else 64,
            copy=tile(most - most // 2 if most else sms - 64),
            pull=tile(most or 2 * sms),
            combine=tile(most or 2 * sms),
            givers=max(1, most // 2) if most else sms,
        )
