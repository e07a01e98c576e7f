"""A dispatch in one launch on a GPU: some programs push this rank's rows, the others arrange and then spread.

Those that push publish this rank's routing before (`publish.py`), and help to spread when they have done (`push.py`,
`spread.py`); those that arrange wait for the routing of all ranks and work out where rows go (`arrange.py`). With that
the round ends. One program also enters the dispatch into its layer's account (`tally.py`). Where the host has to know
how many rows come, those that arrange publish too, the launch ends behind counting, and a second one does the rest.

In the interpreter the steps are launches of their own: publishing is `publish.py`'s, moving `move.py`'s, and this
kernel counts or places.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl

from .account import Account
from .arrange import ARRANGING, Groups, Routed, arrange_share
from .blocks import Tile, power_of_two, routing_block, token_block, up_to
from .launch import Chosen, launch
from .move import Moves, moving_constants
from .publish import Opening, Routing, new_scores, publish_share
from .push import PUSHING, push_chunks
from .round import ROUND_ENDS, end_round
from .signal import (
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    ROUTED,
    SIGNALLING,
    Board,
    begin_call,
    count_wait,
    group_constants,
    have_come,
    meet,
    varying,
    wait_for,
    wide,
)
from .spread import SPREADING, fill_padding, spread_chunks
from .tally import experts_at_once, tally
from .waits import launch_wait

_COUNTS_AT_ONCE = 4096  # elements: 16 registers of a thread
_OTHERS = 32  # slots that a slot is compared with at a time
_CPU_COMPARISONS = 1 << 19  # at a time in the interpreter, which takes tensors of 2^20 elements
_NO_LIMIT = 2**30 - 2  # of rows, as `varying` takes it


class Sizes(NamedTuple):
    """How rows are arranged, and by how many programs.

    Attributes:
        alignment: groups are padded to a multiple of this.
        num_local: e: experts of a rank.
        programs: how many arrange, at most.
    """

    alignment: int
    num_local: int
    programs: int


class Moving(NamedTuple):
    """Rows that the same launch moves.

    Attributes:
        moves: see there.
        out: `[R, D]`.
        account: where the dispatch is entered, or None.
        rows_end: `[1]` int64: out, with an account: the end of the last expert's rows.
    """

    moves: Moves
    out: torch.Tensor
    account: Account | None = None
    rows_end: torch.Tensor | None = None


def dispatch_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    own_ids_ptr,  # [T, K] int64 or int32; these seven as `publish_share` takes them
    own_scores_ptr,  # [T, K] float32
    ids_table_ptr,
    scores_table_ptr,
    home_ptr,  # [T, K] int32
    num_sent_ptr,
    sent_ptr,
    ids_ptr,  # [EP, max_tokens, K] int32
    scores_ptr,  # [EP, max_tokens, K] float32
    row_of_slot_ptr,  # [EP, S, K] int32
    counts_ptr,  # [EP * num_blocks, e] int32
    padding_ptr,  # [2, e] int64
    kept_ptr,  # [e] int64
    wanted_ptr,  # [e] int64
    ends_ptr,  # [e] int32
    bad_ids_ptr,  # [EP] int64
    report_ptr,  # [1 + EP] int64
    next_row_ptr,  # [programs, 2, e] int32, of nobody else's interest
    row_scores_ptr,  # [R] float32; used when slots are placed
    kept_scores_ptr,  # [R] float32: the same once more
    x_ptr,  # [T, D]
    staging_ptr,  # [EP, max_tokens, D], shared
    staging_table_ptr,  # [EP] int64: addresses of [EP, max_tokens, D]
    out_ptr,  # [R, D]
    words_ptr,  # these five as `tally` takes them
    troubles_ptr,
    told_ptr,
    overflowed_ptr,
    rows_end_ptr,
    rank,
    digest,
    call,  # `varying`: its number
    tokens,  # `varying`: T
    places,  # `varying`: S
    limit,  # `varying`: R
    entry,  # `varying`: the layer's place and the policy, see `Account`: 4 * layer + policy
    hidden_dim,
    x_stride,
    max_tokens,
    chunk_len,
    num_pushers,  # the programs behind them arrange
    COUNTS: tl.constexpr,  # the first step; with FUSED, it publishes before
    PLACES: tl.constexpr,  # the second
    MOVES: tl.constexpr,  # whether rows are moved as well
    ENTERS: tl.constexpr,  # whether it is entered into an account
    FUSED: tl.constexpr,  # whether this kernel waits and tells, and its programs meet between steps
    PADDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    LOCAL_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PUBLISHED: tl.constexpr,  # tokens of a block that is published
    BLOCK: tl.constexpr,  # of one that is arranged
    OTHERS: tl.constexpr,
    TILES: tl.constexpr,
    PUSH_PARTS: tl.constexpr,  # into which columns are cut
    PARTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """A share of the whole (patterns free, publish, acquire and grid)."""
    number = tl.load(state_ptr)
    # Of those that arrange; a program alone does both.
    ahead = tl.where(tl.num_programs(0) > 1, num_pushers, 0)
    num_arrangers, first = tl.num_programs(0) - ahead, tl.program_id(0) - ahead
    num_tokens, bound, capacity = (tokens - 3) // 2, (places - 3) // 2, (limit - 3) // 2
    row_scores_ptrs = (row_scores_ptr, kept_scores_ptr)
    if FUSED:
        if COUNTS:
            number += 1  # the last program of the launch counts it
            if first == 0:
                begin_call(state_ptr, desk_ptr, call, True)
            free = tl.load(state_ptr + 1)
            wait_for(signals_ptr, state_ptr, desk_ptr, 4, free, digest, POLLS, POLLS_PER_LOOK, False, EP_SIZE, EP_BLOCK)
            # By those who push, where they are several: all ranks wait for routing, and rows on their way hold it up.
            early = num_pushers > 1
            publisher = tl.where(early, tl.program_id(0), first)
            publishers = tl.where(early, num_pushers, num_arrangers)
            if (publisher >= 0) & (publisher < publishers):
                publish_share(
                    table_ptr, state_ptr, own_ids_ptr, own_scores_ptr, ids_table_ptr, scores_table_ptr, home_ptr,
                    num_sent_ptr, sent_ptr, number, digest, rank, num_tokens, max_tokens, publisher, publishers, FUSED,
                    EP_SIZE * NUM_LOCAL, NUM_LOCAL, TOP_K, TOP_K_BLOCK, EP_SIZE, EP_BLOCK, PUBLISHED,
                )  # fmt: skip
        else:
            if first == 0:
                count_wait(state_ptr, desk_ptr, 5)
    spreads = first >= 0
    if MOVES:
        if tl.program_id(0) < num_pushers:
            push_chunks(
                x_ptr, own_ids_ptr, staging_table_ptr, table_ptr, state_ptr, number, digest, rank, num_tokens,
                max_tokens, tl.program_id(0), num_pushers, hidden_dim, x_stride, chunk_len, FUSED, NUM_LOCAL, TOP_K,
                PUSH_PARTS, NUM_CHUNKS, EP_SIZE, EP_BLOCK, PUSH_ROWS, BLOCK_COLS,
            )  # fmt: skip
    if first < 0:
        if MOVES:
            spreads = have_come(state_ptr, 1, num_arrangers)
    else:
        reports = arrange_share(
            signals_ptr, state_ptr, desk_ptr, ids_ptr, scores_ptr, row_of_slot_ptr, counts_ptr, padding_ptr, kept_ptr,
            wanted_ptr, ends_ptr, bad_ids_ptr, report_ptr, next_row_ptr, row_scores_ptrs, number, digest,
            rank * NUM_LOCAL, first, num_arrangers, bound, capacity, max_tokens, COUNTS, PLACES, FUSED, ALIGNMENT,
            TOP_K, TOP_K_BLOCK, NUM_LOCAL, LOCAL_BLOCK, BLOCK, OTHERS, TILES, EP_SIZE, EP_BLOCK, POLLS, POLLS_PER_LOOK,
        )  # fmt: skip
        if MOVES:
            meet(state_ptr, 1, num_arrangers)
            if PADDED:
                fill_padding(padding_ptr, out_ptr, first, num_arrangers, hidden_dim, NUM_LOCAL, BLOCK_COLS)
            if ENTERS:
                if first == 0:  # it has reported
                    tally(
                        wanted_ptr, kept_ptr, ends_ptr, bad_ids_ptr, words_ptr, troubles_ptr, told_ptr, overflowed_ptr,
                        rows_end_ptr, (entry - 3) // 8, num_tokens, capacity, tl.where(bound > 0, bound, 1),
                        (entry - 3) // 2 % 4, NUM_LOCAL, EP_SIZE, ALIGNMENT, EXPERT_BLOCK, EP_BLOCK,
                    )  # fmt: skip
        elif FUSED and COUNTS:
            if reports != 0:  # the last one: a second launch will follow
                tl.store(state_ptr, number)
                tl.store(state_ptr + 1, number)
                count_wait(state_ptr, desk_ptr, 6)
    if MOVES:
        if spreads:
            spread_chunks(
                signals_ptr, state_ptr, desk_ptr, x_ptr, staging_ptr, row_of_slot_ptr, out_ptr, number, digest, rank,
                num_tokens, bound, max_tokens, hidden_dim, x_stride, chunk_len, FUSED, TOP_K, PARTS, NUM_CHUNKS,
                EP_SIZE, EP_BLOCK, BLOCK_ROWS, BLOCK_COLS, POLLS, POLLS_PER_LOOK,
            )  # fmt: skip
        end_round(
            signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, wide(capacity) * hidden_dim, row_scores_ptrs,
            capacity, number, digest, rank, bound > 0, tl.num_programs(0), True, NUM_CHUNKS, EP_SIZE, EP_BLOCK,
            BLOCK_COLS, POLLS, POLLS_PER_LOOK,
        )  # fmt: skip


Scores = tuple[torch.Tensor, torch.Tensor]


def launch_dispatch(
    board: Board, opening: Opening, routing: Routing, routed: Routed, sizes: Sizes, moving: Moving
) -> tuple[Groups, Scores]:
    """On a GPU: publish this rank's routing, arrange what all ranks have sent, and move rows.

    Returns:
        The groups, and `row_scores [R]` float32, 0 on padding rows, twice: each in memory of its own.
    """
    groups, row_scores = _new_groups(board, routed, sizes.num_local), new_scores(board, moving.out.shape[0])
    run = _Run(board, opening, routing, routed, groups, sizes)
    run(row_scores, counts=True, places=True, moving=moving)
    return groups, row_scores


def launch_count(
    board: Board, opening: Opening, routing: Routing, routed: Routed, sizes: Sizes, num_rows: int | None
) -> Groups:
    """Count the slots that all ranks have sent, for a capacity of `num_rows`; None: for as many as come.

    On a GPU it publishes this rank's routing before.
    """
    groups = _new_groups(board, routed, sizes.num_local)
    if not board.fused:
        launch_wait(board, ROUTED, opening.digest)
    run = _Run(board, opening, routing, routed, groups, sizes)
    run(None, counts=True, places=False, num_rows=num_rows)
    return groups


def launch_place(
    board: Board,
    opening: Opening,
    routing: Routing,
    routed: Routed,
    groups: Groups,
    sizes: Sizes,
    num_rows: int,
    moving: Moving | None = None,
) -> Scores:
    """Place the slots that were counted: fills `row_of_slot`; returns `row_scores` as `launch_dispatch` does.

    On a GPU it moves rows too.
    """
    row_scores = new_scores(board, num_rows)
    run = _Run(board, opening, routing, routed, groups, sizes)
    run(row_scores, counts=False, places=True, num_rows=num_rows, moving=moving)
    return row_scores


def _new_groups(board: Board, routed: Routed, num_local: int) -> Groups:
    top_k, device = routed.ids.shape[2], board.device
    num_blocks = -(-routed.bound // token_block(device, routed.bound, top_k))
    parts = (num_local, board.ep_size, 1 + board.ep_size)
    wanted, bad_ids, report = torch.empty(sum(parts), dtype=torch.int64, device=device).split_with_sizes(parts)
    return Groups(
        row_of_slot=torch.empty(board.ep_size, routed.bound, top_k, dtype=torch.int32, device=device),
        counts=torch.empty(board.ep_size * num_blocks, num_local, dtype=torch.int32, device=device),
        padding=torch.empty(2, num_local, dtype=torch.int64, device=device),
        tokens_per_expert=torch.empty(num_local, dtype=torch.int64, device=device),
        wanted=wanted,
        expert_offsets=torch.empty(num_local, dtype=torch.int32, device=device),
        bad_ids=bad_ids,
        report=report,
    )


class _Run(NamedTuple):
    """The launches of one dispatch."""

    board: Board
    opening: Opening
    routing: Routing
    routed: Routed
    groups: Groups
    sizes: Sizes

    def __call__(
        self,
        row_scores: Scores | None,
        *,
        counts: bool,
        places: bool,
        num_rows: int | None = None,
        moving: Moving | None = None,
    ) -> None:
        board, routing, groups, bound = self.board, self.routing, self.groups, self.routed.bound
        device, (ep_size, max_tokens, top_k) = board.device, self.routed.ids.shape
        num_tokens, unused = routing.ids.shape[0], groups.report
        rows: tuple[torch.Tensor, ...] = (unused,) * 4
        books: tuple[torch.Tensor, ...] = (unused,) * 5
        numbers: tuple[int, ...] = (1, 1, max_tokens, 1)
        entry, tiles, enters = 0, None, False
        if moving is not None:
            moves, out, account, rows_end = moving
            num_rows, numbers, tiles = out.shape[0], moves.numbers, _Tiles(moves.push, moves.spread, moves.padded)
            rows = (moves.x, moves.staging.own, moves.staging.table, out)
            if account is not None and rows_end is not None:
                books, entry, enters = (*account.books, rows_end), 4 * account.layer + account.policy, True
        plan = _plan(
            board.fused, ep_size, top_k, num_tokens, bound, groups.counts.shape[0], self.sizes, tiles,
            routing_block(device, num_tokens), token_block(device, bound, top_k), counts, places, enters,
        )  # fmt: skip
        next_row = torch.empty(plan.arrangers, 2, self.sizes.num_local, dtype=torch.int32, device=device)
        launch(
            dispatch_kernel, (plan.programs,), device, *board.tensors,
            *routing.tensors, self.routed.ids, self.routed.scores, *groups, next_row,
            *((unused, unused) if row_scores is None else row_scores), *rows, *books,
            board.rank, self.opening.digest, varying(self.opening.number), varying(num_tokens), varying(bound),
            varying(_NO_LIMIT if num_rows is None else num_rows), varying(entry), *numbers, plan.pushers,
            chosen=plan.chosen,
        )  # fmt: skip


class _Tiles(NamedTuple):
    """Of those who push and who spread; and whether groups have padding."""

    push: Tile
    spread: Tile
    padded: bool


class _Plan(NamedTuple):
    programs: int
    pushers: int
    arrangers: int
    chosen: Chosen


@lru_cache(1024)
def _plan(
    fused: bool,
    ep_size: int,
    top_k: int,
    num_tokens: int,
    bound: int,
    num_blocks: int,
    sizes: Sizes,
    tiles: _Tiles | None,
    published: int,
    block: int,
    counts: bool,
    places: bool,
    enters: bool,
) -> _Plan:
    """How many programs share a launch, and its constants; no time to find out anew in every call."""
    arrangers, pushers, warps = max(1, min(sizes.programs, num_blocks)) if fused else 1, 0, 8
    moving = {"PADDED": False, "PUSH_PARTS": 1, "PARTS": 1, "PUSH_ROWS": 1, "BLOCK_ROWS": 1, "BLOCK_COLS": 1}
    if tiles is not None:
        push, spread, padded = tiles
        pushers, warps = push.grid_of(pushes := num_tokens * (ep_size - 1)), spread.warps
        arrangers = max(arrangers, spread.grid_of(bound * ep_size))
        moving = moving_constants(push, spread, padded, pushes, bound * ep_size)
    slots, local = block * power_of_two(top_k), power_of_two(sizes.num_local)
    chosen = Chosen(
        (*SIGNALLING, meet, have_come, *ROUND_ENDS, publish_share, *ARRANGING, *PUSHING, *SPREADING, tally),
        COUNTS=counts, PLACES=places, MOVES=tiles is not None, ENTERS=enters, FUSED=fused, ALIGNMENT=sizes.alignment,
        TOP_K=top_k, TOP_K_BLOCK=power_of_two(top_k), NUM_LOCAL=sizes.num_local, LOCAL_BLOCK=local,
        EXPERT_BLOCK=experts_at_once(sizes.num_local), PUBLISHED=published, BLOCK=block,
        OTHERS=_OTHERS if fused else up_to(max(1, _CPU_COMPARISONS // slots), slots),
        TILES=up_to(max(1, _COUNTS_AT_ONCE // local), num_blocks),
        NUM_CHUNKS=NUM_CHUNKS, POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK, num_warps=warps,
        maxnreg=min(128, 2048 // warps),  # two programs of 8 warps to a processor
        **moving, **group_constants(ep_size),
    )  # fmt: skip
    alone = tiles is not None and tiles.spread.max_programs == 0
    return _Plan(1 if alone else pushers + arrangers, pushers, arrangers, chosen)
