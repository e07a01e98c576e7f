"""Block sizes of the kernels over shared memory, by device.

On a GPU a block is a tile that a group of warps holds in registers. In the interpreter a program costs tenths of a
millisecond whatever it does, so a block is all there is, up to what caches like.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

_CPU_ELEMENTS = 1 << 16
_CPU_TOKENS = 512


def row_block(device: torch.device, hidden_dim: int, num_rows: int) -> dict[str, Any]:
    """`BLOCK_ROWS` and `BLOCK_COLS` of a kernel that moves so many rows."""
    cols = min(1024, triton.next_power_of_2(hidden_dim))
    if device.type == "cuda":
        return {"BLOCK_ROWS": 4, "BLOCK_COLS": cols}
    return {"BLOCK_ROWS": max(4, up_to(_CPU_ELEMENTS // cols, num_rows)), "BLOCK_COLS": cols}


def token_block(device: torch.device, num_tokens: int) -> int:
    """Tokens of a block of a kernel that counts or places the slots of so many tokens."""
    return 32 if device.type == "cuda" else up_to(_CPU_TOKENS, num_tokens)


def expert_chunk(device: torch.device, num_local: int) -> int:
    """Experts that a kernel which places slots looks at together."""
    return up_to(32 if device.type == "cuda" else 64, num_local)


def up_to(limit: int, number: int) -> int:
    """The smallest power of two that holds `number`, or the limit (a power of two).

    >>> up_to(64, 5), up_to(64, 0), up_to(64, 100)
    (8, 1, 64)
    """
    return min(limit, int(triton.next_power_of_2(max(number, 1))))
