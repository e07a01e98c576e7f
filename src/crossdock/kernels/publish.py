"""Push a rank's routing to every rank, which opens a dispatch.

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
    READ,
    ROUTED,
    SIGNALLING,
    Board,
    begin_call,
    is_last,
    may_lay_out,
    tell_routed,
    varying,
)
from .waits import launch_tell, launch_wait


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
        home_of_slot: `[T, K]` int32: out: the rank that has each slot's expert, -1 for none.
        num_sent: `[1]` int64: out: rows that other ranks get from here.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    ids_table: torch.Tensor
    scores_table: torch.Tensor
    max_tokens: int
    num_experts: int
    sent: torch.Tensor
    home_of_slot: torch.Tensor
    num_sent: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As kernels take them."""
        return (
            self.ids.contiguous(), self.scores.contiguous(), self.ids_table, self.scores_table, self.home_of_slot,
            self.num_sent, self.sent,
        )  # fmt: skip


def new_scores(board: Board, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised `[R]` float32 twice, for what a dispatch writes twice: one is the caller's, one stays as it is."""
    row_scores = torch.empty(num_rows, dtype=torch.float32, device=board.device)
    return row_scores, torch.empty(num_rows, dtype=torch.float32, device=board.device)


def publish_share(
    table_ptr, state_ptr,
    ids_ptr,  # [T, K] int64 or int32
    scores_ptr,  # [T, K] float32
    ids_table_ptr,  # [EP] int64: addresses of int32 [EP, max_tokens, K]
    scores_table_ptr,  # [EP] int64: addresses of float32 [EP, max_tokens, K]
    home_ptr,  # [T, K] int32: rank of each slot's expert, -1 none
    num_sent_ptr,  # [1] int64: rows that other ranks get
    sent_ptr,  # [1] int64, added to
    number, digest, rank, num_tokens, max_tokens, first, step,
    FUSED: tl.constexpr,  # whether this kernel tells
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Push blocks of tokens' routing to every rank, as program `first` of `step` (pattern publish)."""
    slot = tl.arange(0, TOP_K_BLOCK)
    may = may_lay_out(state_ptr)
    num_sent, num_bad = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(first * BLOCK, num_tokens, step * BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = (token < num_tokens)[:, None] & (slot < TOP_K)[None, :]
        at = token[:, None] * TOP_K + slot[None, :]
        ids = tl.load(ids_ptr + at, mask=inside, other=-1).to(tl.int64)
        score = tl.load(scores_ptr + at, mask=inside, other=0.0)
        bad = (ids < -1) | (ids >= NUM_EXPERTS)
        num_bad += tl.reduce(tl.reduce(bad.to(tl.int32), 1, tl.standard._sum_combine), 0, tl.standard._sum_combine)
        ids = tl.where(bad, -2, ids).to(tl.int32)
        home = tl.where(ids < 0, -1, ids // NUM_LOCAL)
        tl.store(home_ptr + at, home, mask=inside)
        there = (tl.full((), 0, tl.int64) + rank) * max_tokens * TOP_K + at
        for to_rank in range(EP_SIZE):
            ids_there = tl.load(ids_table_ptr + to_rank).to(tl.pointer_type(tl.int32))
            tl.store(ids_there + there, ids, mask=inside & may)
            scores_there = tl.load(scores_table_ptr + to_rank).to(tl.pointer_type(tl.float32))
            tl.store(scores_there + there, score, mask=inside & may)
            named = ((home == to_rank) & (to_rank != rank)).to(tl.int32)
            wanted = (tl.reduce(named, 1, tl.standard._sum_combine) > 0).to(tl.int32)
            num_sent += tl.reduce(wanted, 0, tl.standard._sum_combine)
    if num_bad > 0:
        tl.atomic_add(state_ptr + 7, num_bad.to(tl.int64), sem="relaxed")
    tl.atomic_add(state_ptr + 8, num_sent.to(tl.int64), sem="relaxed")
    if is_last(state_ptr, 13, step):
        total = tl.load(state_ptr + 8)
        tl.store(state_ptr + 8, 0)
        tl.store(num_sent_ptr, total)
        tl.store(sent_ptr, tl.load(sent_ptr) + total)
        if FUSED:
            tell_routed(table_ptr, state_ptr, number, rank, digest, num_tokens, EP_SIZE, EP_BLOCK)


def publish_routing_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr, ids_ptr, scores_ptr, ids_table_ptr, scores_table_ptr, home_ptr,
    num_sent_ptr, sent_ptr, rank, digest,
    call,  # `varying`: its number
    tokens,  # `varying`
    max_tokens,
    NUM_EXPERTS: tl.constexpr, NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr,
    EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`publish_share`, in a launch of its own."""
    if tl.program_id(0) == 0:
        begin_call(state_ptr, desk_ptr, call, False)
    publish_share(
        table_ptr, state_ptr, ids_ptr, scores_ptr, ids_table_ptr, scores_table_ptr, home_ptr, num_sent_ptr, sent_ptr,
        0, digest, rank, (tokens - 3) // 2, max_tokens, tl.program_id(0), tl.num_programs(0), False, NUM_EXPERTS,
        NUM_LOCAL, TOP_K, TOP_K_BLOCK, EP_SIZE, EP_BLOCK, BLOCK,
    )  # fmt: skip


def launch_publish_routing(board: Board, opening: Opening, routing: Routing) -> None:
    """In the interpreter: open a dispatch and push its routing to every rank."""
    num_tokens, top_k = routing.ids.shape
    block = routing_block(board.device, num_tokens)
    launch_wait(board, READ, opening.digest)
    launch(
        publish_routing_kernel, (max(1, -(-num_tokens // block)),), board.device, *board.tensors, *routing.tensors,
        board.rank, opening.digest, varying(opening.number), varying(num_tokens), routing.max_tokens,
        NUM_EXPERTS=routing.num_experts, NUM_LOCAL=routing.num_experts // board.ep_size,
        TOP_K=top_k, TOP_K_BLOCK=power_of_two(top_k), BLOCK=block,
        num_warps=4, helpers=(*SIGNALLING, publish_share), **board.constants,
    )  # fmt: skip
    launch_tell(board, ROUTED, opening.digest, num_tokens=num_tokens)
