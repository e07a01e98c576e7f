"""Zeros behind the last expert's rows, where the host does not know where that is.

Five rows that end at 3: rows 3 and 4 become zero, as do their scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch


def zero_tail_kernel(
    end_ptr,  # [1] int64
    rows_ptr,  # [R, D]
    scores_ptr,  # [R] float32, or anything without SCORED
    num_rows,
    hidden_dim,
    SCORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Zero what of blocks of rows lies behind the end."""
    end = tl.load(end_ptr)
    zeros = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, rows_ptr.dtype.element_ty)
    step = tl.num_programs(0).to(tl.int64) * BLOCK_ROWS
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    while first < num_rows:
        row = first + tl.arange(0, BLOCK_ROWS)
        behind = (row >= end) & (row < num_rows)
        if SCORED:
            tl.store(scores_ptr + row, tl.full((BLOCK_ROWS,), 0.0, tl.float32), mask=behind)
        for start in range(0, hidden_dim, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            mask = behind[:, None] & (col < hidden_dim)[None, :]
            tl.store(rows_ptr + row[:, None] * hidden_dim + col[None, :], zeros, mask=mask)
        first += step


def launch_zero_tail(
    end: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor | None, max_programs: int | None = None
) -> None:
    """Zero `rows [R, D]` (contiguous), and `scores [R]` if given, from row `end [1]` (int64) on; in place."""
    num_rows, hidden_dim = rows.shape
    programs = triton.cdiv(num_rows, 4)
    if num_rows:
        launch(
            zero_tail_kernel,
            (min(programs, max_programs or programs),),
            rows.device,
            end,
            rows,
            end if scores is None else scores,
            num_rows,
            hidden_dim,
            SCORED=scores is not None,
            BLOCK_ROWS=4,
            BLOCK_COLS=min(1024, triton.next_power_of_2(hidden_dim)),
            num_warps=4,
        )
