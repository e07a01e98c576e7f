"""A `fast` combine of a small batch in one kernel: add up each rank's shares, push them home, tell, wait, add them up.

The sums are those of `combine.py`, to the bit; what differs is who moves them. Two ranks, one token of rank 1 with a
slot on each: rank 0's rows give `[2]` and rank 1's `[3]`. Both lie in the inbox of rank 1 then, at `[half, 0, 0]` and
`[half, 1, 0]`, and their sum is `[5]`.

Shares lie where a dispatch's rows do, and scalars ride along where its scores do: a round of either kind has half of
the whole inbox to itself. If the rows have scalars 7 on rank 0 and 8 on rank 1, the scores in the inbox of rank 1 are 7
at `[half, 0, 0, 0]` and 8 at `[half, 1, 0, 1]`, and its token's slots get `[[7, 8]]`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl

from .blocks import power_of_two, up_to
from .launch import Chosen, launch
from .publish import Opening
from .rounding import round_to
from .scalars import RIDING, Scalars, pushed_for, scalars_of, slots_of
from .signal import (
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    SIGNALLING,
    Board,
    begin_call,
    count_wait,
    group_constants,
    varying,
    wide,
)
from .small import (
    SMALL,
    Inbox,
    agreed,
    arrive,
    count_round,
    launch_wait_small,
    part_of,
    poison,
    spread,
    tell_call,
    wait_for_all,
)


def push_shares(
    rows_ptr, row_of_slot_ptr, weights_ptr, scalars_ptr, shares_table_ptr, scores_table_ptr, half, bound, hidden_dim,
    max_tokens, rank, first, step,
    WEIGHTED: tl.constexpr, SCALARS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr,
    EP_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Add up tiles of every rank's tokens over the slots that are here, and push them to that rank."""
    num_parts = (hidden_dim + BLOCK_COLS - 1) // BLOCK_COLS
    num_tiles = EP_SIZE * ((bound + BLOCK_ROWS - 1) // BLOCK_ROWS) * num_parts
    num_sent = tl.full((), 0, tl.int32)
    for tile in range(first, num_tiles, step):
        part, to_rank = tile % num_parts, (rank + 1 + tile // num_parts) % EP_SIZE
        token = wide(tile // (num_parts * EP_SIZE)) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        col = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        in_range, inside = token < bound, (col < hidden_dim)[None, :]
        shares_ptr = tl.load(shares_table_ptr + to_rank).to(tl.pointer_type(rows_ptr.dtype.element_ty))
        shares_ptr = tl.multiple_of(shares_ptr, 16)
        rows = ()
        for slot in tl.static_range(TOP_K):
            at = row_of_slot_ptr + (wide(to_rank) * bound + token) * TOP_K + slot
            rows += (tl.load(at, mask=in_range, other=-1),)  # type: ignore[assignment]
        if SCALARS:
            at_slot, wanted = slots_of(token, in_range & (part == 0), TOP_K, TOP_K_BLOCK)
            slots_ptr = row_of_slot_ptr + wide(to_rank) * bound * TOP_K
            scalar, here = scalars_of(scalars_ptr, slots_ptr, at_slot, wanted)
        weights = ()
        if WEIGHTED:
            for slot in tl.static_range(TOP_K):
                weights += (tl.load(weights_ptr + rows[slot], mask=rows[slot] >= 0, other=0.0),)  # type: ignore[assignment]
        known = tl.full((BLOCK_ROWS,), 0, tl.int32)
        acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
        for slot in tl.static_range(TOP_K):
            known = tl.where(rows[slot] != -1, 1, known)
            present = (rows[slot] >= 0)[:, None]  # type: ignore[index]
            at = rows_ptr + rows[slot].to(tl.int64)[:, None] * hidden_dim + col[None, :]
            value = tl.load(at, mask=present & inside, other=0.0).to(tl.float32)
            if WEIGHTED:
                value = weights[slot][:, None] * value
            acc = tl.where(present, acc + value, acc)
        at = ((half * EP_SIZE + rank) * max_tokens + token)[:, None] * hidden_dim + col[None, :]
        rounded = round_to(acc, rows_ptr.dtype.element_ty)
        tl.store(shares_ptr + at, rounded, mask=(known > 0)[:, None] & inside)
        if SCALARS:
            scores_ptr = tl.load(scores_table_ptr + to_rank).to(tl.pointer_type(tl.float32))
            scores_ptr = tl.multiple_of(scores_ptr, 16) + (half * EP_SIZE + rank) * max_tokens * TOP_K
            tl.store(scores_ptr + at_slot, scalar, mask=here)
        if (part == 0) & (to_rank != rank):
            num_sent += tl.reduce(known, 0, tl.standard._sum_combine)
    return num_sent


def add_shares(
    inbox_ptr, inbox_scores_ptr, home_ptr, out_ptr, out_scalars_ptr, half, num_tokens, hidden_dim, max_tokens, first,
    step,
    SCALARS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, EP_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Add up every rank's share of tiles of this rank's tokens, in the order of ranks."""
    num_parts = (hidden_dim + BLOCK_COLS - 1) // BLOCK_COLS
    num_tiles = (num_tokens + BLOCK_ROWS - 1) // BLOCK_ROWS * num_parts
    for tile in range(first, num_tiles, step):
        token = wide(tile // num_parts) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        col = tile % num_parts * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        in_range, inside = token < num_tokens, (col < hidden_dim)[None, :]
        if SCALARS:
            at_slot, wanted = slots_of(token, in_range & (tile % num_parts == 0), TOP_K, TOP_K_BLOCK)
            slips_ptr = inbox_scores_ptr + half * EP_SIZE * max_tokens * TOP_K
            scalar = pushed_for(slips_ptr, home_ptr, at_slot, wanted, max_tokens * TOP_K)
        ranks = tl.full((BLOCK_ROWS,), 0, tl.int32)  # one bit each
        for slot in tl.static_range(TOP_K):
            home = tl.load(home_ptr + token * TOP_K + slot, mask=in_range, other=-1)
            ranks = tl.where(home >= 0, ranks | (1 << tl.where(home >= 0, home, 0)), ranks)
        acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
        for from_rank in tl.static_range(EP_SIZE):
            present = (((ranks >> from_rank) & 1) != 0)[:, None]
            at = ((half * EP_SIZE + from_rank) * max_tokens + token)[:, None] * hidden_dim + col[None, :]
            # Whether it is wanted or not: knowing that first would cost one more trip to memory.
            value = tl.load(inbox_ptr + at, mask=in_range[:, None] & inside, other=0.0).to(tl.float32)
            acc = tl.where(present, acc + value, acc)
        rounded = round_to(acc, out_ptr.dtype.element_ty)
        tl.store(out_ptr + token[:, None] * hidden_dim + col[None, :], rounded, mask=in_range[:, None] & inside)
        if SCALARS:
            tl.store(out_scalars_ptr + at_slot, scalar, mask=wanted)


def combine_small_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    rows_ptr,  # [R, D]
    row_of_slot_ptr,  # [EP, S, K] int32
    weights_ptr,  # [R] float32
    inbox_rows_ptr,  # [2, EP, S_max, D]
    inbox_scores_ptr,  # [2, EP, S_max, K] float32
    inbox_tables_ptr,  # [4, EP] int64: addresses of all ranks' inboxes, see `small.Inbox`
    home_ptr,  # [T, K] int32: rank of each slot's expert, -1 none
    out_ptr,  # [T, D]
    sent_ptr,  # [1] int64, added to
    scalars_ptr,  # [R] float32
    out_scalars_ptr,  # [T, K] float32
    rank,
    digest,
    call,  # `varying`: its number
    tokens,  # `varying`: T
    places,  # `varying`: S
    max_tokens,  # S_max
    hidden_eighths,  # D / 8
    PUSHES: tl.constexpr,
    TAKES: tl.constexpr,
    FUSED: tl.constexpr,  # whether this kernel waits
    WEIGHTED: tl.constexpr,
    SCALARS: tl.constexpr,  # whether scalars ride with the rows
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    PUSHED_ROWS: tl.constexpr,
    TAKEN_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """The first program is the clerk; the others share the work. A program alone does both."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    workers = tl.where(programs > 1, programs - 1, 1)
    worker = tl.where(programs > 1, first - 1, 0)
    num_tokens, bound = (tokens - 3) // 2, (places - 3) // 2
    hidden_dim = hidden_eighths * 8  # so it is known to be a multiple of a vector
    number, small = tl.load(state_ptr), tl.load(state_ptr + 11)
    if PUSHES:
        number += 1
        small += 1
    half = small % 2
    peer = tl.arange(0, EP_BLOCK)
    words = tl.load(table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.int64))
    given_up = agreed(state_ptr + 4)
    num_sent = tl.full((), 0, tl.int32)
    if PUSHES:
        if given_up == 0:
            if worker >= 0:
                num_sent = push_shares(
                    rows_ptr, row_of_slot_ptr, weights_ptr, scalars_ptr, inbox_tables_ptr,
                    inbox_tables_ptr + 2 * EP_SIZE, half, bound, hidden_dim, max_tokens, rank, worker, workers,
                    WEIGHTED, SCALARS, TOP_K, TOP_K_BLOCK, EP_SIZE, PUSHED_ROWS, BLOCK_COLS,
                )  # fmt: skip
            if first == 0:
                tell_call(words, number, digest, rank, NUM_CHUNKS, EP_SIZE, EP_BLOCK)
            arrive(words, state_ptr, first, programs, rank, EP_SIZE, EP_BLOCK)
        if num_sent > 0:
            tl.atomic_add(sent_ptr, num_sent.to(tl.int64), sem="relaxed", scope="gpu")
        if first == 0:
            begin_call(state_ptr, desk_ptr, call, FUSED)
            if not FUSED:
                count_round(state_ptr, number, small)
    code = tl.full((), 1, tl.int32)
    if FUSED:
        code = wait_for_all(
            signals_ptr, state_ptr, desk_ptr, small, number, digest, given_up, POLLS, POLLS_PER_LOOK,
            NUM_CHUNKS, EP_SIZE, EP_BLOCK,
        )  # fmt: skip
        if first == 0:
            count_wait(state_ptr, desk_ptr, 6)
            if code == 1:
                count_round(state_ptr, number, small)
    if TAKES:
        if (worker >= 0) & (code == 1):
            add_shares(
                inbox_rows_ptr, inbox_scores_ptr, home_ptr, out_ptr, out_scalars_ptr, half, num_tokens, hidden_dim,
                max_tokens, worker, workers, SCALARS, TOP_K, TOP_K_BLOCK, EP_SIZE, TAKEN_ROWS, BLOCK_COLS,
            )  # fmt: skip
        if code > 1:
            poison(out_ptr, num_tokens.to(tl.int64) * hidden_dim, first, programs, BLOCK_COLS)
            if SCALARS:
                poison(out_scalars_ptr, num_tokens.to(tl.int64) * TOP_K, first, programs, BLOCK_COLS)


HELPERS = (*SIGNALLING, *SMALL, *RIDING, round_to, push_shares, add_shares)


def launch_combine_small(
    board: Board,
    opening: Opening,
    inbox: Inbox,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    row_of_slot: torch.Tensor,
    home_of_slot: torch.Tensor,
    sent: torch.Tensor,
    out: torch.Tensor,
    scalars: Scalars | None = None,
) -> None:
    """A `fast` combine of `rows [R, D]` with weights `[R]` float32 by row, or None, into `out [T, D]`.

    `row_of_slot [ep_size, S, K]` int32 with S at most S_max, and `home_of_slot [T, K]` int32, are a dispatch's. Rows
    that other ranks get are added to `sent [1]` int64. `scalars` come home with the rows, through the inbox. Once a
    wait was given up, `out` and what is told of scalars are NaN.
    """
    (_, bound, top_k), (num_tokens, hidden_dim), rows = row_of_slot.shape, out.shape, rows.contiguous()
    weights_or_any = rows if weights is None else weights.contiguous()
    values, out_scalars = (rows, out) if scalars is None else (scalars.values.contiguous(), scalars.out)

    def run(*, pushes: bool, takes: bool) -> None:
        plan = _plan(
            board.fused, board.ep_size, inbox.max_programs, bound, top_k, hidden_dim, out.element_size(),
            weights is not None, scalars is not None, pushes, takes,
        )  # fmt: skip
        launch(
            combine_small_kernel, (plan.programs,), board.device, *board.tensors,
            rows, row_of_slot, weights_or_any, inbox.rows, inbox.scores, inbox.tables, home_of_slot, out, sent,
            values, out_scalars,
            board.rank, opening.digest, varying(opening.number), varying(num_tokens), varying(bound),
            inbox.max_tokens, hidden_dim // 8,
            chosen=plan.chosen,
        )  # fmt: skip

    if board.fused:
        run(pushes=True, takes=True)
        return
    run(pushes=True, takes=False)
    launch_wait_small(board, opening.digest)
    run(pushes=False, takes=True)


class _Plan(NamedTuple):
    programs: int
    chosen: Chosen


@lru_cache(1024)
def _plan(
    fused: bool,
    ep_size: int,
    max_programs: int,
    bound: int,
    top_k: int,
    hidden_dim: int,
    num_bytes: int,
    weighted: bool,
    scalars: bool,
    pushes: bool,
    takes: bool,
) -> _Plan:
    """How many programs share a launch, in which pieces, for elements of so many bytes; no time to find out anew."""
    cols, workers = part_of(hidden_dim, num_bytes), max(max_programs - 1, 1)
    parts = -(-hidden_dim // cols)
    if fused:
        pushed, taken = spread(ep_size * bound, parts, workers, 4), spread(bound, parts, workers, 4)
    else:
        pushed = taken = up_to(64, bound)
    pieces = max(ep_size * -(-bound // pushed), -(-bound // taken)) * parts
    chosen = Chosen(
        HELPERS,
        PUSHES=pushes, TAKES=takes, FUSED=fused, WEIGHTED=weighted, SCALARS=scalars, TOP_K=top_k,
        TOP_K_BLOCK=power_of_two(top_k), NUM_CHUNKS=NUM_CHUNKS, PUSHED_ROWS=pushed, TAKEN_ROWS=taken, BLOCK_COLS=cols,
        POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK, num_warps=4 if max(pushed, taken) == 1 else 8,
        **group_constants(ep_size),
    )  # fmt: skip
    return _Plan(min(max_programs, 1 + pieces) if fused else 1, chosen)
