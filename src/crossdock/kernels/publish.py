"""Lay out a rank's tokens where its peers read them: in a dispatch their routing, pushed to every rank; then the rows.

Two ranks with two experts each, rank 0: token 0 names experts 0 and 2, token 1 names expert 1 and none. The ids that
both ranks get are `[[0, 2], [1, -1]]`, and `home_of_slot = [[0, 1], [0, -1]]` tells which rank has each slot's expert.
One row will be pulled by another rank. An id outside -1..3 arrives as -2: nobody places it, and its rank tells how many
there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .blocks import Tile, power_of_two, routing_block
from .launch import launch
from .signal import (
    CHUNKS,
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    READ,
    ROUTED,
    ROWS,
    SIGNALLING,
    Board,
    begin_call,
    count_wait,
    is_last,
    launch_tell,
    launch_wait,
    may_lay_out,
    tell,
    tell_routed,
    varying,
    wait_for,
)


class Opening(NamedTuple):
    """What opens a call on the device: its digest, see `signal.digest_of`, and its number."""

    digest: int
    number: int


class Routing(NamedTuple):
    """A rank's routing, and where the ranks get it.

    Attributes:
        ids: `[T, K]` int64 or int32.
        scores: `[T, K]` float32.
        ids_table: `[ep_size]` int64: addresses of int32 `[ep_size, max_tokens, K]`.
        scores_table: `[ep_size]` int64: addresses of float32 `[ep_size, max_tokens, K]`.
        max_tokens: see there.
        num_experts: over all ranks.
        sent: `[1]` int64: rows that other ranks pull from here are added.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    ids_table: torch.Tensor
    scores_table: torch.Tensor
    max_tokens: int
    num_experts: int
    sent: torch.Tensor


