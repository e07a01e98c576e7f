"""Spread rows to the places that want a copy.

Table of two rows, three places, the second absent: `index = [1, -1, 0]` gives rows `[table[1], 0, table[0]]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch


def gather_rows_kernel(
    table_ptr,  # [N, D] any dtype, rows `table_stride` elements apart
    index_ptr,  # [R] int64; -1 gives zeros
    out_ptr,  # [R, D]
    flag_ptr,  # [1] int64: set, and the rows are NaN
    num_rows,
    hidden_dim,
    table_stride,
    DIVISOR: tl.constexpr,  # places name index // DIVISOR
    FLAGGED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Copy a block of rows, column by column."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_range = row < num_rows
    source = tl.load(index_ptr + row, mask=in_range, other=-1)
    source = tl.where(source < 0, -1, source // DIVISOR)
    kept = tl.load(flag_ptr) == 0 if FLAGGED else True
    for start in range(0, hidden_dim, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        inside = (col < hidden_dim)[None, :]
        value = tl.load(
            table_ptr + source[:, None] * table_stride + col[None, :], mask=(source >= 0)[:, None] & inside, other=0.0
        )
        if FLAGGED:
            value = tl.where(kept, value.to(tl.float32), float("nan")).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * hidden_dim + col[None, :], value, mask=in_range[:, None] & inside)


def launch_gather_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    divisor: int = 1,
    out: torch.Tensor | None = None,
    flag: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rows.gather_rows` for any device; with `flag` (see `poison.py`) the rows are NaN once it is set."""
    if table.stride(1) != 1:
        table = table.contiguous()
    num_rows, hidden_dim = index.shape[0], table.shape[1]
    out = table.new_empty(num_rows, hidden_dim) if out is None else out
    if out.numel() == 0:
        return out
    block_cols = min(1024, triton.next_power_of_2(hidden_dim))
    launch(
        gather_rows_kernel,
        (triton.cdiv(num_rows, 4),),
        table.device,
        table,
        index,
        out,
        index if flag is None else flag,
        num_rows,
        hidden_dim,
        table.stride(0),
        DIVISOR=divisor,
        FLAGGED=flag is not None,
        BLOCK_ROWS=4,
        BLOCK_COLS=block_cols,
        num_warps=8,
    )
    return out
