"""Bring results home: the experts' rank pushes what every source rank's tokens get, their rank adds that up.

With all slots that is a token's share of a `fast` combine, added up in float32 in the order of its slots and rounded
once; its own rank adds up every rank's share in the order of ranks, ranks without a slot of it skipped, and rounds
once. With one slot it is that slot's row as it is, for one round of an `exact` combine, which adds it to sums that are
kept in float32, by one pattern for all slots in turn.

One rank, one token with two slots, rows `[1], [2]`: `row_of_slot = [[[1, 0]]]` gives `[3]` for slots 0 and 1, and
`[1]` for slot 1 alone; with weights by row `[10, 100]` both give `[210]`. Where a dropped slot (-2) is all there is, it
gives 0; where no slot is here at all (-1), nothing, and nobody reads it.

Two ranks, one token, `home_of_slot = [[1, -1, 0]]`; rank 0 has given `[2]`, rank 1 `[3]`: their sum is `[5]`. Slot
by slot with weights `[[10, 0, 100]]`: slot 0 gives `[30]`, slot 1 leaves it, slot 2 with rank 0's `[2]` makes it
`[230]`.

With all slots at once, one float32 a row may come home in the same round: whoever pushes a tile of shares pushes the
scalars of its tokens' slots too, into the slips of their rank (`scalars.py`), and tells of both by the same chunk; who
adds up a tile takes the scalars of its tokens. If the rows above have scalars 7 on rank 0 and 8 on rank 1, the token's
slots get `[[8, 0, 7]]`; a slot that was dropped gets 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl

from .blocks import Tile, power_of_two
from .launch import Chosen, launch
from .publish import Opening
from .push import PUSHING, Staging, part_of, tell_empty_chunks, tell_if_last
from .round import ROUND_ENDS, begin_round, end_round
from .rounding import round_to
from .scalars import RIDING, Scalars, pushed_for, scalars_of, slots_of
from .signal import (
    CHUNKS,
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    READ,
    SIGNALLING,
    Board,
    group_constants,
    may_lay_out,
    varying,
    wait_for,
    wide,
)
from .waits import launch_tell, launch_wait

_ROWS_AT_ONCE = 8  # 32 registers of a thread


class Routes(NamedTuple):
    """Where the rows of a combine lie, and where its results go.

    Attributes:
        row_of_slot: `[ep_size, S, K]` int32: rows here.
        home_of_slot: `[T, K]` int32: ranks of this rank's slots.
        sent: `[1]` int64: rows that other ranks get from here are added.
    """

    row_of_slot: torch.Tensor
    home_of_slot: torch.Tensor
    sent: torch.Tensor


def add_rows(
    acc, rows_ptr, slots_ptr, weights_ptr, in_range, col, inside, hidden_dim,
    WEIGHTED: tl.constexpr, NUM_SLOTS: tl.constexpr,
):  # fmt: skip
    """Add the rows of so many slots to `acc`, in their order; all of them are loaded before the first is added."""
    rows, weights, values = (), (), ()
    for slot in tl.static_range(NUM_SLOTS):
        rows += (tl.load(slots_ptr + slot, mask=in_range, other=-1).to(tl.int64),)  # type: ignore[assignment]
    for slot in tl.static_range(NUM_SLOTS):
        at = rows_ptr + rows[slot][:, None] * hidden_dim + col[None, :]
        values += (tl.load(at, mask=(rows[slot] >= 0)[:, None] & inside, other=0.0),)  # type: ignore[assignment,index]
    if WEIGHTED:
        for slot in tl.static_range(NUM_SLOTS):
            weights += (tl.load(weights_ptr + rows[slot], mask=rows[slot] >= 0, other=0.0),)  # type: ignore[assignment]
    for slot in tl.static_range(NUM_SLOTS):
        value = values[slot].to(tl.float32)  # type: ignore[var-annotated]
        if WEIGHTED:
            value = weights[slot][:, None] * value
        acc = tl.where((rows[slot] >= 0)[:, None], acc + value, acc)
    return acc


def give_shares(
    rows_ptr, row_of_slot_ptr, weights_ptr, scalars_ptr, staging_table_ptr, slips_table_ptr, sent_ptr, table_ptr,
    state_ptr, number, digest, rank, bound, max_tokens, hidden_dim, first_slot, first, step, chunk_len,
    WEIGHTED: tl.constexpr, SCALARS: tl.constexpr, FUSED: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr, NUM_SLOTS: tl.constexpr, AT_ONCE: tl.constexpr, PARTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Add up tiles of every rank's tokens, chunk after chunk, and push them there, as program `first` of `step`."""
    if FUSED:
        if first == 0:
            tell_empty_chunks(
                table_ptr, state_ptr, number, digest, rank, bound, chunk_len, NUM_CHUNKS, EP_SIZE, EP_BLOCK
            )
    span = hidden_dim if PARTS == 1 else BLOCK_COLS
    num_tiles = EP_SIZE * ((bound + BLOCK_ROWS - 1) // BLOCK_ROWS) * PARTS
    num_sent = tl.full((), 0, tl.int32)
    free = may_lay_out(state_ptr)
    for tile in range(first, num_tiles, step):
        part, block, to_rank = tile % PARTS, tile // PARTS // EP_SIZE, (rank + 1 + tile // PARTS) % EP_SIZE
        token = wide(block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_range = token < bound
        slots = row_of_slot_ptr + (wide(to_rank) * bound + token) * TOP_K + first_slot
        known = tl.full((BLOCK_ROWS,), 0, tl.int32)
        for slot in tl.static_range(NUM_SLOTS):
            known = tl.where(tl.load(slots + slot, mask=in_range, other=-1) != -1, 1, known)
        if (to_rank != rank) & (part == 0):
            num_sent += tl.reduce(known, 0, tl.standard._sum_combine)
        if SCALARS:  # on their way while rows are added up
            at_slot, wanted = slots_of(token, in_range & (part == 0), TOP_K, TOP_K_BLOCK)
            slots_ptr = row_of_slot_ptr + wide(to_rank) * bound * TOP_K
            scalar, here = scalars_of(scalars_ptr, slots_ptr, at_slot, wanted)
        there_ptr = part_of(staging_table_ptr, to_rank, rank, max_tokens, hidden_dim, rows_ptr.dtype.element_ty)
        for start in range(part * span, part * span + span, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            inside = (col < hidden_dim)[None, :]
            acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
            for first_of in tl.static_range(0, NUM_SLOTS, AT_ONCE):
                acc = add_rows(
                    acc, rows_ptr, slots + first_of, weights_ptr, in_range, col, inside, hidden_dim, WEIGHTED,
                    AT_ONCE if first_of + AT_ONCE <= NUM_SLOTS else NUM_SLOTS - first_of,
                )  # fmt: skip
            tl.store(
                there_ptr + token[:, None] * hidden_dim + col[None, :],
                round_to(acc, rows_ptr.dtype.element_ty),
                mask=(known > 0)[:, None] & inside & free,
            )
        if SCALARS:
            slips_ptr = part_of(slips_table_ptr, to_rank, rank, max_tokens, TOP_K, tl.float32)
            tl.store(slips_ptr + at_slot, scalar, mask=here & free)
        if FUSED:
            tell_if_last(
                table_ptr, state_ptr, number, digest, rank, block * BLOCK_ROWS, bound, chunk_len, EP_SIZE * PARTS,
                NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK_ROWS,
            )  # fmt: skip
    tl.atomic_add(sent_ptr, num_sent.to(tl.int64), sem="relaxed")


def add_ranks(
    staging_ptr, home_ptr, out_ptr, token, in_range, max_tokens, hidden_dim, first_col, end_col,
    TOP_K: tl.constexpr, EP_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Add up every rank's share of a tile of tokens, some columns of it."""
    for start in range(first_col, end_col, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        inside = (col < hidden_dim)[None, :]
        acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
        for from_rank in tl.static_range(EP_SIZE):
            has_slot = tl.full((BLOCK_ROWS,), 0, tl.int32)
            for slot in tl.static_range(TOP_K):
                home = tl.load(home_ptr + token * TOP_K + slot, mask=in_range, other=-1)
                has_slot = tl.where(home == from_rank, 1, has_slot)
            present = (has_slot > 0)[:, None]
            at = (wide(from_rank) * max_tokens + token)[:, None] * hidden_dim + col[None, :]
            value = tl.load(staging_ptr + at, mask=present & inside, other=0.0).to(tl.float32)
            acc = tl.where(present, acc + value, acc)
        rounded = round_to(acc, out_ptr.dtype.element_ty)
        tl.store(out_ptr + token[:, None] * hidden_dim + col[None, :], rounded, mask=in_range[:, None] & inside)


def add_slot(
    staging_ptr, home_ptr, weights_ptr, sums_ptr, out_ptr, token, in_range, max_tokens, hidden_dim, slot, first_col,
    end_col, WEIGHTED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Add one slot's rows of a tile of tokens to their sums, some columns; the last slot rounds them into `out`."""
    home = tl.load(home_ptr + token * TOP_K + slot, mask=in_range, other=-1)
    present = (home >= 0)[:, None]
    share = tl.where(home >= 0, wide(home) * max_tokens + token, 0)
    for start in range(first_col, end_col, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        inside = (col < hidden_dim)[None, :]
        tile = in_range[:, None] & inside
        here = token[:, None] * hidden_dim + col[None, :]
        at = share[:, None] * hidden_dim + col[None, :]
        value = tl.load(staging_ptr + at, mask=present & inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = tl.load(weights_ptr + token * TOP_K + slot, mask=in_range, other=0.0)[:, None] * value
        if FIRST:
            acc = tl.full((BLOCK_ROWS, BLOCK_COLS), 0.0, tl.float32)
        else:
            acc = tl.load(sums_ptr + here, mask=tile, other=0.0)
        acc = tl.where(present, acc + value, acc)
        if LAST:
            tl.store(out_ptr + here, round_to(acc, out_ptr.dtype.element_ty), mask=tile)
        else:
            tl.store(sums_ptr + here, acc, mask=tile)


def take_shares(
    signals_ptr, state_ptr, desk_ptr, staging_ptr, home_ptr, weights_ptr, sums_ptr, out_ptr, slips_ptr,
    out_scalars_ptr, number, digest, num_tokens, max_tokens, hidden_dim, slot, chunk_len, first, step,
    FUSED: tl.constexpr, WEIGHTED: tl.constexpr, SCALARS: tl.constexpr, BY_SLOT: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, PARTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, POLLS: tl.constexpr, POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Add up tiles of this rank's tokens as their chunks come (pattern acquire), as program `first` of `step`."""
    waited = tl.full((), -1, tl.int32)
    span = hidden_dim if PARTS == 1 else BLOCK_COLS
    for tile in range(first, (num_tokens + BLOCK_ROWS - 1) // BLOCK_ROWS * PARTS, step):
        block, start = tile // PARTS, tile % PARTS * span
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
        if BY_SLOT:
            add_slot(
                staging_ptr, home_ptr, weights_ptr, sums_ptr, out_ptr, token, token < num_tokens, max_tokens,
                hidden_dim, slot, start, start + span, WEIGHTED, FIRST, LAST, TOP_K, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
        else:
            if SCALARS:
                at_slot, wanted = slots_of(token, (token < num_tokens) & (start == 0), TOP_K, TOP_K_BLOCK)
                scalar = pushed_for(slips_ptr, home_ptr, at_slot, wanted, max_tokens * TOP_K)
            add_ranks(
                staging_ptr, home_ptr, out_ptr, token, token < num_tokens, max_tokens, hidden_dim, start,
                start + span, TOP_K, EP_SIZE, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            if SCALARS:
                tl.store(out_scalars_ptr + at_slot, scalar, mask=wanted)


COMBINING = (add_rows, give_shares, add_ranks, add_slot, take_shares)


def combine_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    rows_ptr,  # [R, D]
    row_of_slot_ptr,  # [EP, S, K] int32
    row_weights_ptr,  # [R] float32
    staging_ptr,  # [EP, max_tokens, D], shared, the dtype of `rows`
    staging_table_ptr,  # [EP] int64: addresses of [EP, max_tokens, D]
    home_ptr,  # [T, K] int32: rank of each slot's expert, -1 none
    slot_weights_ptr,  # [T, K] float32
    sums_ptr,  # [T, D] float32
    out_ptr,  # [T, D]
    sent_ptr,  # [1] int64, added to
    scalars_ptr,  # [R] float32
    slips_ptr,  # [EP, max_tokens, K] float32, shared
    slips_table_ptr,  # [EP] int64: addresses of float32 [EP, max_tokens, K]
    out_scalars_ptr,  # [T, K] float32
    rank,
    digest,
    call,  # `varying`: its number
    tokens,  # `varying`: T
    places,  # `varying`: S
    slots,  # `varying`: the first slot
    max_tokens,
    hidden_dim,
    chunk_len,
    num_givers,  # programs that push; those behind them add up
    GIVES: tl.constexpr,
    TAKES: tl.constexpr,
    FUSED: tl.constexpr,  # whether this kernel waits and tells
    WEIGHTED: tl.constexpr,
    SCALARS: tl.constexpr,  # whether scalars ride with the rows of `fast`
    BY_SLOT: tl.constexpr,  # one round of `exact`; else `fast`
    FIRST: tl.constexpr,  # of the rounds
    LAST: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,  # that are loaded before the first is added
    GIVE_PARTS: tl.constexpr,  # into which columns are cut
    TAKE_PARTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TAKE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """One round: some programs push shares, the others add up what is there (patterns free, publish, acquire)."""
    first = tl.program_id(0)
    number = tl.load(state_ptr)
    if FUSED:
        number += 1  # the last program of this launch counts it
    first_slot, bound = (slots - 3) // 2, (places - 3) // 2
    if GIVES:
        if first < num_givers:
            begin_round(
                signals_ptr, table_ptr, state_ptr, desk_ptr, number, digest, rank, call, first, FUSED, EP_SIZE,
                EP_BLOCK, POLLS, POLLS_PER_LOOK,
            )  # fmt: skip
            give_shares(
                rows_ptr, row_of_slot_ptr, row_weights_ptr, scalars_ptr, staging_table_ptr, slips_table_ptr, sent_ptr,
                table_ptr, state_ptr, number, digest, rank, bound, max_tokens, hidden_dim, first_slot, first,
                num_givers, chunk_len, WEIGHTED and not BY_SLOT, SCALARS, FUSED, TOP_K, TOP_K_BLOCK,
                1 if BY_SLOT else TOP_K, ROWS_AT_ONCE, GIVE_PARTS, NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK_ROWS,
                BLOCK_COLS,
            )  # fmt: skip
    num_tokens = (tokens - 3) // 2
    if TAKES:
        ahead = tl.where(tl.num_programs(0) > 1, num_givers, 0)  # a program alone does both
        if first >= ahead:
            take_shares(
                signals_ptr, state_ptr, desk_ptr, staging_ptr, home_ptr, slot_weights_ptr, sums_ptr, out_ptr, slips_ptr,
                out_scalars_ptr, number, digest, num_tokens, max_tokens, hidden_dim, first_slot, chunk_len,
                first - ahead, tl.num_programs(0) - ahead, FUSED, WEIGHTED, SCALARS, BY_SLOT, FIRST, LAST,
                TOP_K, TOP_K_BLOCK, TAKE_PARTS, NUM_CHUNKS, EP_SIZE, EP_BLOCK, TAKE_ROWS, BLOCK_COLS, POLLS,
                POLLS_PER_LOOK,
            )  # fmt: skip
    if FUSED:
        end_round(
            signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, wide(num_tokens) * hidden_dim,
            (out_scalars_ptr, out_scalars_ptr), num_tokens * TOP_K, number, digest, rank, num_tokens > 0,
            tl.num_programs(0), SCALARS, NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK_COLS, POLLS, POLLS_PER_LOOK,
        )  # fmt: skip


def launch_combine(
    board: Board,
    opening: Opening,
    staging: Staging,
    routes: Routes,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    give: Tile,
    take: Tile,
    scalars: Scalars | None = None,
) -> None:
    """A `fast` combine of `rows [R, D]` with weights `[R]` float32 by row, or None, into `out [T, D]`.

    `give` and `take` are the tiles of those programs that push and of those that add up; `scalars` come home with the
    rows. Once a wait was given up, `out` and what is told of scalars are NaN.
    """
    slots = range(routes.row_of_slot.shape[2])
    _launch_round(board, opening, staging, routes, rows, weights, None, None, slots, out, give, take, scalars)


def launch_combine_slot(
    board: Board,
    opening: Opening,
    staging: Staging,
    routes: Routes,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    slot: int,
    sums: torch.Tensor,
    out: torch.Tensor,
    give: Tile,
    take: Tile,
) -> None:
    """One slot of an `exact` combine, with weights `[T, K]` float32 by slot, or None.

    Slots come in ascending order; `sums [T, D]` float32 keeps what the last one rounds into `out [T, D]`.
    """
    one = range(slot, slot + 1)
    _launch_round(board, opening, staging, routes, rows, None, weights, sums, one, out, give, take, None)


def _launch_round(
    board: Board,
    opening: Opening,
    staging: Staging,
    routes: Routes,
    rows: torch.Tensor,
    row_weights: torch.Tensor | None,
    slot_weights: torch.Tensor | None,
    sums: torch.Tensor | None,
    slots: range,
    out: torch.Tensor,
    give: Tile,
    take: Tile,
    scalars: Scalars | None,
) -> None:
    (_, bound, top_k), rows, num_tokens = routes.row_of_slot.shape, rows.contiguous(), out.shape[0]
    riding = (rows, rows, staging.table, out)
    if scalars is not None:
        riding = (scalars.values.contiguous(), scalars.slips.own, scalars.slips.table, scalars.out)
    traits = (
        row_weights is not None or slot_weights is not None, scalars is not None, sums is not None, slots.start == 0,
        slots.stop == top_k,
    )  # fmt: skip

    def run(*, gives: bool, takes: bool) -> None:
        plan = _plan(board.fused, board.ep_size, top_k, num_tokens, bound, give, take, traits, gives, takes)
        launch(
            combine_kernel, (plan.programs,), board.device, *board.tensors,
            rows, routes.row_of_slot, rows if row_weights is None else row_weights.contiguous(),
            staging.own, staging.table, routes.home_of_slot,
            rows if slot_weights is None else slot_weights.contiguous(), out if sums is None else sums, out,
            routes.sent, *riding,
            board.rank, opening.digest, varying(opening.number), varying(num_tokens), varying(bound),
            varying(slots.start),
            staging.own.shape[1], out.shape[1], staging.chunk_len, plan.givers,
            chosen=plan.chosen,
        )  # fmt: skip

    if board.fused:
        run(gives=True, takes=True)
        return
    launch_wait(board, READ, opening.digest)
    run(gives=True, takes=False)
    launch_tell(board, CHUNKS, opening.digest, begins=True)
    launch_wait(board, CHUNKS, opening.digest)
    run(gives=False, takes=True)
    launch_tell(board, READ, opening.digest)


class _Plan(NamedTuple):
    programs: int
    givers: int
    chosen: Chosen


@lru_cache(1024)
def _plan(
    fused: bool,
    ep_size: int,
    top_k: int,
    num_tokens: int,
    bound: int,
    give: Tile,
    take: Tile,
    traits: tuple[bool, ...],
    gives: bool,
    takes: bool,
) -> _Plan:
    """How many programs share a launch, and its constants; no time to find out anew in every call."""
    weighted, scalars, by_slot, first, last = traits
    chosen = Chosen(
        (*SIGNALLING, *ROUND_ENDS, *PUSHING, *RIDING, round_to, *COMBINING),
        GIVES=gives, TAKES=takes, FUSED=fused, WEIGHTED=weighted, SCALARS=scalars, BY_SLOT=by_slot, FIRST=first,
        LAST=last, TOP_K=top_k, TOP_K_BLOCK=power_of_two(top_k), ROWS_AT_ONCE=_ROWS_AT_ONCE,
        GIVE_PARTS=give.parts_of(bound * ep_size), TAKE_PARTS=take.parts_of(num_tokens), TAKE_ROWS=take.rows,
        NUM_CHUNKS=NUM_CHUNKS,
        POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK, num_warps=give.warps,
        **give.constants, **group_constants(ep_size),
    )  # fmt: skip
    givers = give.grid_of(bound * ep_size) if gives else 0
    takers = take.grid_of(num_tokens) if takes else 0
    return _Plan(givers + takers, givers, chosen)
