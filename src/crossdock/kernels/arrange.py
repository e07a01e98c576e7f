"""Where published slots go among the rows of this rank's experts: by expert, then source rank, token and slot.

Every rank reads the ids that all ranks have published and works this out for itself. Two ranks, one local expert
(expert 0), one slot a token; rank 0 has published ids `[[0]]`, rank 1 `[[1], [0]]`. Blocks of one token, two a rank:
counts by block are 1, 0, 0, 1, so 0, 1, 1, 1 slots stand before them; the group begins at row 0 and has 2 rows;
`row_of_slot = [[[0], [-1]], [[-1], [1]]]`. With a capacity of 1 row the last slot is dropped: `[[[0], [-1]], [[-1],
[-2]]]`, 1 row is kept and 2 were wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import expert_chunk, token_block, up_to
from .launch import launch

NO_ROW, DROPPED = -1, -2
_SCAN_BLOCKS = 256


class Published(NamedTuple):
    """What all ranks have published of one dispatch, as one of them reads it.

    Attributes:
        ids_table: `[ep_size]` int64: addresses of int32 `[max_tokens, top_k]`.
        scores_table: `[ep_size]` int64: addresses of float32 `[max_tokens, top_k]`.
        num_tokens: `[ep_size]` int64 on the device, any stride: T by rank.
        top_k: slots of a token.
    """

    ids_table: torch.Tensor
    scores_table: torch.Tensor
    num_tokens: torch.Tensor
    top_k: int


class Groups(NamedTuple):
    """The experts' groups of rows.

    Attributes:
        before: `[ep_size * num_blocks, e]` int32: slots of an expert before each block of tokens.
        starts: `[e]` int64: first row of each group.
        padding: `[2, e]` int64: where each group's padding begins and ends.
        tokens_per_expert: `[e]` int64: rows that are kept.
        wanted: `[e]` int64: rows that were asked for.
        expert_offsets: `[e]` int32: inclusive padded ends, never beyond the capacity.
        num_blocks: blocks of tokens of a rank.
        block: tokens of a block.
    """

    before: torch.Tensor
    starts: torch.Tensor
    padding: torch.Tensor
    tokens_per_expert: torch.Tensor
    wanted: torch.Tensor
    expert_offsets: torch.Tensor
    num_blocks: int
    block: int


def count_published_kernel(
    ids_table_ptr,  # [EP] int64: addresses of int32 [max_tokens, K]
    num_tokens_ptr,  # int64, one every `stride` words: T by rank
    counts_ptr,  # [EP * num_blocks, e] int32
    bad_ptr,  # [EP] int64, added to: ids outside the range
    stride,
    num_blocks,
    first_expert,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Histogram of one block of one rank's tokens."""
    from_rank = tl.program_id(1)
    num_tokens = tl.load(num_tokens_ptr + from_rank * stride)
    flat = tl.arange(0, BLOCK * TOP_K_BLOCK)
    token, slot = tl.program_id(0) * BLOCK + flat // TOP_K_BLOCK, flat % TOP_K_BLOCK
    inside = (token < num_tokens) & (slot < TOP_K)
    ids_ptr = tl.load(ids_table_ptr + from_rank).to(tl.pointer_type(tl.int32))
    ids = tl.load(ids_ptr + token.to(tl.int64) * TOP_K + slot, mask=inside, other=-1)
    num_bad = tl.reduce((ids < -1).to(tl.int32), 0, tl.standard._sum_combine)
    tl.atomic_add(bad_ptr + from_rank, num_bad.to(tl.int64), sem="relaxed")
    at = counts_ptr + (from_rank * num_blocks + tl.program_id(0)).to(tl.int64) * NUM_LOCAL
    for start in range(0, NUM_LOCAL, CHUNK):
        expert = start + tl.arange(0, CHUNK)
        hits = ((ids - first_expert)[:, None] == expert[None, :]) & (ids >= 0)[:, None]
        counts = tl.reduce(hits.to(tl.int32), 0, tl.standard._sum_combine)
        tl.store(at + expert, counts, mask=expert < NUM_LOCAL)


