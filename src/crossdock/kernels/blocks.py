"""Block sizes of the kernels over shared memory, by device, and how many programs share the work.

On a GPU a block is a tile that a group of warps holds in registers. In the interpreter a program costs tenths of a
millisecond whatever it does, so a block is all there is, up to what caches like, and one program does all the work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

_CPU_ELEMENTS = 1 << 16
_CPU_TOKENS = 128


class Tile(NamedTuple):
    """Rows and columns that a program moves at a time, and the most programs there may be."""

    rows: int
    cols: int
    max_programs: int

    @property
    def constants(self) -> dict[str, int]:
        """As kernels take them."""
        return {"BLOCK_ROWS": self.rows, "BLOCK_COLS": self.cols}

    def grid_of(self, num_rows: int) -> int:
        """Programs for so many rows; at least one, for what there is to do without any."""
        return max(1, min(self.max_programs, triton.cdiv(num_rows, self.rows)))


def row_tile(device: torch.device, hidden_dim: int, num_rows: int, max_programs: int) -> Tile:
    """The tile of a kernel that moves so many rows."""
    cols = min(1024, triton.next_power_of_2(hidden_dim))
    if device.type == "cuda":
        return Tile(4, cols, max_programs)
    return Tile(max(4, up_to(_CPU_ELEMENTS // cols, num_rows)), cols, 1)


def token_block(device: torch.device, num_tokens: int, top_k: int) -> int:
    """Tokens of a block of a kernel that counts or places the slots of so many tokens: about 256 slots on a GPU."""
    if device.type == "cuda":
        return max(1, 256 // triton.next_power_of_2(top_k))
    return up_to(_CPU_TOKENS, num_tokens)


def routing_block(device: torch.device, num_tokens: int) -> int:
    """Tokens of a block of the kernel that pushes routing."""
    return 64 if device.type == "cuda" else up_to(1 << 12, num_tokens)


def up_to(limit: int, number: int) -> int:
    """The smallest power of two that holds `number`, or the limit (a power of two).

    >>> up_to(64, 5), up_to(64, 0), up_to(64, 100)
    (8, 1, 64)
    """
    return min(limit, int(triton.next_power_of_2(max(number, 1))))
