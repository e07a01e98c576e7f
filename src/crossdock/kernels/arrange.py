"""Where routed slots go among the rows of this rank's experts: by expert, then source rank, token and slot.

Every rank gets the ids of all ranks and works this out for itself, over blocks of tokens. First every slot is placed
among those of its expert in its block, and they are counted; then the experts' groups are laid one after the other, up
to the capacity, and a slot's row is its group's start, plus what stands in earlier blocks, plus what stands before it
in its own. Two ranks, one local expert (expert 0), one slot a token; rank 0 has sent ids `[[0]]`, rank 1 `[[1], [0]]`.
Blocks of one token, two a rank: slots by block are 1, 0, 0, 1, so 0, 1, 1, 1 stand before them; the group begins at row
0 and has 2 rows; `row_of_slot = [[[0], [-1]], [[-1], [1]]]`. With a capacity of 1 row the last slot is dropped:
`[[[0], [-1]], [[-1], [-2]]]`, 1 row is kept and 2 were wanted.

A block: two slots a token, two experts here, two tokens with ids `[[0, 1], [0, -1]]`: the slots stand behind 0, 0 and 1
others of their expert in the block, and the block counts 2 and 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .signal import is_last, meet, wait_for, wide


class Routed(NamedTuple):
    """What all ranks have sent this one of a dispatch.

    Attributes:
        ids: `[ep_size, max_tokens, K]` int32.
        scores: `[ep_size, max_tokens, K]` float32.
        bound: S: no rank has more tokens.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    bound: int


class Groups(NamedTuple):
    """The experts' groups of rows.

    Attributes:
        row_of_slot: `[ep_size, S, K]` int32: the row of every slot; -1 without an expert here, -2 beyond the capacity.
            Until slots are placed: how many of its expert stand before it in its block.
        counts: `[ep_size * num_blocks, e]` int32: slots of an expert in each block of tokens.
        padding: `[2, e]` int64: where each group's padding begins and ends.
        tokens_per_expert: `[e]` int64: rows that are kept.
        wanted: `[e]` int64: rows that were asked for.
        expert_offsets: `[e]` int32: inclusive padded ends, never beyond the capacity.
        bad_ids: `[ep_size]` int64: ids outside the range, by source rank.
        report: `[1 + ep_size]` int64: rows of all groups with padding, whatever the capacity; then T by rank.
    """

    row_of_slot: torch.Tensor
    counts: torch.Tensor
    padding: torch.Tensor
    tokens_per_expert: torch.Tensor
    wanted: torch.Tensor
    expert_offsets: torch.Tensor
    bad_ids: torch.Tensor
    report: torch.Tensor


