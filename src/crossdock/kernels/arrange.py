"""Where routed slots go among the rows of this rank's experts: by expert, then source rank, token and slot.

Every rank gets the ids of all ranks and works this out for itself, in four steps over blocks of tokens: place every slot
among those of its expert in its block; sum up over blocks; lay the experts' groups one after the other, up to the
capacity; add up. Two ranks, one local expert (expert 0), one slot a token; rank 0 has sent ids `[[0]]`, rank 1 `[[1],
[0]]`. Blocks of one token, two a rank: slots by block are 1, 0, 0, 1, so 0, 1, 1, 1 stand before them; the group begins
at row 0 and has 2 rows; `row_of_slot = [[[0], [-1]], [[-1], [1]]]`. With a capacity of 1 row the last slot is dropped:
`[[[0], [-1]], [[-1], [-2]]]`, 1 row is kept and 2 were wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import Tile, token_block, up_to
from .launch import launch
from .publish import copy_chunks
from .signal import ENDLESS, NUM_CHUNKS, POLLS_PER_LOOK, ROUTED, SIGNALLING, Board, launch_wait, meet, varying

NO_ROW, DROPPED = -1, -2
_COUNT, _SUM, _PLACE = 1, 2, 4  # the steps; sums and groups are one
_SCAN_BLOCKS = 256
_OTHERS = 32  # slots that a slot is compared with at a time


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
        row_of_slot: `[ep_size, S, K]` int32: the row of every slot; `NO_ROW` without an expert here, `DROPPED` beyond
            the capacity. Until slots are placed: how many of its expert stand before it in its block.
        before: `[ep_size * num_blocks, e]` int32: slots of an expert before each block of tokens.
        starts: `[e]` int64: first row of each group.
        padding: `[2, e]` int64: where each group's padding begins and ends.
        tokens_per_expert: `[e]` int64: rows that are kept.
        wanted: `[e]` int64: rows that were asked for.
        expert_offsets: `[e]` int32: inclusive padded ends, never beyond the capacity.
        bad_ids: `[ep_size]` int64: ids outside the range, by source rank.
        report: `[1 + ep_size]` int64: rows of all groups with padding, whatever the capacity; then T by rank.
    """

    row_of_slot: torch.Tensor
    before: torch.Tensor
    starts: torch.Tensor
    padding: torch.Tensor
    tokens_per_expert: torch.Tensor
    wanted: torch.Tensor
    expert_offsets: torch.Tensor
    bad_ids: torch.Tensor
    report: torch.Tensor


class RowsToPublish(NamedTuple):
    """Rows that some programs lay out meanwhile, see `publish.launch_publish_rows`."""

    x: torch.Tensor
    shelf: torch.Tensor
    chunk_len: int
    tile: Tile


