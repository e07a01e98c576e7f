"""What leaves a rank: counts by destination, and where every token's row stands among those for one rank.

Two ranks with two experts each, seen from rank 0; token 0 names experts 0 and 2, token 1 names expert 1 and none.
Rank 0 is told one slot for each of its experts and two token rows, rank 1 one slot for its first expert and one token
row. Rows for rank 1 stand first, because a rank's own rows come last: `token_of_sent = [0, 0, 1]`, `sent_of_token =
[[1, 0], [2, -1]]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch

_COUNT_TOKENS = 32
_PLACE_TOKENS = 1024


def count_leaving_kernel(
    ids_ptr,  # [T, K] int32 or int64 global expert ids, -1 none
    headers_ptr,  # [EP, W] int64, words added to: rows for that rank, bad ids, slots by expert of that rank
    num_tokens,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,  # TOP_K rounded up to a power of two
    NUM_LOCAL: tl.constexpr,
    EP_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,  # W
    ROWS_WORD: tl.constexpr,
    BAD_WORD: tl.constexpr,
    COUNTS_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count one block of tokens into every rank's header."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, TOP_K_BLOCK)
    inside = (token < num_tokens)[:, None] & (slot < TOP_K)[None, :]
    ids = tl.load(ids_ptr + token.to(tl.int64)[:, None] * TOP_K + slot[None, :], mask=inside, other=-1).to(tl.int64)
    bad = (ids < -1) | (ids >= NUM_LOCAL * EP_SIZE)
    ids = tl.where(bad, -1, ids)
    home = tl.where(ids < 0, 0, ids // NUM_LOCAL)
    word = home * NUM_WORDS + COUNTS_WORD + ids - home * NUM_LOCAL
    tl.atomic_add(headers_ptr + word, tl.full((BLOCK, TOP_K_BLOCK), 1, tl.int64), mask=ids >= 0, sem="relaxed")
    num_bad = tl.reduce(tl.reduce(bad.to(tl.int32), 1, tl.standard._sum_combine), 0, tl.standard._sum_combine)
    for rank in range(EP_SIZE):
        here = ((ids >= 0) & (home == rank)).to(tl.int32)
        rows = tl.reduce((tl.reduce(here, 1, tl.standard._sum_combine) > 0).to(tl.int32), 0, tl.standard._sum_combine)
        tl.atomic_add(headers_ptr + rank * NUM_WORDS + ROWS_WORD, rows.to(tl.int64), sem="relaxed")
        tl.atomic_add(headers_ptr + rank * NUM_WORDS + BAD_WORD, num_bad.to(tl.int64), sem="relaxed")


def place_leaving_kernel(
    ids_ptr,  # [T, K] as above
    headers_ptr,  # [EP, W] int64, as counted
    token_of_sent_ptr,  # [S] int64
    sent_of_token_ptr,  # [T, EP] int64, -1 where a token does not go
    sent_slot_ptr,  # [T, K] int64: sent row * K + k, -1 without an expert
    num_tokens,
    rank,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    ROWS_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Place the rows for one destination: the program's number. Others' rows before it decide where they start."""
    to_rank = tl.program_id(0)
    peer = tl.arange(0, EP_BLOCK)
    place = tl.where(peer == rank, EP_SIZE, peer)  # own rows stand last
    own_place = tl.where(to_rank == rank, EP_SIZE, to_rank)
    before = (peer < EP_SIZE) & (place < own_place)
    rows_before = tl.load(headers_ptr + peer * NUM_WORDS + ROWS_WORD, mask=before, other=0)
    start = tl.reduce(rows_before, 0, tl.standard._sum_combine)
    slot = tl.arange(0, TOP_K_BLOCK)
    for first in range(0, num_tokens, BLOCK):
        token = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = (token < num_tokens)[:, None] & (slot < TOP_K)[None, :]
        ids = tl.load(ids_ptr + token[:, None] * TOP_K + slot[None, :], mask=inside, other=-1).to(tl.int64)
        named = (ids >= 0) & (ids < NUM_LOCAL * EP_SIZE)
        here = named & (ids // NUM_LOCAL == to_rank)
        goes = (tl.reduce(here.to(tl.int32), 1, tl.standard._sum_combine) > 0).to(tl.int64)
        sent = start + tl.associative_scan(goes, 0, tl.standard._sum_combine) - 1
        tl.store(token_of_sent_ptr + sent, token, mask=goes > 0)
        tl.store(sent_of_token_ptr + token * EP_SIZE + to_rank, tl.where(goes > 0, sent, -1), mask=token < num_tokens)
        at_slot = sent_slot_ptr + token[:, None] * TOP_K + slot[None, :]
        tl.store(at_slot, sent[:, None] * TOP_K + slot[None, :], mask=here)
        tl.store(at_slot, tl.full((BLOCK, TOP_K_BLOCK), -1, tl.int64), mask=inside & (named == 0) & (to_rank == rank))
        start += tl.reduce(goes, 0, tl.standard._sum_combine)


def launch_count_leaving(
    expert_ids: torch.Tensor, headers: torch.Tensor, num_local: int, words: tuple[int, int, int]
) -> None:
    """Add this rank's counts to `headers [ep_size, W]`; `words` are the places of rows, bad ids and counts."""
    num_tokens, top_k = expert_ids.shape
    if num_tokens == 0:
        return
    launch(
        count_leaving_kernel,
        (triton.cdiv(num_tokens, _COUNT_TOKENS),),
        headers.device,
        expert_ids,
        headers,
        num_tokens,
        TOP_K=top_k,
        TOP_K_BLOCK=triton.next_power_of_2(top_k),
        NUM_LOCAL=num_local,
        EP_SIZE=headers.shape[0],
        NUM_WORDS=headers.shape[1],
        ROWS_WORD=words[0],
        BAD_WORD=words[1],
        COUNTS_WORD=words[2],
        BLOCK=_COUNT_TOKENS,
        num_warps=4,
    )


def launch_place_leaving(
    expert_ids: torch.Tensor, headers: torch.Tensor, num_local: int, rows_word: int, rank: int, num_sent: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_of_sent [S]`, `sent_of_token [T, ep_size]`, `sent_slot_of_slot [T, top_k]`, all int64."""
    (num_tokens, top_k), ep_size = expert_ids.shape, headers.shape[0]
    new_empty = headers.new_empty
    token_of_sent, sent_of_token = new_empty(num_sent), new_empty(num_tokens, ep_size)
    sent_slot_of_slot = new_empty(num_tokens, top_k)
    if num_tokens:
        launch(
            place_leaving_kernel,
            (ep_size,),
            headers.device,
            expert_ids,
            headers,
            token_of_sent,
            sent_of_token,
            sent_slot_of_slot,
            num_tokens,
            rank,
            TOP_K=top_k,
            TOP_K_BLOCK=triton.next_power_of_2(top_k),
            NUM_LOCAL=num_local,
            EP_SIZE=ep_size,
            EP_BLOCK=triton.next_power_of_2(ep_size),
            NUM_WORDS=headers.shape[1],
            ROWS_WORD=rows_word,
            BLOCK=_PLACE_TOKENS,
            num_warps=8,
        )
    return token_of_sent, sent_of_token, sent_slot_of_slot
