"""Where arrived slots go among the rows of local experts: by expert, then source rank, token and slot.

Arrived token rows stand in table order (the other ranks ascending, this rank last) but are placed in the order of their
source ranks: position p among the sources is table row p below this rank's share, and is shifted around it after that.

Rank 0 of two, one local expert. Table: one token of rank 1, then one of rank 0, both naming it in slot 0 of one:
`row_of_slot = [[1], [0]]` and `slot_of_row = [1, 0]`, since rank 0's token comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch

_BLOCK_TOKENS = 32
_EXPERT_CHUNK = 32
_SCAN_BLOCKS = 256


def table_row(position, num_lower, num_own, num_arrived):
    """The table row of position `position` among the sources in rank order."""
    own = num_arrived - num_own + position - num_lower
    higher = position - num_own
    return tl.where(position < num_lower, position, tl.where(position < num_lower + num_own, own, higher))


def count_block_kernel(
    slots_ptr,  # [A, 2K] int32: K global expert ids, then K scores' bits
    counts_ptr,  # [num_blocks, e] int32: slots of one block of positions by local expert
    num_arrived,
    num_lower,
    num_own,
    first_expert,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Histogram of one block of positions."""
    flat = tl.arange(0, BLOCK * TOP_K_BLOCK)
    position, slot = tl.program_id(0) * BLOCK + flat // TOP_K_BLOCK, flat % TOP_K_BLOCK
    inside = (position < num_arrived) & (slot < TOP_K)
    row = table_row(position, num_lower, num_own, num_arrived).to(tl.int64)
    local = tl.load(slots_ptr + row * (2 * TOP_K) + slot, mask=inside, other=-1) - first_expert
    for start in range(0, NUM_LOCAL, CHUNK):
        expert = start + tl.arange(0, CHUNK)
        hits = (inside[:, None] & (local[:, None] == expert[None, :])).to(tl.int32)
        counts = tl.reduce(hits, 0, tl.standard._sum_combine)
        tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * NUM_LOCAL + expert, counts, mask=expert < NUM_LOCAL)