def publish_routing_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    ids_ptr,  # [T, K] int64 or int32
    scores_ptr,  # [T, K] float32
    ids_table_ptr,  # [EP] int64: addresses of int32 [EP, max_tokens, K]
    scores_table_ptr,  # [EP] int64: addresses of float32 [EP, max_tokens, K]
    home_ptr,  # [T, K] int32: rank of each slot's expert, -1 none
    num_sent_ptr,  # [1] int64: rows that other ranks pull
    sent_ptr,  # [1] int64, added to
    rank,
    digest,
    call,  # `varying`: its number
    tokens,  # `varying`
    max_tokens,
    FUSED: tl.constexpr,  # whether this kernel waits and tells
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Push one block of tokens' routing to every rank (patterns free and publish)."""
    num_tokens = (tokens - 3) // 2
    number = tl.load(state_ptr) + 1
    if tl.program_id(0) == 0:
        begin_call(state_ptr, desk_ptr, call, FUSED)
    if FUSED:
        free = tl.load(state_ptr + 1)
        wait_for(signals_ptr, state_ptr, desk_ptr, 4, free, digest, POLLS, POLLS_PER_LOOK, False, EP_SIZE, EP_BLOCK)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, TOP_K_BLOCK)
    inside = (token < num_tokens)[:, None] & (slot < TOP_K)[None, :]
    at = token[:, None] * TOP_K + slot[None, :]
    ids = tl.load(ids_ptr + at, mask=inside, other=-1).to(tl.int64)
    score = tl.load(scores_ptr + at, mask=inside, other=0.0)
    bad = (ids < -1) | (ids >= NUM_EXPERTS)
    num_bad = tl.reduce(tl.reduce(bad.to(tl.int32), 1, tl.standard._sum_combine), 0, tl.standard._sum_combine)
    ids = tl.where(bad, -2, ids).to(tl.int32)
    home = tl.where(ids < 0, -1, ids // NUM_LOCAL)
    tl.store(home_ptr + at, home, mask=inside)
    there = (tl.full((), 0, tl.int64) + rank) * max_tokens * TOP_K + at
    num_sent = tl.full((), 0, tl.int32)
    pushed = inside & may_lay_out(state_ptr)
    for to_rank in range(EP_SIZE):
        ids_there = tl.load(ids_table_ptr + to_rank).to(tl.pointer_type(tl.int32))
        tl.store(ids_there + there, ids, mask=pushed)
        scores_there = tl.load(scores_table_ptr + to_rank).to(tl.pointer_type(tl.float32))
        tl.store(scores_there + there, score, mask=pushed)
        named = ((home == to_rank) & (to_rank != rank)).to(tl.int32)
        pulled = (tl.reduce(named, 1, tl.standard._sum_combine) > 0).to(tl.int32)
        num_sent += tl.reduce(pulled, 0, tl.standard._sum_combine)
    if num_bad > 0:
        tl.atomic_add(state_ptr + 7, num_bad.to(tl.int64), sem="relaxed")
    tl.atomic_add(state_ptr + 8, num_sent.to(tl.int64), sem="relaxed")
    if is_last(state_ptr, 8, tl.num_programs(0)):
        total = tl.load(state_ptr + 8)
        tl.store(state_ptr + 8, 0)
        tl.store(num_sent_ptr, total)
        tl.store(sent_ptr, tl.load(sent_ptr) + total)
        if FUSED:
            tl.store(state_ptr, number)
            tl.store(state_ptr + 1, number)
            tell_routed(table_ptr, state_ptr, number, rank, digest, num_tokens, EP_SIZE, EP_BLOCK)
            count_wait(state_ptr, desk_ptr, 6)


def copy_chunks(
    x_ptr, shelf_ptr, table_ptr, state_ptr, number, digest, rank, num_tokens, first, step, hidden_dim, x_stride,
    chunk_len, FUSED: tl.constexpr, NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Lay out rows, chunk after chunk, as program `first` of `step`, and tell the chunks of round `number`."""
    if FUSED:
        if first == 0:
            for chunk in range(NUM_CHUNKS):
                if chunk * chunk_len >= num_tokens:
                    word = 6 + number % 2 * NUM_CHUNKS + chunk
                    tell(table_ptr, state_ptr, word, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)
    free = may_lay_out(state_ptr)
    num_tiles = (num_tokens + BLOCK_ROWS - 1) // BLOCK_ROWS
    for tile in range(first, num_tiles, step):
        token = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        for start in range(0, hidden_dim, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            inside = (token < num_tokens)[:, None] & (col < hidden_dim)[None, :]
            value = tl.load(x_ptr + token[:, None] * x_stride + col[None, :], mask=inside, other=0.0)
            tl.store(shelf_ptr + token[:, None] * hidden_dim + col[None, :], value, mask=inside & free)
        if FUSED:
            chunk = tile * BLOCK_ROWS // chunk_len
            tokens_left = num_tokens - chunk * chunk_len
            tiles_of_chunk = (tl.where(tokens_left < chunk_len, tokens_left, chunk_len) + BLOCK_ROWS - 1) // BLOCK_ROWS
            if is_last(state_ptr, chunk, tiles_of_chunk):
                word = 6 + number % 2 * NUM_CHUNKS + chunk
                tell(table_ptr, state_ptr, word, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)


def publish_rows_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    x_ptr,  # [T, D], rows `x_stride` elements apart
    shelf_ptr,  # [max_tokens, D], shared
    num_sent_ptr,  # [1] int64: rows that other ranks pull
    sent_ptr,  # [1] int64, added to
    rank,
    digest,
    call,  # `varying`: its number
    tokens,  # `varying`
    hidden_dim,
    x_stride,
    chunk_len,
    FUSED: tl.constexpr,
    BEGINS: tl.constexpr,  # whether this begins a round, without routing
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Lay out rows (patterns free and publish)."""
    num_tokens = (tokens - 3) // 2
    number = tl.load(state_ptr)
    if BEGINS:
        number += 1
        if tl.program_id(0) == 0:
            begin_call(state_ptr, desk_ptr, call, FUSED)
            tl.store(sent_ptr, tl.load(sent_ptr) + tl.load(num_sent_ptr))
        if FUSED:
            free = tl.load(state_ptr + 1)
            wait_for(signals_ptr, state_ptr, desk_ptr, 4, free, digest, POLLS, POLLS_PER_LOOK, False, EP_SIZE, EP_BLOCK)
            if tl.program_id(0) == 0:  # for ranks that dispatch instead
                tell(table_ptr, state_ptr, 2 + number % 2, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)
    copy_chunks(
        x_ptr, shelf_ptr, table_ptr, state_ptr, number, digest, rank, num_tokens, tl.program_id(0), tl.num_programs(0),
        hidden_dim, x_stride, chunk_len, FUSED, NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    if FUSED and BEGINS:
        if is_last(state_ptr, NUM_CHUNKS, tl.num_programs(0)):
            tl.store(state_ptr, number)
            tl.store(state_ptr + 1, number)
            count_wait(state_ptr, desk_ptr, 6)


def launch_publish_routing(board: Board, opening: Opening, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Open a dispatch and push its routing to every rank.

    Returns:
        `home_of_slot [T, K]` int32: the rank that has each slot's expert, -1 for none; and how many rows other ranks
        will pull, `[1]` int64.
    """
    num_tokens, top_k = routing.ids.shape
    home_of_slot = torch.empty(num_tokens, top_k, dtype=torch.int32, device=board.device)
    num_sent = torch.empty(1, dtype=torch.int64, device=board.device)
    block = routing_block(board.device, num_tokens)
    if not board.fused:
        launch_wait(board, READ, opening.digest, buffer=ROWS)
    launch(
        publish_routing_kernel, (max(1, -(-num_tokens // block)),), board.device, *board.tensors,
        routing.ids.contiguous(), routing.scores.contiguous(),
        routing.ids_table, routing.scores_table, home_of_slot, num_sent, routing.sent,
        board.rank, opening.digest, varying(opening.number), varying(num_tokens), routing.max_tokens,
        FUSED=board.fused, NUM_EXPERTS=routing.num_experts, NUM_LOCAL=routing.num_experts // board.ep_size,
        TOP_K=top_k, TOP_K_BLOCK=power_of_two(top_k), BLOCK=block,
        POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK,
        num_warps=4, helpers=SIGNALLING, **board.constants,
    )  # fmt: skip
    if not board.fused:
        launch_tell(board, ROUTED, opening.digest, num_tokens=num_tokens)
    return home_of_slot, num_sent


def launch_publish_rows(
    board: Board,
    opening: Opening,
    x: torch.Tensor,
    shelf: torch.Tensor,
    num_sent: torch.Tensor,
    sent: torch.Tensor,
    chunk_len: int,
    tile: Tile,
    *,
    begins: bool,
) -> None:
    """Lay out rows `[T, D]` on `shelf [max_tokens, D]`; `begins` where no routing has opened this call.

    `num_sent [1]` is added to `sent [1]` then. Where `x` has no rows, all chunks are told of as the shelf has them.
    """
    if begins and not board.fused:
        launch_wait(board, READ, opening.digest, buffer=ROWS)
    x = x if x.stride(1) == 1 else x.contiguous()
    launch(
        publish_rows_kernel, (tile.grid_of(x.shape[0]),), board.device, *board.tensors,
        x, shelf, num_sent, sent,
        board.rank, opening.digest, varying(opening.number), varying(x.shape[0]), x.shape[1], x.stride(0), chunk_len,
        FUSED=board.fused, BEGINS=begins, NUM_CHUNKS=NUM_CHUNKS, POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK,
        num_warps=8, helpers=(*SIGNALLING, copy_chunks), **tile.constants, **board.constants,
    )  # fmt: skip
    if not board.fused:
        launch_tell(board, CHUNKS, opening.digest, buffer=ROWS, begins=begins)
