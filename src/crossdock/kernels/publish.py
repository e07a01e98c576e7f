"""Lay out a rank's tokens where its peers can read them: rows, and in a dispatch the routing too.

Two ranks with two experts each, rank 0: token 0 names experts 0 and 2, token 1 names expert 1 and none. The published
ids are `[[0, 2], [1, -1]]`, and `home_of_slot = [[0, 1], [0, -1]]` tells which rank has each slot's expert. An id
outside -1..3 is published as -2: nobody places it, and every rank counts it. One row will be pulled by another rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import row_block
from .header import write_header
from .launch import launch


class Shelf(NamedTuple):
    """Where a rank lays out what it publishes, in shared memory.

    Attributes:
        rows: `[max_tokens, hidden_dim]`.
        ids: `[max_tokens, top_k]` int32.
        scores: `[max_tokens, top_k]` float32.
        headers: `[2, W]` int64.
        state: `[1 + num_buffers]` int64, ordinary memory.
        sent: `[1]` int64, ordinary memory: rows that other ranks pull from here, added up.
        rank: whose it is.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    headers: torch.Tensor
    state: torch.Tensor
    sent: torch.Tensor
    rank: int


def publish_kernel(
    x_ptr,  # [T, D], rows `x_stride` elements apart
    ids_ptr,  # [T, K] int64
    scores_ptr,  # [T, K] float32
    words_ptr,  # [W] int64
    shelf_rows_ptr,  # [max_tokens, D]
    shelf_ids_ptr,  # [max_tokens, K] int32
    shelf_scores_ptr,  # [max_tokens, K] float32
    headers_ptr,  # [2, W] int64
    state_ptr,  # [1 + num_buffers] int64
    home_ptr,  # [T, K] int32: rank of each slot's expert, -1 none; written if ROUTED, else read
    sent_ptr,  # [1] int64, added to
    rank,
    num_tokens,
    hidden_dim,
    x_stride,
    ROUTED: tl.constexpr,  # whether ids and scores are published too
    NUM_WORDS: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    EP_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Copy one block of tokens (pattern publish)."""
    if tl.program_id(0) == 0:
        write_header(words_ptr, headers_ptr, state_ptr, NUM_WORDS, WORDS_BLOCK)
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_range = token < num_tokens
    slot = tl.arange(0, TOP_K_BLOCK)
    at = token[:, None] * TOP_K + slot[None, :]
    inside = in_range[:, None] & (slot < TOP_K)[None, :]
    if ROUTED:
        ids = tl.load(ids_ptr + at, mask=inside, other=-1)
        ids = tl.where((ids < -1) | (ids >= NUM_EXPERTS), -2, ids).to(tl.int32)
        tl.store(shelf_ids_ptr + at, ids, mask=inside)
        home = tl.where(ids < 0, -1, ids // NUM_LOCAL)
        tl.store(home_ptr + at, home, mask=inside)
        tl.store(shelf_scores_ptr + at, tl.load(scores_ptr + at, mask=inside, other=0.0), mask=inside)
    else:
        home = tl.load(home_ptr + at, mask=inside, other=-1)
    num_sent = tl.full((), 0, tl.int32)
    for to_rank in range(EP_SIZE):
        named = ((home == to_rank) & (to_rank != rank)).to(tl.int32)
        pulled = (tl.reduce(named, 1, tl.standard._sum_combine) > 0).to(tl.int32)
        num_sent += tl.reduce(pulled, 0, tl.standard._sum_combine)
    tl.atomic_add(sent_ptr, num_sent.to(tl.int64), sem="relaxed")
    for start in range(0, hidden_dim, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        tile = in_range[:, None] & (col < hidden_dim)[None, :]
        value = tl.load(x_ptr + token[:, None] * x_stride + col[None, :], mask=tile, other=0.0)
        tl.store(shelf_rows_ptr + token[:, None] * hidden_dim + col[None, :], value, mask=tile)


def launch_publish(
    x: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor] | torch.Tensor,
    words: torch.Tensor,
    shelf: Shelf,
    num_experts: int,
    num_local: int,
) -> torch.Tensor:
    """Lay out rows `[T, D]`, their routing, and a header `[W]` int64.

    `routing` is ids `[T, K]` int64 and scores `[T, K]` float32, or `home_of_slot` where they were published before.

    Returns:
        `home_of_slot [T, K]` int32: the rank that has each slot's expert, -1 for none.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_tokens, hidden_dim), top_k = x.shape, shelf.ids.shape[1]
    if isinstance(routing, torch.Tensor):
        home_of_slot = ids = scores = routing
    else:
        home_of_slot = shelf.ids.new_empty(num_tokens, top_k)
        ids, scores = (part.contiguous() for part in routing)
    block = row_block(x.device, hidden_dim, num_tokens)
    launch(
        publish_kernel,
        (max(1, triton.cdiv(num_tokens, block["BLOCK_ROWS"])),),  # the header is written without tokens, too
        x.device,
        x,
        ids,
        scores,
        words,
        shelf.rows,
        shelf.ids,
        shelf.scores,
        shelf.headers,
        shelf.state,
        home_of_slot,
        shelf.sent,
        shelf.rank,
        num_tokens,
        hidden_dim,
        x.stride(0),
        ROUTED=not isinstance(routing, torch.Tensor),
        NUM_WORDS=words.shape[0],
        WORDS_BLOCK=triton.next_power_of_2(words.shape[0]),
        NUM_EXPERTS=num_experts,
        NUM_LOCAL=num_local,
        EP_SIZE=num_experts // num_local,
        TOP_K=top_k,
        TOP_K_BLOCK=triton.next_power_of_2(top_k),
        num_warps=8,
        helpers=(write_header,),
        **block,
    )
    return home_of_slot
