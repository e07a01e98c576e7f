"""The receiver's part of a small batch's dispatch: find groups and copy rows there (see `small_dispatch.py`)."""

from __future__ import annotations

import triton.language as tl

from .signal import wide


def find_groups(
    counts_ptr, groups_ptr, padding_ptr, kept_ptr, wanted_ptr, ends_ptr, half, capacity, alive, tells,
    ALIGNMENT: tl.constexpr, NUM_LOCAL: tl.constexpr, LOCAL_BLOCK: tl.constexpr, EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Padded groups one after the other, cut off at the capacity, as `arrange.fit_groups` does it.

    `groups [ep_size + 2, e]`: the first row of every source rank's slots by expert; then where padding begins and ends.
    """
    expert = tl.arange(0, LOCAL_BLOCK)
    known = expert < NUM_LOCAL
    source = tl.arange(0, EP_BLOCK)[:, None]
    within = (source < EP_SIZE) & known[None, :]
    at = source * NUM_LOCAL + expert[None, :]
    counts = tl.load(counts_ptr + half * EP_SIZE * NUM_LOCAL + at, mask=within & alive, other=0)
    wanted = tl.reduce(counts, 0, tl.standard._sum_combine)
    before = tl.associative_scan(counts, 0, tl.standard._sum_combine) - counts
    padded = (wanted + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    end = tl.associative_scan(padded, 0, tl.standard._sum_combine)
    start = end - padded
    room = tl.where(capacity > start, capacity - start, 0)
    kept = tl.where(wanted < room, wanted, room)
    inside = tl.where(end < capacity, end, capacity)
    start = tl.where(start < capacity, start, capacity)
    tl.store(groups_ptr + at, start[None, :] + before, mask=within)
    tl.store(groups_ptr + EP_SIZE * NUM_LOCAL + expert, start + kept, mask=known)
    tl.store(groups_ptr + (EP_SIZE + 1) * NUM_LOCAL + expert, inside, mask=known)
    told = known & tells
    tl.store(padding_ptr + expert, (start + kept).to(tl.int64), mask=told)
    tl.store(padding_ptr + NUM_LOCAL + expert, inside.to(tl.int64), mask=told)
    tl.store(kept_ptr + expert, kept.to(tl.int64), mask=told)
    tl.store(wanted_ptr + expert, wanted.to(tl.int64), mask=told)
    tl.store(ends_ptr + expert, inside, mask=told)
    tl.debug_barrier()


def fetch_tile(
    x_ptr, inbox_ptr, places_ptr, brought_ptr, half, tile, num_tiles, num_tokens, bound, hidden_dim, x_stride,
    max_tokens, rank, TOP_K: tl.constexpr, EP_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Load one tile of what is in the inbox or, for this rank's own tokens, of `x`; and where it goes.

    All loads go out at once: rows that nobody wants here, or that their rank has not brought, are loaded in vain.
    """
    num_parts = (hidden_dim + BLOCK_COLS - 1) // BLOCK_COLS
    num_blocks = (bound + BLOCK_ROWS - 1) // BLOCK_ROWS
    from_rank = (rank + 1 + tile // (num_parts * num_blocks)) % EP_SIZE
    token = tile // num_parts % num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile % num_parts * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    own = from_rank == rank
    there = (token < tl.where(own, num_tokens, bound)) & (tile < num_tiles)
    in_inbox = (half * EP_SIZE + from_rank) * max_tokens + token
    row_ptr = tl.where(own, x_ptr + token.to(tl.int64) * x_stride, inbox_ptr + in_inbox * hidden_dim)
    row_ptr = tl.multiple_of(row_ptr, [16])  # Triton 3.8 does not see it through the choice
    brought = tl.load(brought_ptr + from_rank)
    places = ()
    for slot in tl.static_range(TOP_K):
        places += (tl.load(places_ptr + in_inbox * TOP_K + slot, mask=there, other=-1),)  # type: ignore[assignment]
    value = tl.load(row_ptr[:, None] + col[None, :], mask=there[:, None] & (col < hidden_dim)[None, :], other=0.0)
    return value, brought, places


def place_tile(
    value, brought, places, scores_ptr, groups_ptr, row_of_slot_ptr, row_scores_ptrs, out_ptr, half, tile, bound,
    hidden_dim, max_tokens, rank, alive, NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
    EP_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Store one tile at all of its rows; the first part of columns also tells which they are."""
    num_parts = (hidden_dim + BLOCK_COLS - 1) // BLOCK_COLS
    num_blocks = (bound + BLOCK_ROWS - 1) // BLOCK_ROWS
    from_rank = (rank + 1 + tile // (num_parts * num_blocks)) % EP_SIZE
    token = tile // num_parts % num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tile % num_parts * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    num_tokens = tl.where(alive, (brought & 0xFFFFFFFF).to(tl.int32), 0)
    rows = ()
    for slot in tl.static_range(TOP_K):
        here = (places[slot] >= 0) & (token < num_tokens)
        expert = tl.where(here, places[slot] // PLACES, 0)
        row = tl.load(groups_ptr + from_rank * NUM_LOCAL + expert) + places[slot] % PLACES
        fits = row < tl.load(groups_ptr + EP_SIZE * NUM_LOCAL + expert)
        rows += (tl.where(here, tl.where(fits, row, -2), -1),)  # type: ignore[assignment]
    for slot in tl.static_range(TOP_K):
        at = out_ptr + rows[slot].to(tl.int64)[:, None] * hidden_dim + col[None, :]
        tl.store(at, value, mask=(rows[slot] >= 0)[:, None] & (col < hidden_dim)[None, :])
    if tile % num_parts == 0:
        in_inbox = (half * EP_SIZE + from_rank) * max_tokens + token
        for slot in tl.static_range(TOP_K):
            row = rows[slot]
            tl.store(row_of_slot_ptr + (from_rank * bound + token) * TOP_K + slot, row, mask=token < bound)
            score = tl.load(scores_ptr + in_inbox * TOP_K + slot, mask=row >= 0, other=0.0)
            tl.store(row_scores_ptrs[0] + row, score, mask=row >= 0)
            tl.store(row_scores_ptrs[1] + row, score, mask=row >= 0)


def clear_padding(
    groups_ptr, row_scores_ptrs, out_ptr, hidden_dim, first, step,
    NUM_LOCAL: tl.constexpr, EP_SIZE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Padding rows become zero, in parts of columns."""
    num_parts = (hidden_dim + BLOCK_COLS - 1) // BLOCK_COLS
    for part in range(first, NUM_LOCAL * num_parts, step):
        expert = part // num_parts
        col = part % num_parts * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        begin = tl.load(groups_ptr + EP_SIZE * NUM_LOCAL + expert)
        end = tl.load(groups_ptr + (EP_SIZE + 1) * NUM_LOCAL + expert)
        for row in range(begin, end):
            tl.store(out_ptr + wide(row) * hidden_dim + col, 0.0, mask=col < hidden_dim)
            if part % num_parts == 0:
                tl.store(row_scores_ptrs[0] + row, 0.0)
                tl.store(row_scores_ptrs[1] + row, 0.0)


RECEIVING = (find_groups, fetch_tile, place_tile, clear_padding)
