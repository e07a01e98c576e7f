"""Spread rows to all of their places among the rows of this rank's experts: its own from `x`, others' from staging.

Two ranks, rank 0, one slot a token, three rows: `row_of_slot = [[[0], [-1]], [[2], [1]]]` takes token 0 of rank 0 to
row 0, token 0 of rank 1 to row 2 and its token 1 to row 1; token 1 of rank 0 is not read. A group of 2 rows that is
padded to 4 and an empty one behind it have their padding at rows 2 to 4 and nowhere: `padding = [[2, 4], [4, 4]]`;
those rows become zero.
"""

from __future__ import annotations

import triton.language as tl

from .round import fill
from .signal import wait_for, wide


def spread_tile(
    source_ptr, slots_ptr, out_ptr, token, num_tokens, hidden_dim, stride, first_col, end_col,
    TOP_K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Some columns of a tile of tokens `[BLOCK_ROWS]` to the rows that `slots_ptr [S, K]` names; below 0 is no row."""
    in_range = token < num_tokens
    slots = slots_ptr + token * TOP_K
    last_row = tl.full((BLOCK_ROWS,), -1, tl.int32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(slots + slot, mask=in_range, other=-1)
        last_row = tl.where(row > last_row, row, last_row)
    wanted = (last_row >= 0)[:, None]
    for start in range(first_col, end_col, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        inside = (col < hidden_dim)[None, :]
        value = tl.load(source_ptr + token[:, None] * stride + col[None, :], mask=wanted & inside, other=0.0)
        for slot in tl.static_range(TOP_K):
            to_row = tl.load(slots + slot, mask=in_range, other=-1).to(tl.int64)
            at = out_ptr + to_row[:, None] * hidden_dim + col[None, :]
            tl.store(at, value, mask=(to_row >= 0)[:, None] & inside)


def claim(state_ptr):
    """The number of the next tile that nobody has claimed yet; `forget_claims` starts it again."""
    return tl.atomic_add(state_ptr + 28, 1, sem="relaxed", scope="gpu").to(tl.int32)


def spread_chunks(
    signals_ptr, state_ptr, desk_ptr, x_ptr, staging_ptr, row_of_slot_ptr, out_ptr, number, digest, rank, num_tokens,
    bound, max_tokens, hidden_dim, x_stride, chunk_len,
    FUSED: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Spread this rank's own tiles, then others' as their chunks come (pattern acquire), whichever nobody has claimed.

    `num_tokens` is T, `bound` S. What `row_of_slot_ptr [EP, S, K]` holds may have been written in this launch, behind a
    meeting of its programs (pattern grid).
    """
    num_own = (bound + BLOCK_ROWS - 1) // BLOCK_ROWS * PARTS
    span = hidden_dim if PARTS == 1 else BLOCK_COLS
    waited = tl.full((), -1, tl.int32)
    tile = claim(state_ptr)
    while tile < num_own * EP_SIZE:
        start = tile % PARTS * span
        if tile < num_own:
            token = wide(tile // PARTS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            slots = row_of_slot_ptr + wide(rank) * bound * TOP_K
            # After a wait that was given up slots may be those of another call: behind `x` there is nothing to read.
            own_tokens = tl.where(num_tokens < bound, num_tokens, bound)
            spread_tile(
                x_ptr, slots, out_ptr, token, own_tokens, hidden_dim, x_stride, start, start + span, TOP_K,
                BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
        elif EP_SIZE > 1:
            nth = (tile - num_own) // PARTS
            block, from_rank = nth // (EP_SIZE - 1), (rank + 1 + nth % (EP_SIZE - 1)) % EP_SIZE
            if FUSED:
                chunk = block * BLOCK_ROWS // chunk_len
                if chunk > waited:
                    word = 6 + number % 2 * NUM_CHUNKS + chunk
                    wait_for(
                        signals_ptr, state_ptr, desk_ptr, word, number, digest, POLLS, POLLS_PER_LOOK, True,
                        EP_SIZE, EP_BLOCK,
                    )  # fmt: skip
                    waited = chunk
            token = wide(block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            slots = row_of_slot_ptr + wide(from_rank) * bound * TOP_K
            came_ptr = staging_ptr + wide(from_rank) * max_tokens * hidden_dim
            spread_tile(
                came_ptr, slots, out_ptr, token, bound, hidden_dim, hidden_dim, start, start + span, TOP_K,
                BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
        tile = claim(state_ptr)


def fill_padding(
    padding_ptr, out_ptr, first, step, hidden_dim, NUM_LOCAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows between groups become zero, as program `first` of `step`."""
    for expert in range(first, NUM_LOCAL, step):
        padding, end = tl.load(padding_ptr + expert), tl.load(padding_ptr + NUM_LOCAL + expert)
        fill(out_ptr, 0.0, padding * hidden_dim, end * hidden_dim, BLOCK)


SPREADING = (spread_tile, claim, spread_chunks, fill_padding)
