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
    BLOCK_COLS: tl.constexpr,
):
    """Scale gradient rows and take their dots with the rows."""
    # One row at a time, columns in a fixed order: a row's dot does not depend on the other rows.
    for nth in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + nth
        score = tl.load(scores_ptr + row)
        acc = tl.full((BLOCK_COLS,), 0.0, tl.float32)
        for start in range(0, hidden_dim, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            inside = col < hidden_dim
            value = tl.load(rows_ptr + row * hidden_dim + col, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + row * hidden_dim + col, mask=inside, other=0.0).to(tl.float32)
            acc += value * grad
            tl.store(grad_ptr + row * hidden_dim + col, round_to(grad * score, grad_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + row, tl.reduce(acc, 0, tl.standard._sum_combine))


def launch_score_gradient(
    rows: torch.Tensor, grad_rows: torch.Tensor, row_scores: torch.Tensor, max_programs: int | None = None
) -> torch.Tensor:
    """`rows.score_gradient` for any device: `[R]` float32; `grad_rows [R, D]` is scaled in place."""
    rows = rows.contiguous()
    out = torch.empty_like(row_scores)
    if rows.numel():
        launch(
            score_gradient_kernel,
            (min(rows.shape[0], max_programs or rows.shape[0]),),
            rows.device,
            rows,
            grad_rows,
            row_scores,
            out,
            rows.shape[0],
            rows.shape[1],
            BLOCK_COLS=min(2048, triton.next_power_of_2(rows.shape[1])),
            num_warps=4,
            helpers=(round_to,),
        )
    return out