def scan_blocks_kernel(
    counts_ptr,  # [num_blocks, e] int32, becomes the slots of this expert in earlier blocks
    totals_ptr,  # [e] int64
    num_blocks,
    NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One expert's column, from counts to what stands before each block."""
    expert = tl.program_id(0)
    carry = tl.full((), 0, tl.int32)
    for first in range(0, num_blocks, BLOCK):
        block = (first + tl.arange(0, BLOCK)).to(tl.int64)
        at = counts_ptr + block * NUM_LOCAL + expert
        count = tl.load(at, mask=block < num_blocks, other=0)
        tl.store(at, carry + tl.associative_scan(count, 0, tl.standard._sum_combine) - count, mask=block < num_blocks)
        carry += tl.reduce(count, 0, tl.standard._sum_combine)
    tl.store(totals_ptr + expert, carry.to(tl.int64))


def pad_groups_kernel(
    totals_ptr,  # [e] int64
    starts_ptr,  # [e] int64: first row of each expert's group
    ends_ptr,  # [e] int32: inclusive padded ends
    ALIGNMENT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Padded groups one after the other; totals 0, 1, 9 with alignment 8 end at 0, 8, 24."""
    expert = tl.arange(0, BLOCK)
    total = tl.load(totals_ptr + expert, mask=expert < NUM_LOCAL, other=0)
    padded = (total + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    end = tl.associative_scan(padded, 0, tl.standard._sum_combine)
    tl.store(starts_ptr + expert, end - padded, mask=expert < NUM_LOCAL)
    tl.store(ends_ptr + expert, end.to(tl.int32), mask=expert < NUM_LOCAL)


def place_block_kernel(
    slots_ptr,  # [A, 2K] int32, as above
    before_ptr,  # [num_blocks, e] int32, as scanned
    starts_ptr,  # [e] int64
    row_of_slot_ptr,  # [A, K] int64, -1 where the slot's expert is elsewhere
    slot_of_row_ptr,  # [R] int64: table row * K + k
    row_scores_ptr,  # [R] float32
    num_arrived,
    num_lower,
    num_own,
    first_expert,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Rows of one block of positions: the group's start, what stands before the block, what stands before the slot."""
    flat = tl.arange(0, BLOCK * TOP_K_BLOCK)
    position, slot = tl.program_id(0) * BLOCK + flat // TOP_K_BLOCK, flat % TOP_K_BLOCK
    inside = (position < num_arrived) & (slot < TOP_K)
    table = table_row(position, num_lower, num_own, num_arrived).to(tl.int64)
    local = tl.load(slots_ptr + table * (2 * TOP_K) + slot, mask=inside, other=-1) - first_expert
    here = inside & (local >= 0) & (local < NUM_LOCAL)
    row = tl.full((BLOCK * TOP_K_BLOCK,), 0, tl.int64)
    for start in range(0, NUM_LOCAL, CHUNK):
        expert = start + tl.arange(0, CHUNK)
        known = expert < NUM_LOCAL
        base = tl.load(starts_ptr + expert, mask=known, other=0)
        base += tl.load(before_ptr + tl.program_id(0).to(tl.int64) * NUM_LOCAL + expert, mask=known, other=0)
        hits = (here[:, None] & (local[:, None] == expert[None, :])).to(tl.int32)
        earlier = tl.associative_scan(hits, 0, tl.standard._sum_combine) - hits
        row += tl.reduce(hits * (base[None, :] + earlier), 1, tl.standard._sum_combine)
    score = tl.load(slots_ptr + table * (2 * TOP_K) + TOP_K + slot, mask=here, other=0).to(tl.float32, bitcast=True)
    tl.store(row_of_slot_ptr + table * TOP_K + slot, tl.where(here, row, -1), mask=inside)
    tl.store(slot_of_row_ptr + row, table * TOP_K + slot, mask=here)
    tl.store(row_scores_ptr + row, score, mask=here)


def launch_place(
    slots: torch.Tensor, share: tuple[int, int], experts: tuple[int, int], alignment: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place arrived slots.

    Args:
        slots: `[A, 2 * top_k]` int32: global ids, then the bits of float32 scores.
        share: token rows from lower ranks, and from this rank.
        experts: the first local expert's id, and how many are local.
        alignment: groups are padded to a multiple of this.
        num_rows: R, all groups with padding.

    Returns:
        `row_of_slot [A, top_k]`, `slot_of_row [R]` (int64, -1 none), `row_scores [R]` float32, `tokens_per_expert [e]`
        int64, `expert_offsets [e]` int32.
    """
    num_arrived, top_k = slots.shape[0], slots.shape[1] // 2
    first_expert, num_local = experts
    device = slots.device
    num_blocks = triton.cdiv(num_arrived, _BLOCK_TOKENS)
    counts = slots.new_empty(num_blocks, num_local)
    totals, starts = torch.empty(2, num_local, dtype=torch.int64, device=device).unbind()
    ends = slots.new_empty(num_local)
    row_of_slot = totals.new_empty(num_arrived, top_k)
    slot_of_row = totals.new_empty(num_rows) if alignment == 1 else totals.new_full((num_rows,), -1)
    row_scores = torch.empty(num_rows, device=device) if alignment == 1 else torch.zeros(num_rows, device=device)
    where = (num_arrived, *share, first_expert)
    block = {
        "TOP_K": top_k,
        "TOP_K_BLOCK": triton.next_power_of_2(top_k),
        "NUM_LOCAL": num_local,
        "BLOCK": _BLOCK_TOKENS,
        "CHUNK": _EXPERT_CHUNK,
        "helpers": (table_row,),
    }
    if num_blocks:
        launch(count_block_kernel, (num_blocks,), device, slots, counts, *where, **block)
    launch(
        scan_blocks_kernel, (num_local,), device, counts, totals, num_blocks, NUM_LOCAL=num_local, BLOCK=_SCAN_BLOCKS
    )
    launch(
        pad_groups_kernel,
        (1,),
        device,
        totals,
        starts,
        ends,
        ALIGNMENT=alignment,
        NUM_LOCAL=num_local,
        BLOCK=triton.next_power_of_2(num_local),
    )
    if num_blocks:
        launch(
            place_block_kernel,
            (num_blocks,),
            device,
            slots,
            counts,
            starts,
            row_of_slot,
            slot_of_row,
            row_scores,
            *where,
            **block,
            num_warps=8,
        )
    return row_of_slot, slot_of_row, row_scores, totals, ends