def scan_published_kernel(
    counts_ptr,  # [N, e] int32, becomes the slots of this expert in earlier blocks
    wanted_ptr,  # [e] int64
    num_blocks,  # N: of all ranks
    NUM_LOCAL: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some experts' columns, from counts to what stands before each block."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    carry = tl.full((EXPERTS,), 0, tl.int32)
    for first in range(0, num_blocks, BLOCK):
        block = (first + tl.arange(0, BLOCK)).to(tl.int64)
        known = (block < num_blocks)[:, None] & (expert < NUM_LOCAL)[None, :]
        at = counts_ptr + block[:, None] * NUM_LOCAL + expert[None, :]
        count = tl.load(at, mask=known, other=0)
        before = carry[None, :] + tl.associative_scan(count, 0, tl.standard._sum_combine) - count
        tl.store(at, before, mask=known)
        carry += tl.reduce(count, 0, tl.standard._sum_combine)
    tl.store(wanted_ptr + expert, carry.to(tl.int64), mask=expert < NUM_LOCAL)


def fit_groups_kernel(
    wanted_ptr,  # [e] int64
    starts_ptr,  # [e] int64
    padding_ptr,  # [2, e] int64
    kept_ptr,  # [e] int64
    ends_ptr,  # [e] int32
    num_rows_ptr,  # [1] int64: rows of all groups with padding, before the capacity
    capacity,
    ALIGNMENT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Padded groups one after the other, cut off at the capacity.

    Wanted 0, 1, 9 with alignment 8 end at 0, 8, 24; with a capacity of 16 they end at 0, 8, 16 and keep 0, 1, 8.
    """
    expert = tl.arange(0, BLOCK)
    known = expert < NUM_LOCAL
    wanted = tl.load(wanted_ptr + expert, mask=known, other=0)
    padded = (wanted + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    end = tl.associative_scan(padded, 0, tl.standard._sum_combine)
    start = end - padded
    room = tl.where(capacity > start, capacity - start, 0)
    kept = tl.where(wanted < room, wanted, room)
    inside = tl.where(end < capacity, end, capacity)
    start = tl.where(start < capacity, start, capacity)
    tl.store(starts_ptr + expert, start, mask=known)
    tl.store(padding_ptr + expert, start + kept, mask=known)
    tl.store(padding_ptr + NUM_LOCAL + expert, inside, mask=known)
    tl.store(kept_ptr + expert, kept, mask=known)
    tl.store(ends_ptr + expert, inside.to(tl.int32), mask=known)
    tl.store(num_rows_ptr, tl.reduce(padded, 0, tl.standard._sum_combine))


def place_published_kernel(
    ids_table_ptr,  # [EP] int64: addresses of int32 [max_tokens, K]
    scores_table_ptr,  # [EP] int64: addresses of float32 [max_tokens, K]
    num_tokens_ptr,  # int64, one every `stride` words: T by rank
    before_ptr,  # [EP * num_blocks, e] int32, as scanned
    starts_ptr,  # [e] int64
    kept_ptr,  # [e] int64
    row_of_slot_ptr,  # [EP, S, K] int32: -1 elsewhere, -2 dropped
    row_scores_ptr,  # [R] float32
    stride,
    num_blocks,
    num_places,  # S
    first_expert,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Rows of one block of one rank's tokens: the group's start, what stands before the block and before the slot."""
    from_rank = tl.program_id(1)
    num_tokens = tl.load(num_tokens_ptr + from_rank * stride)
    flat = tl.arange(0, BLOCK * TOP_K_BLOCK)
    token, slot = tl.program_id(0) * BLOCK + flat // TOP_K_BLOCK, flat % TOP_K_BLOCK
    named = (token < num_tokens) & (slot < TOP_K)
    at = token.to(tl.int64) * TOP_K + slot
    ids_ptr = tl.load(ids_table_ptr + from_rank).to(tl.pointer_type(tl.int32))
    local = tl.load(ids_ptr + at, mask=named, other=-1) - first_expert
    here = named & (local >= 0) & (local < NUM_LOCAL)
    row = tl.full((BLOCK * TOP_K_BLOCK,), 0, tl.int64)
    fits = tl.full((BLOCK * TOP_K_BLOCK,), 0, tl.int32)
    blocks_before = (from_rank * num_blocks + tl.program_id(0)).to(tl.int64)
    for start in range(0, NUM_LOCAL, CHUNK):
        expert = start + tl.arange(0, CHUNK)
        known = expert < NUM_LOCAL
        first_row = tl.load(starts_ptr + expert, mask=known, other=0)
        kept = tl.load(kept_ptr + expert, mask=known, other=0)
        before = tl.load(before_ptr + blocks_before * NUM_LOCAL + expert, mask=known, other=0)
        hits = (here[:, None] & (local[:, None] == expert[None, :])).to(tl.int32)
        earlier = before[None, :] + tl.associative_scan(hits, 0, tl.standard._sum_combine) - hits
        row += tl.reduce(hits * (first_row[None, :] + earlier), 1, tl.standard._sum_combine)
        fits += tl.reduce(hits * (earlier < kept[None, :]).to(tl.int32), 1, tl.standard._sum_combine)
    placed = here & (fits > 0)
    mark = tl.where(placed, row, tl.where(here, -2, -1)).to(tl.int32)
    wide = from_rank.to(tl.int64) * num_places * TOP_K + at
    tl.store(row_of_slot_ptr + wide, mark, mask=(token < num_places) & (slot < TOP_K))
    scores_ptr = tl.load(scores_table_ptr + from_rank).to(tl.pointer_type(tl.float32))
    tl.store(row_scores_ptr + row, tl.load(scores_ptr + at, mask=placed, other=0.0), mask=placed)


def launch_count_published(
    published: Published,
    experts: tuple[int, int],
    alignment: int,
    max_tokens: int,
    capacity: int,
    num_bad: torch.Tensor,
    num_rows: torch.Tensor,
) -> Groups:
    """Count what all ranks have published for this one's experts and lay their groups one after the other.

    Args:
        published: see there; read behind a wait (pattern acquire of `signal.py`).
        experts: the first local expert's id, and how many are local.
        alignment: groups are padded to a multiple of this.
        max_tokens: no rank has more tokens.
        capacity: rows there will be room for.
        num_bad: `[ep_size]` int64, filled with the ids outside the range, by rank.
        num_rows: `[1]` int64, filled with the rows of all groups with padding, whatever the capacity.
    """
    (first_expert, num_local), device = experts, published.ids_table.device
    ep_size, top_k, block = published.ids_table.shape[0], published.top_k, token_block(device, max_tokens)
    num_blocks = triton.cdiv(max_tokens, block)
    before = torch.empty(ep_size * num_blocks, num_local, dtype=torch.int32, device=device)
    starts, wanted = torch.empty(2, num_local, dtype=torch.int64, device=device).unbind()
    groups = Groups(
        before=before,
        starts=starts,
        padding=starts.new_empty(2, num_local),
        tokens_per_expert=torch.empty_like(starts),
        wanted=wanted,
        expert_offsets=before.new_empty(num_local),
        num_blocks=num_blocks,
        block=block,
    )
    num_bad.zero_()
    if num_blocks:
        launch(
            count_published_kernel,
            (num_blocks, ep_size),
            device,
            published.ids_table,
            published.num_tokens,
            before,
            num_bad,
            published.num_tokens.stride(0),
            num_blocks,
            first_expert,
            TOP_K=top_k,
            TOP_K_BLOCK=triton.next_power_of_2(top_k),
            NUM_LOCAL=num_local,
            BLOCK=block,
            CHUNK=expert_chunk(device, num_local),
            num_warps=4,
        )
    scanned = 1 if device.type == "cuda" else triton.next_power_of_2(num_local)
    launch(
        scan_published_kernel,
        (triton.cdiv(num_local, scanned),),
        device,
        before,
        wanted,
        ep_size * num_blocks,
        NUM_LOCAL=num_local,
        EXPERTS=scanned,
        BLOCK=_SCAN_BLOCKS if device.type == "cuda" else up_to(_SCAN_BLOCKS, ep_size * num_blocks),
    )
    launch(
        fit_groups_kernel,
        (1,),
        device,
        wanted,
        groups.starts,
        groups.padding,
        groups.tokens_per_expert,
        groups.expert_offsets,
        num_rows,
        capacity,
        ALIGNMENT=alignment,
        NUM_LOCAL=num_local,
        BLOCK=triton.next_power_of_2(num_local),
    )
    return groups


def launch_place_published(
    published: Published, groups: Groups, first_expert: int, alignment: int, num_places: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place the slots that `launch_count_published` counted.

    Args:
        published: as counted.
        groups: what counting gave.
        first_expert: the first local expert's id.
        alignment: of the groups.
        num_places: S, at least every rank's T.
        num_rows: R, the rows there is room for.

    Returns:
        `row_of_slot [ep_size, S, K]` int32 (`NO_ROW` where a slot has no expert here, `DROPPED` beyond the capacity)
        and `row_scores [R]` float32.
    """
    device, ep_size, top_k = published.ids_table.device, published.ids_table.shape[0], published.top_k
    num_local, block = groups.starts.shape[0], groups.block
    row_of_slot = groups.before.new_empty(ep_size, num_places, top_k)
    make = torch.empty if alignment == 1 else torch.zeros
    row_scores = make(num_rows, dtype=torch.float32, device=device)
    if num_places:
        launch(
            place_published_kernel,
            (triton.cdiv(num_places, block), ep_size),
            device,
            published.ids_table,
            published.scores_table,
            published.num_tokens,
            groups.before,
            groups.starts,
            groups.tokens_per_expert,
            row_of_slot,
            row_scores,
            published.num_tokens.stride(0),
            groups.num_blocks,
            num_places,
            first_expert,
            TOP_K=top_k,
            TOP_K_BLOCK=triton.next_power_of_2(top_k),
            NUM_LOCAL=num_local,
            BLOCK=block,
            CHUNK=expert_chunk(device, num_local),
            num_warps=8,
        )
    return row_of_slot, row_scores
