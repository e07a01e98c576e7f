"""Pull what the ranks have laid out for this rank's tokens, and add it up in float32.

`add_ranks` adds every rank's share of a token in the order of ranks, ranks without a slot of it skipped, and rounds
once. `add_slot` adds one slot's row to sums that are kept in float32, by one pattern for all slots in turn.

Two ranks, one token, `home_of_slot = [[1, -1, 0]]`; rank 0 has laid out `[2]`, rank 1 `[3]`: `add_ranks` gives `[5]`.
`add_slot` of slot 0 with weights `[[10, 0, 100]]` gives `[30]`; of slot 1 it stays `[30]`; of slot 2, with rank 0's
`[2]`, it becomes `[230]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import row_block
from .launch import launch
from .rounding import round_to


def add_ranks_kernel(
    partials_table_ptr,  # [EP] int64: addresses of [EP, max_tokens, D], the dtype of `out`
    home_of_slot_ptr,  # [T, K] int32: rank of each slot's expert, -1 none
    out_ptr,  # [T, D]
    num_tokens,
    max_tokens,
    hidden_dim,
    rank,
    TOP_K: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Add up one block of tokens, some columns of it (pattern acquire)."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_range = token < num_tokens
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (col < hidden_dim)[None, :]
    at = (rank * max_tokens + token)[:, None] * hidden_dim + col[None, :]
    acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    for from_rank in range(EP_SIZE):
        has_slot = tl.full((BLOCK_ROWS,), 0, tl.int32)
        for slot in range(TOP_K):
            home = tl.load(home_of_slot_ptr + token * TOP_K + slot, mask=in_range, other=-1)
            has_slot = tl.where(home == from_rank, 1, has_slot)
        present = (has_slot > 0)[:, None]
        partials_ptr = tl.load(partials_table_ptr + from_rank).to(tl.pointer_type(out_ptr.dtype.element_ty))
        value = tl.load(partials_ptr + at, mask=present & inside, other=0.0).to(tl.float32)
        acc = tl.where(present, acc + value, acc)
    tl.store(
        out_ptr + token[:, None] * hidden_dim + col[None, :],
        round_to(acc, out_ptr.dtype.element_ty),
        mask=in_range[:, None] & inside,
    )


def add_slot_kernel(
    partials_table_ptr,  # [EP] int64: addresses of [EP, max_tokens, D], the dtype of `out`
    home_of_slot_ptr,  # [T, K] int32
    weights_ptr,  # [T, K] float32
    sums_ptr,  # [T, D] float32
    out_ptr,  # [T, D]
    num_tokens,
    max_tokens,
    hidden_dim,
    rank,
    slot,
    WEIGHTED: tl.constexpr,
    FIRST: tl.constexpr,  # the sums begin at +0.0
    LAST: tl.constexpr,  # the sums are rounded into `out`
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Add one slot's rows of a block of tokens, some columns of it (pattern acquire)."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_range = token < num_tokens
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (col < hidden_dim)[None, :]
    here = token[:, None] * hidden_dim + col[None, :]
    tile = in_range[:, None] & inside
    home = tl.load(home_of_slot_ptr + token * TOP_K + slot, mask=in_range, other=-1)
    present = (home >= 0)[:, None]
    partials_ptr = tl.load(partials_table_ptr + home, mask=home >= 0, other=0)
    partials_ptr = partials_ptr.to(tl.pointer_type(out_ptr.dtype.element_ty))
    at = (rank * max_tokens + token)[:, None] * hidden_dim + col[None, :]
    value = tl.load(partials_ptr[:, None] + at, mask=present & inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        value = tl.load(weights_ptr + token * TOP_K + slot, mask=in_range, other=0.0)[:, None] * value
    if FIRST:
        acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    else:
        acc = tl.load(sums_ptr + here, mask=tile, other=0.0)
    acc = tl.where(present, acc + value, acc)
    if LAST:
        tl.store(out_ptr + here, round_to(acc, out_ptr.dtype.element_ty), mask=tile)
    else:
        tl.store(sums_ptr + here, acc, mask=tile)


def launch_add_ranks(
    partials_table: torch.Tensor, home_of_slot: torch.Tensor, rank: int, max_tokens: int, out: torch.Tensor
) -> None:
    """Fill `out [T, D]` with the sums over ranks of what they have laid out for this one.

    `partials_table [ep_size]` int64 holds the addresses of `[ep_size, max_tokens, D]`; `home_of_slot [T, K]` int32.
    """
    if out.numel() == 0:
        return
    (num_tokens, hidden_dim), block = out.shape, row_block(out.device, out.shape[1], out.shape[0])
    launch(
        add_ranks_kernel,
        (triton.cdiv(num_tokens, block["BLOCK_ROWS"]), triton.cdiv(hidden_dim, block["BLOCK_COLS"])),
        out.device,
        partials_table,
        home_of_slot,
        out,
        num_tokens,
        max_tokens,
        hidden_dim,
        rank,
        TOP_K=home_of_slot.shape[1],
        EP_SIZE=partials_table.shape[0],
        num_warps=8,
        helpers=(round_to,),
        **block,
    )


def launch_add_slot(
    partials_table: torch.Tensor,
    home_of_slot: torch.Tensor,
    weights: torch.Tensor | None,
    slot: int,
    rank: int,
    max_tokens: int,
    sums: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add one slot's rows to `sums [T, D]` float32; the last slot writes `out [T, D]` in its dtype instead.

    `weights [T, K]` float32 by slot, or None; the rest is as in `launch_add_ranks`. Slots come in ascending order.
    """
    if out.numel() == 0:
        return
    (num_tokens, hidden_dim), block = out.shape, row_block(out.device, out.shape[1], out.shape[0])
    top_k = home_of_slot.shape[1]
    launch(
        add_slot_kernel,
        (triton.cdiv(num_tokens, block["BLOCK_ROWS"]), triton.cdiv(hidden_dim, block["BLOCK_COLS"])),
        out.device,
        partials_table,
        home_of_slot,
        sums if weights is None else weights.contiguous(),
        sums,
        out,
        num_tokens,
        max_tokens,
        hidden_dim,
        rank,
        slot,
        WEIGHTED=weights is not None,
        FIRST=slot == 0,
        LAST=slot == top_k - 1,
        TOP_K=top_k,
        num_warps=8,
        helpers=(round_to,),
        **block,
    )