def count_block(
    ids_ptr, row_of_slot_ptr, before_ptr, num_tokens, from_rank, block, tile, bound, max_tokens, first_expert,
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
    earlier = tl.full((BLOCK * TOP_K_BLOCK,), 0, tl.int32)
    later = tl.full((BLOCK * TOP_K_BLOCK,), 0, tl.int32)
    for start in range(0, BLOCK * TOP_K_BLOCK, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_token, other_slot = block * BLOCK + other // TOP_K_BLOCK, other % TOP_K_BLOCK
        other_named = (other_token < num_tokens) & (other_slot < TOP_K)
        other_id = tl.load(ids_at + other_token * TOP_K + other_slot, mask=other_named, other=-1) - first_expert
        same = expert[:, None] == other_id[None, :]
        earlier += tl.reduce((same & (other[None, :] < flat[:, None])).to(tl.int32), 1, tl.standard._sum_combine)
        later += tl.reduce((same & (other[None, :] > flat[:, None])).to(tl.int32), 1, tl.standard._sum_combine)
    at = (wide(from_rank) * bound + token) * TOP_K + slot
    tl.store(row_of_slot_ptr + at, tl.where(here, earlier, -1), mask=(token < bound) & (slot < TOP_K))
    counts = before_ptr + wide(tile) * NUM_LOCAL
    local = tl.arange(0, LOCAL_BLOCK)
    tl.store(counts + local, 0, mask=local < NUM_LOCAL)
    tl.debug_barrier()
    tl.store(counts + expert, earlier + 1, mask=here & (later == 0))


def sum_expert(counts_ptr, wanted_ptr, expert, num_tiles, NUM_LOCAL: tl.constexpr, BLOCK: tl.constexpr):
    """One expert's counts by block become what stands before each block; and their sum."""
    carry = tl.full((), 0, tl.int32)
    for first in range(0, num_tiles, BLOCK):
        tile = (first + tl.arange(0, BLOCK)).to(tl.int64)
        at = counts_ptr + tile * NUM_LOCAL + expert
        count = tl.load(at, mask=tile < num_tiles, other=0)
        tl.store(at, carry + tl.associative_scan(count, 0, tl.standard._sum_combine) - count, mask=tile < num_tiles)
        carry += tl.reduce(count, 0, tl.standard._sum_combine)
    tl.store(wanted_ptr + expert, carry.to(tl.int64))


def fit_groups(
    wanted_ptr, starts_ptr, padding_ptr, kept_ptr, ends_ptr, num_rows_ptr, capacity,
    ALIGNMENT: tl.constexpr, NUM_LOCAL: tl.constexpr, LOCAL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Padded groups one after the other, cut off at the capacity.

    Wanted 0, 1, 9 with alignment 8 end at 0, 8, 24; with a capacity of 16 they end at 0, 8, 16 and keep 0, 1, 8.
    """
    expert = tl.arange(0, LOCAL_BLOCK)
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


def place_block(
    ids_ptr, scores_ptr, row_of_slot_ptr, before_ptr, starts_ptr, kept_ptr, row_scores_ptr, from_rank, block, tile,
    bound, max_tokens, first_expert, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of one block of tokens: the group's start, what stands before the block, and before the slot in it."""
    flat = tl.arange(0, BLOCK * TOP_K_BLOCK)
    token, slot = block * BLOCK + flat // TOP_K_BLOCK, flat % TOP_K_BLOCK
    at = (wide(from_rank) * bound + token) * TOP_K + slot
    earlier = tl.load(row_of_slot_ptr + at, mask=(token < bound) & (slot < TOP_K), other=-1)
    here = earlier >= 0
    source = wide(from_rank) * max_tokens * TOP_K + token * TOP_K + slot
    expert = tl.load(ids_ptr + source, mask=here, other=0) - first_expert
    expert = tl.where(here, expert, 0)
    nth = tl.load(before_ptr + wide(tile) * NUM_LOCAL + expert, mask=here, other=0) + earlier
    row = tl.load(starts_ptr + expert, mask=here, other=0) + nth
    fits = here & (nth < tl.load(kept_ptr + expert, mask=here, other=0))
    tl.store(row_of_slot_ptr + at, tl.where(fits, row, -2).to(tl.int32), mask=here)
    tl.store(row_scores_ptr + row, tl.load(scores_ptr + source, mask=fits, other=0.0), mask=fits)


def arrange_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    ids_ptr,  # [EP, max_tokens, K] int32
    scores_ptr,  # [EP, max_tokens, K] float32
    row_of_slot_ptr,  # [EP, S, K] int32
    before_ptr,  # [EP * num_blocks, e] int32
    starts_ptr,  # [e] int64
    padding_ptr,  # [2, e] int64
    kept_ptr,  # [e] int64
    wanted_ptr,  # [e] int64
    ends_ptr,  # [e] int32
    bad_ids_ptr,  # [EP] int64
    report_ptr,  # [1 + EP] int64
    row_scores_ptr,  # [R] float32; used by the last step
    x_ptr,  # [T, D]
    shelf_ptr,  # [max_tokens, D], shared
    rank,
    digest,
    tokens,  # `varying`: T
    places,  # `varying`: S
    limit,  # `varying`: R
    hidden_dim,
    x_stride,
    max_tokens,
    chunk_len,
    num_arrangers,  # the programs behind them lay out rows
    STEPS: tl.constexpr,
    FUSED: tl.constexpr,  # whether this kernel waits and tells, and its programs meet between steps
    COPIES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    LOCAL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
    SCAN_BLOCK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Some steps of arranging, by some programs; the others lay out rows (patterns acquire, grid and publish)."""
    first = tl.program_id(0)
    number = tl.load(state_ptr)
    if first >= num_arrangers:
        if COPIES:
            copy_chunks(
                x_ptr, shelf_ptr, table_ptr, state_ptr, number, digest, rank, (tokens - 3) // 2,
                first - num_arrangers, tl.num_programs(0) - num_arrangers, hidden_dim, x_stride, chunk_len,
                FUSED, NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
    else:
        bound, capacity = (places - 3) // 2, (limit - 3) // 2
        first_expert = rank * NUM_LOCAL
        num_blocks = (bound + BLOCK - 1) // BLOCK
        num_tiles = EP_SIZE * num_blocks
        if STEPS % 2 == 1:
            if FUSED:
                if first == 0:
                    count_wait(state_ptr, desk_ptr, 5)
                word = 2 + number % 2
                wait_for(
                    signals_ptr, state_ptr, desk_ptr, word, number, digest, POLLS, POLLS_PER_LOOK, True,
                    EP_SIZE, EP_BLOCK,
                )  # fmt: skip
            for tile in range(first, num_tiles, num_arrangers):
                from_rank, block = tile // num_blocks, tile % num_blocks
                brought = tl.load(signals_ptr + number % 2 * EP_SIZE + from_rank)
                num_tokens = (brought & 0xFFFFFFFF).to(tl.int32)
                num_tokens = tl.where(num_tokens < bound, num_tokens, bound)
                count_block(
                    ids_ptr, row_of_slot_ptr, before_ptr, num_tokens, from_rank, block, tile, bound, max_tokens,
                    first_expert, TOP_K, TOP_K_BLOCK, NUM_LOCAL, LOCAL_BLOCK, BLOCK, OTHERS,
                )  # fmt: skip
            if FUSED:
                meet(state_ptr, 0, num_arrangers)
        if STEPS // 2 % 2 == 1:
            for expert in range(first, NUM_LOCAL, num_arrangers):
                sum_expert(before_ptr, wanted_ptr, expert, num_tiles, NUM_LOCAL, SCAN_BLOCK)
            if FUSED:
                if first == 0:
                    count_wait(state_ptr, desk_ptr, 6)
                meet(state_ptr, 1, num_arrangers)
            if first == 0:
                fit_groups(
                    wanted_ptr, starts_ptr, padding_ptr, kept_ptr, ends_ptr, report_ptr, capacity,
                    ALIGNMENT, NUM_LOCAL, LOCAL_BLOCK,
                )  # fmt: skip
                peer = tl.arange(0, EP_BLOCK)
                brought = tl.load(signals_ptr + number % 2 * EP_SIZE + peer, mask=peer < EP_SIZE, other=0)
                tl.store(report_ptr + 1 + peer, brought & 0xFFFFFFFF, mask=peer < EP_SIZE)
                tl.store(bad_ids_ptr + peer, brought >> 32, mask=peer < EP_SIZE)
        if STEPS // 4 == 1:
            if FUSED and STEPS == 7:
                meet(state_ptr, 2, num_arrangers)
            for tile in range(first, num_tiles, num_arrangers):
                from_rank, block = tile // num_blocks, tile % num_blocks
                place_block(
                    ids_ptr, scores_ptr, row_of_slot_ptr, before_ptr, starts_ptr, kept_ptr, row_scores_ptr,
                    from_rank, block, tile, bound, max_tokens, first_expert, TOP_K, TOP_K_BLOCK, NUM_LOCAL, BLOCK,
                )  # fmt: skip
            if ALIGNMENT > 1:
                for expert in range(first, NUM_LOCAL, num_arrangers):
                    padding, end = tl.load(padding_ptr + expert), tl.load(padding_ptr + NUM_LOCAL + expert)
                    for row in range(padding, end):
                        tl.store(row_scores_ptr + row, 0.0)
        if FUSED:
            if is_last(state_ptr, 9, num_arrangers):
                for counter in range(3):
                    tl.store(state_ptr + 26 + counter, 0)


def launch_arrange(
    board: Board,
    digest: int,
    routed: Routed,
    alignment: int,
    num_local: int,
    num_rows: int | None,
    programs: int,
    meanwhile: RowsToPublish | None,
) -> tuple[Groups, torch.Tensor | None]:
    """Arrange what all ranks have sent, for a capacity of `num_rows`; None: for as many as come.

    Args:
        board: this rank's.
        digest: of this call.
        routed: see there.
        alignment: groups are padded to a multiple of this.
        num_local: experts of a rank.
        num_rows: R, or None; then slots are counted, and `launch_place` places them.
        programs: how many arrange, at most, and lay out rows.
        meanwhile: rows that other programs lay out.

    Returns:
        The groups, and `row_scores [R]` float32, 0 on padding rows; None without R.
    """
    groups = _new_groups(board, routed, num_local)
    steps = (_COUNT | _SUM) if num_rows is None else (_COUNT | _SUM | _PLACE)
    row_scores = None if num_rows is None else torch.empty(num_rows, dtype=torch.float32, device=board.device)
    if not board.fused:
        launch_wait(board, ROUTED, digest)
    for step in (steps,) if board.fused else tuple(s for s in (_COUNT, _SUM, _PLACE) if s & steps):
        _launch(board, digest, routed, groups, alignment, num_rows, row_scores, step, programs, meanwhile)
    return groups, row_scores


def launch_place(
    board: Board, digest: int, routed: Routed, groups: Groups, alignment: int, num_rows: int, programs: int
) -> torch.Tensor:
    """Place the slots that `launch_arrange` has counted: fills `row_of_slot`, returns `row_scores [R]` float32."""
    row_scores = torch.empty(num_rows, dtype=torch.float32, device=board.device)
    _launch(board, digest, routed, groups, alignment, num_rows, row_scores, _PLACE, programs, None)
    return row_scores


def _new_groups(board: Board, routed: Routed, num_local: int) -> Groups:
    top_k, device = routed.ids.shape[2], board.device
    num_blocks = triton.cdiv(routed.bound, token_block(device, routed.bound, top_k))
    parts = (num_local, num_local, board.ep_size, 1 + board.ep_size)
    starts, wanted, bad_ids, report = torch.empty(sum(parts), dtype=torch.int64, device=device).split(parts)
    return Groups(
        row_of_slot=torch.empty(board.ep_size, routed.bound, top_k, dtype=torch.int32, device=device),
        before=torch.empty(board.ep_size * num_blocks, num_local, dtype=torch.int32, device=device),
        starts=starts,
        padding=torch.empty(2, num_local, dtype=torch.int64, device=device),
        tokens_per_expert=torch.empty(num_local, dtype=torch.int64, device=device),
        wanted=wanted,
        expert_offsets=torch.empty(num_local, dtype=torch.int32, device=device),
        bad_ids=bad_ids,
        report=report,
    )


def _launch(
    board: Board,
    digest: int,
    routed: Routed,
    groups: Groups,
    alignment: int,
    num_rows: int | None,
    row_scores: torch.Tensor | None,
    steps: int,
    programs: int,
    meanwhile: RowsToPublish | None,
) -> None:
    num_local, top_k = groups.starts.shape[0], routed.ids.shape[2]
    block = token_block(board.device, routed.bound, top_k)
    arrangers = max(1, min(programs, max(groups.before.shape[0], num_local))) if board.fused else 1
    x = groups.starts.view(1, -1) if meanwhile is None else meanwhile.x
    shelf, chunk_len, tile = (x, 1, Tile(1, 1, 1)) if meanwhile is None else meanwhile[1:]
    copiers = 0 if meanwhile is None else tile.grid_of(x.shape[0])
    launch(
        arrange_kernel, (arrangers + copiers,), board.device, *board.tensors,
        routed.ids, routed.scores, groups.row_of_slot, groups.before, groups.starts, groups.padding,
        groups.tokens_per_expert, groups.wanted, groups.expert_offsets, groups.bad_ids, groups.report,
        groups.starts if row_scores is None else row_scores, x, shelf,
        board.rank, digest, varying(x.shape[0]), varying(routed.bound), varying(2**30 - 2 if num_rows is None else num_rows),
        x.shape[1], x.stride(0), routed.ids.shape[1], chunk_len, arrangers,
        STEPS=steps, FUSED=board.fused, COPIES=meanwhile is not None, ALIGNMENT=alignment,
        TOP_K=top_k, TOP_K_BLOCK=triton.next_power_of_2(top_k),
        NUM_LOCAL=num_local, LOCAL_BLOCK=triton.next_power_of_2(num_local),
        BLOCK=block, OTHERS=_OTHERS if board.fused else up_to(1 << 12, block * top_k),
        SCAN_BLOCK=_SCAN_BLOCKS if board.fused else up_to(_SCAN_BLOCKS, groups.before.shape[0]),
        NUM_CHUNKS=NUM_CHUNKS, POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK, num_warps=8,
        helpers=(*SIGNALLING, copy_chunks, count_block, sum_expert, fit_groups, place_block, meet),
        **tile.constants, **board.constants,
    )  # fmt: skip
