"""Block sizes of the kernels over shared memory, by device, and how many programs share the work.

On a GPU a block is a tile that a group of warps holds in registers. In the interpreter a program costs tenths of a
millisecond whatever it does, so a block is all there is, up to what caches like, and one program does all the work.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

_CPU_ELEMENTS = 1 << 16
_CPU_TOKENS = 128


class Tile(NamedTuple):
    """Rows and columns that a program moves at a time, and the most programs; blocks of columns of a row; warps.

    No programs: those that do the other half of the work do this one too.
    """

    rows: int
    cols: int
    max_programs: int
    col_blocks: int = 1
    warps: int = 8

    @property
    def constants(self) -> dict[str, Any]:
        """As kernels take them."""
        return {"BLOCK_ROWS": self.rows, "BLOCK_COLS": self.cols}

    def parts_of(self, num_rows: int) -> int:
        """Into how many parts of columns rows are cut: all blocks apart where there is too little work else."""
        return self.col_blocks if self.max_programs > 1 and num_rows < self.rows * self.max_programs else 1

    def grid_of(self, num_rows: int) -> int:
        """Programs for so many rows; at least one, for what there is to do without any."""
        return min(self.max_programs, max(1, -(-num_rows // self.rows) * self.parts_of(num_rows)))


def row_tile(device: torch.device, hidden_dim: int, num_rows: int, max_programs: int, rows: int = 4) -> Tile:
    """The tile of a kernel that moves so many rows; `rows` are those of a tile on a GPU."""
    cols = min(1024, power_of_two(hidden_dim))
    if device.type == "cuda":
        return Tile(rows, cols, max_programs, -(-hidden_dim // cols))
    return Tile(max(4, up_to(_CPU_ELEMENTS // cols, num_rows)), cols, 1, -(-hidden_dim // cols))


def token_block(device: torch.device, num_tokens: int, top_k: int) -> int:
    """Tokens of a block of a kernel that counts or places the slots of so many tokens: about 256 slots on a GPU."""
    if device.type == "cuda":
        return max(1, 256 // power_of_two(top_k))
    return up_to(_CPU_TOKENS, num_tokens)


def routing_block(device: torch.device, num_tokens: int) -> int:
    """Tokens of a block of the kernel that pushes routing."""
    return 64 if device.type == "cuda" else up_to(1 << 12, num_tokens)


def up_to(limit: int, number: int) -> int:
    """The smallest power of two that holds `number`, or the limit (a power of two).

    >>> up_to(64, 5), up_to(64, 0), up_to(64, 100)
    (8, 1, 64)
    """
    return min(limit, power_of_two(number))


@lru_cache(1024)
def power_of_two(number: int) -> int:
    """The smallest power of two that holds `number`; Triton's own function costs the host 1.5 us.

    >>> [power_of_two(number) for number in (0, 1, 5, 8, 9)]
    [1, 1, 8, 8, 16]
    """
    return 1 << max(number - 1, 0).bit_length()