def count_block(
    ids_ptr, row_of_slot_ptr, counts_ptr, num_tokens, from_rank, block, tile, bound, max_tokens, first_expert,
    TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, NUM_LOCAL: tl.constexpr, LOCAL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Place the slots of one block of tokens among those of their experts in it, and count them."""
    flat = tl.arange(0, BLOCK * TOP_K_BLOCK)
    token, slot = block * BLOCK + flat // TOP_K_BLOCK, flat % TOP_K_BLOCK
    ids_at = ids_ptr + wide(from_rank) * max_tokens * TOP_K
    named = (token < num_tokens) & (slot < TOP_K)
    expert = tl.load(ids_at + token * TOP_K + slot, mask=named, other=-1) - first_expert
    here = named & (expert >= 0) & (expert < NUM_LOCAL)
    expert = tl.where(here, expert, -1)
    counts = counts_ptr + wide(tile) * NUM_LOCAL
    local = tl.arange(0, LOCAL_BLOCK)
    tl.store(counts + local, 0, mask=local < NUM_LOCAL)
    earlier = tl.full((BLOCK * TOP_K_BLOCK,), 0, tl.int32)
    for start in tl.static_range(0, BLOCK * TOP_K_BLOCK, OTHERS):  # unrolled, so that all is loaded at once
        other = start + tl.arange(0, OTHERS)
        other_token, other_slot = block * BLOCK + other // TOP_K_BLOCK, other % TOP_K_BLOCK
        other_named = (other_token < num_tokens) & (other_slot < TOP_K)
        other_id = tl.load(ids_at + other_token * TOP_K + other_slot, mask=other_named, other=-1) - first_expert
        same = (expert[:, None] == other_id[None, :]) & (other[None, :] < flat[:, None])
        earlier += tl.reduce(same.to(tl.int32), 1, tl.standard._sum_combine)
    at = (wide(from_rank) * bound + token) * TOP_K + slot
    tl.store(row_of_slot_ptr + at, tl.where(here, earlier, -1), mask=(token < bound) & (slot < TOP_K))
    tl.debug_barrier()
    tl.atomic_add(counts + expert, 1, mask=here, sem="relaxed", scope="gpu")


def count_before(counts_ptr, tile, num_tiles, NUM_LOCAL: tl.constexpr, LOCAL_BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Slots by expert in the blocks before `tile`, and in all: counts 1, 0, 0, 1 are 1 before tile 3, and 2."""
    local = tl.arange(0, LOCAL_BLOCK)
    before = tl.full((TILES, LOCAL_BLOCK), 0, tl.int32)
    total = tl.full((TILES, LOCAL_BLOCK), 0, tl.int32)
    for start in range(0, num_tiles, TILES):
        other = start + tl.arange(0, TILES)
        known = (other < num_tiles)[:, None] & (local < NUM_LOCAL)[None, :]
        at = counts_ptr + other[:, None].to(tl.int64) * NUM_LOCAL + local[None, :]
        count = tl.load(at, mask=known, other=0)
        total += count
        before += tl.where((other < tile)[:, None], count, 0)
    return tl.reduce(before, 0, tl.standard._sum_combine), tl.reduce(total, 0, tl.standard._sum_combine)


def fit_groups(wanted, capacity, ALIGNMENT: tl.constexpr):
    """Padded groups one after the other, cut off at the capacity: starts, kept, ends, and the rows of all.

    Wanted 0, 1, 9 with alignment 8 end at 0, 8, 24; with a capacity of 16 they end at 0, 8, 16 and keep 0, 1, 8.
    """
    padded = (wanted + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    end = tl.associative_scan(padded, 0, tl.standard._sum_combine)
    start = end - padded
    room = tl.where(capacity > start, capacity - start, 0)
    kept = tl.where(wanted < room, wanted, room)
    start = tl.where(start < capacity, start, capacity)
    return start, kept, tl.where(end < capacity, end, capacity), tl.reduce(padded, 0, tl.standard._sum_combine)


def report_groups(
    wanted_ptr, padding_ptr, kept_ptr, ends_ptr, bad_ids_ptr, report_ptr, told_ptr, wanted, start, kept, end, num_rows,
    NUM_LOCAL: tl.constexpr, LOCAL_BLOCK: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what the caller is told of the groups, and of what every rank brings (`told_ptr [EP]`)."""
    local = tl.arange(0, LOCAL_BLOCK)
    known = local < NUM_LOCAL
    tl.store(wanted_ptr + local, wanted.to(tl.int64), mask=known)
    tl.store(padding_ptr + local, (start + kept).to(tl.int64), mask=known)
    tl.store(padding_ptr + NUM_LOCAL + local, end.to(tl.int64), mask=known)
    tl.store(kept_ptr + local, kept.to(tl.int64), mask=known)
    tl.store(ends_ptr + local, end, mask=known)
    tl.store(report_ptr, num_rows.to(tl.int64))
    peer = tl.arange(0, EP_BLOCK)
    brought = tl.load(told_ptr + peer, mask=peer < EP_SIZE, other=0)
    tl.store(report_ptr + 1 + peer, brought & 0xFFFFFFFF, mask=peer < EP_SIZE)
    tl.store(bad_ids_ptr + peer, brought >> 32, mask=peer < EP_SIZE)


def place_block(
    ids_ptr, scores_ptr, row_of_slot_ptr, row_scores_ptrs, next_row_ptr, from_rank, block, bound, max_tokens,
    first_expert, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, NUM_LOCAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of one block of tokens: `next_row_ptr [2, e]` has each expert's next row, and how many still fit."""
    flat = tl.arange(0, BLOCK * TOP_K_BLOCK)
    token, slot = block * BLOCK + flat // TOP_K_BLOCK, flat % TOP_K_BLOCK
    at = (wide(from_rank) * bound + token) * TOP_K + slot
    earlier = tl.load(row_of_slot_ptr + at, mask=(token < bound) & (slot < TOP_K), other=-1)
    here = earlier >= 0
    source = wide(from_rank) * max_tokens * TOP_K + token * TOP_K + slot
    score = tl.load(scores_ptr + source, mask=here, other=0.0)
    expert = tl.load(ids_ptr + source, mask=here, other=0) - first_expert
    expert = tl.where(here, expert, 0)
    row = tl.load(next_row_ptr + expert, mask=here, other=0) + earlier
    fits = here & (earlier < tl.load(next_row_ptr + NUM_LOCAL + expert, mask=here, other=0))
    tl.store(row_of_slot_ptr + at, tl.where(fits, row, -2), mask=here)
    tl.store(row_scores_ptrs[0] + row, score, mask=fits)
    tl.store(row_scores_ptrs[1] + row, score, mask=fits)


def count_share(
    signals_ptr, state_ptr, desk_ptr, ids_ptr, row_of_slot_ptr, counts_ptr, told_ptr, number, digest, first_expert,
    begin, end_tile, num_blocks, bound, max_tokens, FUSED: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr, NUM_LOCAL: tl.constexpr, LOCAL_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    OTHERS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr, POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Wait for all ranks' routing (pattern acquire), and count blocks `begin` up to `end_tile`."""
    if FUSED:
        word = 2 + number % 2
        wait_for(signals_ptr, state_ptr, desk_ptr, word, number, digest, POLLS, POLLS_PER_LOOK, True, EP_SIZE, EP_BLOCK)
    for tile in range(begin, end_tile):
        from_rank, block = tile // num_blocks, tile % num_blocks
        num_tokens = (tl.load(told_ptr + from_rank) & 0xFFFFFFFF).to(tl.int32)
        num_tokens = tl.where(num_tokens < bound, num_tokens, bound)
        count_block(
            ids_ptr, row_of_slot_ptr, counts_ptr, num_tokens, from_rank, block, tile, bound, max_tokens,
            first_expert, TOP_K, TOP_K_BLOCK, NUM_LOCAL, LOCAL_BLOCK, BLOCK, OTHERS,
        )  # fmt: skip


def place_share(
    ids_ptr, scores_ptr, row_of_slot_ptr, counts_ptr, next_row, row_scores_ptrs, start, kept, end, before,
    first_expert, first, begin, end_tile, num_blocks, bound, max_tokens, ALIGNMENT: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr, NUM_LOCAL: tl.constexpr, LOCAL_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place blocks `begin` up to `end_tile`, before which stand `before [e]` slots; the first also scores padding."""
    local = tl.arange(0, LOCAL_BLOCK)
    known = local < NUM_LOCAL
    if ALIGNMENT > 1:
        if first == 0:
            for nth in range(1, ALIGNMENT):
                padding = start + kept + nth - 1
                tl.store(row_scores_ptrs[0] + padding, 0.0, mask=known & (padding < end))
                tl.store(row_scores_ptrs[1] + padding, 0.0, mask=known & (padding < end))
    for tile in range(begin, end_tile):
        tl.debug_barrier()  # the last block's rows have been read
        tl.store(next_row + local, start + before, mask=known)
        tl.store(next_row + NUM_LOCAL + local, kept - before, mask=known)
        tl.debug_barrier()
        place_block(
            ids_ptr, scores_ptr, row_of_slot_ptr, row_scores_ptrs, next_row, tile // num_blocks, tile % num_blocks,
            bound, max_tokens, first_expert, TOP_K, TOP_K_BLOCK, NUM_LOCAL, BLOCK,
        )  # fmt: skip
        before += tl.load(counts_ptr + wide(tile) * NUM_LOCAL + local, mask=known, other=0)


def arrange_share(
    signals_ptr, state_ptr, desk_ptr, ids_ptr, scores_ptr, row_of_slot_ptr, counts_ptr, padding_ptr, kept_ptr,
    wanted_ptr, ends_ptr, bad_ids_ptr, report_ptr, next_row_ptr, row_scores_ptrs, number, digest, first_expert, first,
    num_arrangers, bound, capacity, max_tokens, COUNTS: tl.constexpr, PLACES: tl.constexpr, FUSED: tl.constexpr,
    ALIGNMENT: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, NUM_LOCAL: tl.constexpr,
    LOCAL_BLOCK: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr, TILES: tl.constexpr, EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr, POLLS: tl.constexpr, POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Arranging, as program `first` of `num_arrangers`: count, look at what all have counted, report, and place.

    Whether this program has reported.
    """
    num_blocks = (bound + BLOCK - 1) // BLOCK
    num_tiles = EP_SIZE * num_blocks
    # Neighbours, since whoever places a block goes on from the one before it.
    own = (num_tiles + num_arrangers - 1) // num_arrangers
    begin = first * own
    end_tile = tl.where(begin + own < num_tiles, begin + own, num_tiles)
    told_ptr = signals_ptr + number % 2 * EP_SIZE
    if COUNTS:
        count_share(
            signals_ptr, state_ptr, desk_ptr, ids_ptr, row_of_slot_ptr, counts_ptr, told_ptr, number, digest,
            first_expert, begin, end_tile, num_blocks, bound, max_tokens, FUSED, TOP_K, TOP_K_BLOCK, NUM_LOCAL,
            LOCAL_BLOCK, BLOCK, OTHERS, EP_SIZE, EP_BLOCK, POLLS, POLLS_PER_LOOK,
        )  # fmt: skip
        if PLACES:
            meet(state_ptr, 0, num_arrangers)
    reports = tl.full((), 0, tl.int32) + (first == 0)
    if COUNTS and not PLACES:
        reports = tl.full((), 0, tl.int32) + is_last(state_ptr, 9, num_arrangers)
    looks = reports
    if PLACES:
        looks = tl.where(begin < end_tile, 1, reports)
    if looks != 0:
        before, wanted = count_before(counts_ptr, begin, num_tiles, NUM_LOCAL, LOCAL_BLOCK, TILES)
        start, kept, end, num_rows = fit_groups(wanted, capacity, ALIGNMENT)
        if COUNTS:
            if reports != 0:
                report_groups(
                    wanted_ptr, padding_ptr, kept_ptr, ends_ptr, bad_ids_ptr, report_ptr, told_ptr, wanted, start,
                    kept, end, num_rows, NUM_LOCAL, LOCAL_BLOCK, EP_SIZE, EP_BLOCK,
                )  # fmt: skip
        if PLACES:
            place_share(
                ids_ptr, scores_ptr, row_of_slot_ptr, counts_ptr, next_row_ptr + first * 2 * NUM_LOCAL,
                row_scores_ptrs, start, kept, end, before, first_expert, first, begin, end_tile, num_blocks, bound,
                max_tokens, ALIGNMENT, TOP_K, TOP_K_BLOCK, NUM_LOCAL, LOCAL_BLOCK, BLOCK,
            )  # fmt: skip
    if COUNTS and PLACES:
        if is_last(state_ptr, 9, num_arrangers):
            tl.store(state_ptr + 26, 0)
    return reports


ARRANGING = (
    count_block, count_before, fit_groups, report_groups, place_block, count_share, place_share, arrange_share,
)  # fmt: skip
