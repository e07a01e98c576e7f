"""Pull rows that ranks have laid out: each once, and from there to all of its rows here.

Two ranks, one slot a token, three rows: `row_of_slot = [[[0], [-1]], [[2], [1]]]` takes token 0 of rank 0 to row 0,
token 0 of rank 1 to row 2 and its token 1 to row 1; token 1 of rank 0 is not read. A group of 2 rows that is padded to
4 and an empty one behind it have their padding at rows 2 to 4 and nowhere: `padding = [[2, 4], [4, 4]]`; those rows
become zero.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .blocks import Tile
from .bulk_rows import launch_bulk_pull_rows
from .launch import launch
from .signal import (
    CHUNKS,
    ENDLESS,
    GIVEN_UP,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    READ,
    SIGNALLING,
    Board,
    count_wait,
    is_last,
    launch_tell,
    launch_wait,
    tell,
    varying,
    wait_for,
    wide,
)


def fill(out_ptr, value, first, end, BLOCK: tl.constexpr):
    """Elements `first` up to `end` become `value`; by one program."""
    for start in range(first, end, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(out_ptr + place, value, mask=place < end)


def pull_rows_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    rows_table_ptr,  # [EP] int64: addresses of [max_tokens, D], the dtype of `out`
    row_of_slot_ptr,  # [EP, S, K] int32; below 0 is no row
    padding_ptr,  # [2, e] int64: where each group's padding begins and ends
    out_ptr,  # [R, D]
    row_scores_ptr,  # [R] float32, made NaN with `out` once a wait was given up
    rank,
    digest,
    places,  # `varying`: S
    room,  # `varying`: R
    hidden_dim,
    chunk_len,
    SCORED: tl.constexpr,  # whether there are row scores
    FUSED: tl.constexpr,  # whether this kernel waits and tells
    PADDED: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,  # into which columns are cut
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Pull tiles of tokens, chunk after chunk; every rank begins with the one behind it (patterns acquire and free)."""
    first, step = tl.program_id(0), tl.num_programs(0)
    number = tl.load(state_ptr)
    bound, num_rows = (places - 3) // 2, (room - 3) // 2
    if FUSED:
        if first == 0:
            count_wait(state_ptr, desk_ptr, 5)
    known = tl.full((), -1, tl.int32)
    span = hidden_dim if PARTS == 1 else BLOCK_COLS
    num_tiles = EP_SIZE * ((bound + BLOCK_ROWS - 1) // BLOCK_ROWS) * PARTS
    for tile in range(first, num_tiles, step):
        block = tile // PARTS // EP_SIZE
        if FUSED:
            chunk = block * BLOCK_ROWS // chunk_len
            if chunk > known:
                word = 6 + number % 2 * NUM_CHUNKS + chunk
                wait_for(
                    signals_ptr, state_ptr, desk_ptr, word, number, digest, POLLS, POLLS_PER_LOOK, True,
                    EP_SIZE, EP_BLOCK,
                )  # fmt: skip
                known = chunk
        from_rank = (rank + 1 + tile // PARTS) % EP_SIZE
        token = wide(block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_range = token < bound
        slots = row_of_slot_ptr + (wide(from_rank) * bound + token) * TOP_K
        last_row = tl.full((BLOCK_ROWS,), -1, tl.int32)
        for slot in tl.static_range(TOP_K):
            row = tl.load(slots + slot, mask=in_range, other=-1)
            last_row = tl.where(row > last_row, row, last_row)
        wanted = (last_row >= 0)[:, None]
        rows_ptr = tl.load(rows_table_ptr + from_rank).to(tl.pointer_type(out_ptr.dtype.element_ty))
        rows_ptr = tl.multiple_of(rows_ptr, 16)
        for start in range(tile % PARTS * span, tile % PARTS * span + span, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            inside = (col < hidden_dim)[None, :]
            value = tl.load(rows_ptr + token[:, None] * hidden_dim + col[None, :], mask=wanted & inside, other=0.0)
            for slot in tl.static_range(TOP_K):
                to_row = tl.load(slots + slot, mask=in_range, other=-1).to(tl.int64)
                at = out_ptr + to_row[:, None] * hidden_dim + col[None, :]
                tl.store(at, value, mask=(to_row >= 0)[:, None] & inside)
    if PADDED:
        for expert in range(first, NUM_LOCAL, step):
            padding, end = tl.load(padding_ptr + expert), tl.load(padding_ptr + NUM_LOCAL + expert)
            fill(out_ptr, 0.0, padding * hidden_dim, end * hidden_dim, BLOCK_COLS)
    if FUSED:
        if is_last(state_ptr, 8, step):
            if bound == 0:  # then nobody has waited for this round yet
                wait_for(
                    signals_ptr, state_ptr, desk_ptr, 6 + number % 2 * NUM_CHUNKS, number, digest, POLLS,
                    POLLS_PER_LOOK, True, EP_SIZE, EP_BLOCK,
                )  # fmt: skip
            if tl.load(state_ptr + 4) != 0:
                fill(out_ptr, float("nan"), 0, num_rows.to(tl.int64) * hidden_dim, BLOCK_COLS)
                if SCORED:
                    fill(row_scores_ptr, float("nan"), 0, num_rows.to(tl.int64), BLOCK_COLS)
            tell(table_ptr, state_ptr, 4, rank, number * 2147483648, EP_SIZE, EP_BLOCK)
            count_wait(state_ptr, desk_ptr, 6)


def launch_pull_rows(
    board: Board,
    digest: int,
    rows_table: torch.Tensor,
    row_of_slot: torch.Tensor,
    padding: torch.Tensor,
    out: torch.Tensor,
    row_scores: torch.Tensor | None,
    chunk_len: int,
    tile: Tile,
    *,
    padded: bool,
    bulk_blocks: int = 0,
) -> None:
    """Fill `out [R, D]` with what `row_of_slot [ep_size, S, K]` int32 wants of the rows that this round publishes.

    The end of the round: every rank is told that this one has read. `rows_table [ep_size]` int64 holds the addresses of
    `[max_tokens, D]`, `padding [2, e]` int64 is that of `arrange.Groups`. Once a wait was given up, `out` and
    `row_scores [R]` are NaN. With `bulk_blocks` so many blocks pull by bulk copies, see `bulk_rows.py`.
    """
    _, bound, top_k = row_of_slot.shape
    if bulk_blocks or not board.fused:
        launch_wait(board, CHUNKS, digest)
    if bulk_blocks:
        given_up = board.state[GIVEN_UP : GIVEN_UP + 1]
        launch_bulk_pull_rows(rows_table, row_of_slot, board.rank, out, given_up, bulk_blocks)
        bound = 0  # what is left to do is all but pulling
    launch(
        pull_rows_kernel, (tile.grid_of(bound * board.ep_size),), board.device, *board.tensors,
        rows_table, row_of_slot, padding, out, padding if row_scores is None else row_scores,
        board.rank, digest, varying(bound), varying(out.shape[0]), out.shape[1], chunk_len,
        SCORED=row_scores is not None, FUSED=board.fused, PADDED=padded,
        NUM_LOCAL=padding.shape[1], TOP_K=top_k, PARTS=tile.parts_of(bound * board.ep_size),
        NUM_CHUNKS=NUM_CHUNKS, POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK,
        num_warps=8, helpers=(*SIGNALLING, fill), **tile.constants, **board.constants,
    )  # fmt: skip
    if not board.fused:
        launch_tell(board, READ, digest)
