"""Lay out for every source rank what its tokens get from this rank's experts: the sum of some of their slots' rows.

With all slots that is a token's share of a `fast` combine, added up in float32 in the order of its slots and rounded
once. With one slot it is that slot's row as it is, for one round of an `exact` combine.

One rank, one token with two slots, rows `[1], [2]`: `row_of_slot = [[[1, 0]]]` lays out `[3]` for slots 0 and 1, and
`[1]` for slot 1 alone; with weights by row `[10, 100]` both give `[210]`. Where a dropped slot (-2) is all there is, it
lays out 0; where no slot is here at all (-1), nothing, and nobody reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import row_block
from .header import write_header
from .launch import launch
from .rounding import round_to


def pre_add_kernel(
    rows_ptr,  # [R, D]
    row_of_slot_ptr,  # [EP, S, K] int32
    weights_ptr,  # [R] float32
    words_ptr,  # [W] int64
    partials_ptr,  # [EP, max_tokens, D], shared, the dtype of rows
    headers_ptr,  # [2, W] int64, shared
    state_ptr,  # [1 + num_buffers] int64
    sent_ptr,  # [1] int64, added to: rows that other ranks pull from here
    rank,
    num_places,  # S
    max_tokens,
    hidden_dim,
    first_slot,
    end_slot,
    WEIGHTED: tl.constexpr,
    OPENING: tl.constexpr,  # whether this round carries a header
    TOP_K: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Add up one block of one rank's tokens, some columns of it (pattern publish)."""
    if OPENING:  # noqa: SIM102  # known when compiling, the other when running
        if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
            write_header(words_ptr, headers_ptr, state_ptr, NUM_WORDS, WORDS_BLOCK)
    to_rank = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_range = token < num_places
    col = tl.program_id(2) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (col < hidden_dim)[None, :]
    places = row_of_slot_ptr + (to_rank * num_places + token) * TOP_K
    acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
    known = tl.full((BLOCK_ROWS,), 0, tl.int32)
    for slot in range(first_slot, end_slot):
        row = tl.load(places + slot, mask=in_range, other=-1).to(tl.int64)
        present = (row >= 0)[:, None]
        value = tl.load(rows_ptr + row[:, None] * hidden_dim + col[None, :], mask=present & inside, other=0.0)
        value = value.to(tl.float32)
        if WEIGHTED:
            value = tl.load(weights_ptr + row, mask=row >= 0, other=0.0)[:, None] * value
        acc = tl.where(present, acc + value, acc)
        known = tl.where(row != -1, 1, known)
    if (tl.program_id(2) == 0) & (tl.program_id(1) != rank):
        tl.atomic_add(sent_ptr, tl.reduce(known, 0, tl.standard._sum_combine).to(tl.int64), sem="relaxed")
    tl.store(
        partials_ptr + (to_rank * max_tokens + token)[:, None] * hidden_dim + col[None, :],
        round_to(acc, partials_ptr.dtype.element_ty),
        mask=(known > 0)[:, None] & inside,
    )


def launch_pre_add(
    rows: torch.Tensor,
    row_of_slot: torch.Tensor,
    weights: torch.Tensor | None,
    slots: range,
    partials: torch.Tensor,
    rank: int,
    sent: torch.Tensor,
    header: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """Fill `partials [ep_size, max_tokens, D]` with the sums of some `slots` of every rank's tokens.

    Args:
        rows: `[R, D]`.
        row_of_slot: `[ep_size, S, K]` int32.
        weights: `[R]` float32 by row, or None.
        slots: which ones, in ascending order.
        partials: in shared memory.
        rank: this one.
        sent: `[1]` int64: rows that other ranks pull from here are added.
        header: words `[W]`, headers `[2, W]` and state, all int64, where this round opens a call; see `header.py`.
    """
    rows = rows.contiguous()
    (ep_size, num_places, top_k), hidden_dim = row_of_slot.shape, rows.shape[1]
    block = row_block(rows.device, hidden_dim, num_places)
    words, headers, state = (row_of_slot,) * 3 if header is None else header
    num_words = 1 if header is None else words.shape[0]
    launch(
        pre_add_kernel,
        # at least one program, for the header
        (max(1, triton.cdiv(num_places, block["BLOCK_ROWS"])), ep_size, triton.cdiv(hidden_dim, block["BLOCK_COLS"])),
        rows.device,
        rows,
        row_of_slot,
        rows if weights is None else weights.contiguous(),
        words,
        partials,
        headers,
        state,
        sent,
        rank,
        num_places,
        partials.shape[1],
        hidden_dim,
        slots.start,
        slots.stop,
        WEIGHTED=weights is not None,
        OPENING=header is not None,
        TOP_K=top_k,
        NUM_WORDS=num_words,
        WORDS_BLOCK=triton.next_power_of_2(num_words),
        num_warps=8,
        helpers=(write_header, round_to),
        **block,
    )
