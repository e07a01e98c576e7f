"""The adjoint of weighting a row: scale its gradient by the score, and take their dot for the score's gradient.

Row `[1, 2]`, gradient `[3, 4]`, score 0.5: the gradient becomes `[1.5, 2]`, the dot is 11.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch
from .rounding import round_to


def score_gradient_kernel(
    rows_ptr,  # [R, D]
    grad_ptr,  # [R, D], scaled in place
    scores_ptr,  # [R] float32
    out_ptr,  # [R] float32
    num_rows,
    hidden_dim,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Scale gradient rows and take their dots with the rows."""
    step = tl.num_programs(0) * BLOCK_ROWS
    for first in range(tl.program_id(0) * BLOCK_ROWS, num_rows, step):
        # Columns in a fixed order: a row's dot does not depend on the other rows.
        row = tl.full((), 0, tl.int64) + first + tl.arange(0, BLOCK_ROWS)
        in_range = row < num_rows
        score = tl.load(scores_ptr + row, mask=in_range, other=0.0)
        acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
        for start in range(0, hidden_dim, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            inside = in_range[:, None] & (col < hidden_dim)[None, :]
            at = row[:, None] * hidden_dim + col[None, :]
            value = tl.load(rows_ptr + at, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
            acc += value * grad
            tl.store(grad_ptr + at, round_to(grad * score[:, None], grad_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + row, tl.reduce(acc, 1, tl.standard._sum_combine), mask=in_range)


def launch_score_gradient(
    rows: torch.Tensor, grad_rows: torch.Tensor, row_scores: torch.Tensor, max_programs: int | None = None
) -> torch.Tensor:
    """`rows.score_gradient` for any device: `[R]` float32; `grad_rows [R, D]` is scaled in place."""
    rows = rows.contiguous()
    out = torch.empty_like(row_scores)
    if rows.numel():
        num_rows, hidden_dim = rows.shape
        # Few programs: large tiles, so that enough is under way.
        block_rows, most_cols, warps = (1, 2048, 4) if max_programs is None else (8, 1024, 32)
        programs = triton.cdiv(num_rows, block_rows)
        launch(
            score_gradient_kernel,
            (min(programs, max_programs or programs),),
            rows.device,
            rows,
            grad_rows,
            row_scores,
            out,
            num_rows,
            hidden_dim,
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=min(most_cols, triton.next_power_of_2(hidden_dim)),
            num_warps=warps,
            helpers=(round_to,),
        )
    return out
