"""Open a dispatch: push a rank's routing to every rank.

Two ranks with two experts each, rank 0: token 0 names experts 0 and 2, token 1 names expert 1 and none. The ids that
both ranks get are `[[0, 2], [1, -1]]`, and `home_of_slot = [[0, 1], [0, -1]]` tells which rank has each slot's expert.
One row will be pushed to another rank. An id outside -1..3 arrives as -2: nobody places it, and its rank tells how many
there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .blocks import power_of_two, routing_block
from .launch import launch
from .signal import (
    ENDLESS,
    POLLS_PER_LOOK,
    READ,
    ROUTED,
    SIGNALLING,
    STAGING,
    Board,
    begin_call,
    count_wait,
    is_last,
    launch_tell,
    launch_wait,
    may_lay_out,
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
        max_tokens: of a rank, at most.
        num_experts: over all ranks.
        sent: `[1]` int64: rows that other ranks get from here are added.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    ids_table: torch.Tensor
    scores_table: torch.Tensor
    max_tokens: int
    num_experts: int
    sent: torch.Tensor


def new_scores(board: Board, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised `[R]` float32 twice, for what a dispatch writes twice: one is the caller's, one stays as it is."""
    row_scores = torch.empty(num_rows, dtype=torch.float32, device=board.device)
    return row_scores, torch.empty(num_rows, dtype=torch.float32, device=board.device)


def publish_routing_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    ids_ptr,  # [T, K] int64 or int32
    scores_ptr,  # [T, K] float32
    ids_table_ptr,  # [EP] int64: addresses of int32 [EP, max_tokens, K]
    scores_table_ptr,  # [EP] int64: addresses of float32 [EP, max_tokens, K]
    home_ptr,  # [T, K] int32: rank of each slot's expert, -1 none
    num_sent_ptr,  # [1] int64: rows that other ranks get
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
        wanted = (tl.reduce(named, 1, tl.standard._sum_combine) > 0).to(tl.int32)
        num_sent += tl.reduce(wanted, 0, tl.standard._sum_combine)
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


def launch_publish_routing(board: Board, opening: Opening, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Open a dispatch and push its routing to every rank.

    Returns:
        `home_of_slot [T, K]` int32: the rank that has each slot's expert, -1 for none; and how many rows other ranks
        will get, `[1]` int64.
    """
    num_tokens, top_k = routing.ids.shape
    home_of_slot = torch.empty(num_tokens, top_k, dtype=torch.int32, device=board.device)
    num_sent = torch.empty(1, dtype=torch.int64, device=board.device)
    block = routing_block(board.device, num_tokens)
    if not board.fused:
        launch_wait(board, READ, opening.digest, buffer=STAGING)
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
