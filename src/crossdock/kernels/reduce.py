"""Add up the rows that each place names, in order, in float32, without fusing product and sum.

Two rows `[1], [2]`; `index = [[1, 0], [-1, 0], [-1, -1]]` gives `[3], [1], [0]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch
from .rounding import round_to


def reduce_rows_kernel(
    rows_ptr,  # [R, D]
    index_ptr,  # [N, M] int64; -1 is no row
    weights_ptr,  # float32 [N, M] by term, or [R] by row
    flag_ptr,  # [1] int64: set, and the sums are NaN
    out_ptr,  # [N, D], the dtype of rows
    num_places,
    hidden_dim,
    num_terms,
    WEIGHTS: tl.constexpr,  # 0 none, 1 by row, 2 by term
    FLAGGED: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Add up the rows of a block of places."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    in_range = place < num_places
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (col < hidden_dim)[None, :]
    acc = tl.full((BLOCK_PLACES, BLOCK_COLS), 0.0, tl.float32)
    for term in range(num_terms):
        row = tl.load(index_ptr + place * num_terms + term, mask=in_range, other=-1)
        present = (row >= 0)[:, None]
        value = tl.load(rows_ptr + row[:, None] * hidden_dim + col[None, :], mask=present & inside, other=0.0)
        value = value.to(tl.float32)
        if WEIGHTS > 0:
            weight_at = row if WEIGHTS == 1 else place * num_terms + term
            value = tl.load(weights_ptr + weight_at, mask=row >= 0, other=0.0)[:, None] * value
        acc = tl.where(present, acc + value, acc)
    if FLAGGED:
        acc = tl.where(tl.load(flag_ptr) == 0, acc, float("nan"))
    tl.store(
        out_ptr + place[:, None] * hidden_dim + col[None, :],
        round_to(acc, out_ptr.dtype.element_ty),
        mask=in_range[:, None] & inside,
    )


def launch_reduce_rows(
    rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """`rows.reduce_rows` for any device; with `flag` (see `poison.py`) the sums are NaN once it is set."""
    rows, index = rows.contiguous(), index.contiguous()
    (num_places, num_terms), hidden_dim = index.shape, rows.shape[1]
    out = rows.new_empty(num_places, hidden_dim)
    if out.numel() == 0:
        return out
    block_cols = min(1024, triton.next_power_of_2(hidden_dim))
    launch(
        reduce_rows_kernel,
        (triton.cdiv(num_places, 4), triton.cdiv(hidden_dim, block_cols)),
        rows.device,
        rows,
        index,
        rows if weights is None else weights.contiguous(),
        rows if flag is None else flag,
        out,
        num_places,
        hidden_dim,
        num_terms,
        WEIGHTS=0 if weights is None else weights.dim(),
        FLAGGED=flag is not None,
        BLOCK_PLACES=4,
        BLOCK_COLS=block_cols,
        num_warps=8,
        helpers=(round_to,),
    )
    return out
