"""Pull rows that other ranks have published: each once, and from there to all of its rows here.

Two ranks, one slot a token, three rows: `row_of_slot = [[[0], [-1]], [[2], [1]]]` takes token 0 of rank 0 to row 0,
token 0 of rank 1 to row 2 and its token 1 to row 1; token 1 of rank 0 is not read. A group of 2 rows that is padded to
4 and an empty one behind it have their padding at rows 2 to 4 and nowhere: `padding = [[2, 4], [4, 4]]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import row_block
from .launch import launch


def pull_rows_kernel(
    rows_table_ptr,  # [EP] int64: addresses of [max_tokens, D], the dtype of `out`
    row_of_slot_ptr,  # [EP, S, K] int32; below 0 is no row
    out_ptr,  # [R, D]
    num_places,  # S
    hidden_dim,
    rank,
    TOP_K: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Pull one block of one rank's tokens (pattern acquire); every rank begins with the one behind it."""
    from_rank = (rank + 1 + tl.program_id(1)) % EP_SIZE
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_range = token < num_places
    places = row_of_slot_ptr + (from_rank.to(tl.int64) * num_places + token) * TOP_K
    last_row = tl.full((BLOCK_ROWS,), -1, tl.int32)
    for slot in range(TOP_K):
        row = tl.load(places + slot, mask=in_range, other=-1)
        last_row = tl.where(row > last_row, row, last_row)
    wanted = (last_row >= 0)[:, None]
    rows_ptr = tl.load(rows_table_ptr + from_rank).to(tl.pointer_type(out_ptr.dtype.element_ty))
    for start in range(0, hidden_dim, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        inside = (col < hidden_dim)[None, :]
        value = tl.load(rows_ptr + token[:, None] * hidden_dim + col[None, :], mask=wanted & inside, other=0.0)
        for slot in range(TOP_K):
            row = tl.load(places + slot, mask=in_range, other=-1).to(tl.int64)
            at = out_ptr + row[:, None] * hidden_dim + col[None, :]
            tl.store(at, value, mask=(row >= 0)[:, None] & inside)


def zero_padding_kernel(
    padding_ptr,  # [2, e] int64: where each group's padding begins and ends
    out_ptr,  # [R, D]
    hidden_dim,
    NUM_LOCAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Zero the padding of one group."""
    first = tl.load(padding_ptr + tl.program_id(0))
    end = tl.load(padding_ptr + NUM_LOCAL + tl.program_id(0))
    zero = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, out_ptr.dtype.element_ty)
    for block in range(first, end, BLOCK_ROWS):
        row = (block + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        for start in range(0, hidden_dim, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            inside = (row < end)[:, None] & (col < hidden_dim)[None, :]
            tl.store(out_ptr + row[:, None] * hidden_dim + col[None, :], zero, mask=inside)


def launch_pull_rows(rows_table: torch.Tensor, row_of_slot: torch.Tensor, rank: int, out: torch.Tensor) -> None:
    """Fill `out [R, D]` with what `row_of_slot [ep_size, S, K]` int32 wants of the published rows.

    `rows_table [ep_size]` int64 holds the addresses of `[max_tokens, D]`; `rank` is this one.
    """
    ep_size, num_places, top_k = row_of_slot.shape
    if out.numel() == 0 or num_places == 0:
        return
    block = row_block(out.device, out.shape[1], num_places)
    launch(
        pull_rows_kernel,
        (triton.cdiv(num_places, block["BLOCK_ROWS"]), ep_size),
        out.device,
        rows_table,
        row_of_slot,
        out,
        num_places,
        out.shape[1],
        rank,
        TOP_K=top_k,
        EP_SIZE=ep_size,
        num_warps=8,
        **block,
    )


def launch_zero_padding(padding: torch.Tensor, alignment: int, out: torch.Tensor) -> None:
    """Zero rows `padding[0, e]` up to `padding[1, e]` of `out [R, D]` for every local expert e.

    `padding [2, e]` is int64; no group has `alignment` rows of it.
    """
    if out.numel():
        launch(
            zero_padding_kernel,
            (padding.shape[1],),
            out.device,
            padding,
            out,
            out.shape[1],
            NUM_LOCAL=padding.shape[1],
            num_warps=8,
            **row_block(out.device, out.shape[1], alignment),
        )
