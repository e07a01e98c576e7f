"""Where routed slots go among the rows of this rank's experts: by expert, then source rank, token and slot.

Every rank gets the ids of all ranks and works this out for itself, over blocks of tokens. First every slot is placed
among those of its expert in its block, and they are counted; then the experts' groups are laid one after the other, up
to the capacity, and a slot's row is its group's start, plus what stands in earlier blocks, plus what stands before it
in its own. Two ranks, one local expert (expert 0), one slot a token; rank 0 has sent ids `[[0]]`, rank 1 `[[1], [0]]`.
Blocks of one token, two a rank: slots by block are 1, 0, 0, 1, so 0, 1, 1, 1 stand before them; the group begins at row
0 and has 2 rows; `row_of_slot = [[[0], [-1]], [[-1], [1]]]`. With a capacity of 1 row the last slot is dropped:
`[[[0], [-1]], [[-1], [-2]]]`, 1 row is kept and 2 were wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .arrange_blocks import ARRANGING, arrange_share
from .blocks import power_of_two, token_block, up_to
from .launch import launch
from .move import Moves
from .publish import new_scores
from .push import PUSHING, push_chunks
from .signal import (
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    ROUTED,
    SIGNALLING,
    Board,
    count_wait,
    have_come,
    launch_wait,
    meet,
    varying,
)
from .spread import SPREADING, end_round, fill_padding, spread_chunks

NO_ROW, DROPPED = -1, -2
_COUNTS_AT_ONCE = 4096  # elements: 16 registers of a thread
_OTHERS = 32  # slots that a slot is compared with at a time
_CPU_COMPARISONS = 1 << 19  # at a time in the interpreter, which takes tensors of 2^20 elements


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


class Moving(NamedTuple):
    """Rows that the same launch moves: some programs push meanwhile, the others spread when they have arranged.

    Attributes:
        moves: see there.
        out: `[R, D]`.
    """

    moves: Moves
    out: torch.Tensor


def arrange_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
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
    home_ptr,  # [T, K] int32
    staging_ptr,  # [EP, max_tokens, D], shared
    staging_table_ptr,  # [EP] int64: addresses of [EP, max_tokens, D]
    out_ptr,  # [R, D]
    rank,
    digest,
    tokens,  # `varying`: T
    places,  # `varying`: S
    limit,  # `varying`: R
    hidden_dim,
    x_stride,
    max_tokens,
    chunk_len,
    num_pushers,  # the programs behind them arrange
    COUNTS: tl.constexpr,  # the first step
    PLACES: tl.constexpr,  # the second
    MOVES: tl.constexpr,  # whether rows are moved as well
    FUSED: tl.constexpr,  # whether this kernel waits and tells, and its programs meet between steps
    PADDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    LOCAL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
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
    """Arranging, by some programs, which then spread; the others push (patterns acquire, grid, publish and free)."""
    number = tl.load(state_ptr)
    num_arrangers = tl.num_programs(0) - num_pushers
    first = tl.program_id(0) - num_pushers
    bound, capacity = (places - 3) // 2, (limit - 3) // 2
    row_scores_ptrs = (row_scores_ptr, kept_scores_ptr)
    spreads = first >= 0
    if first < 0:
        if MOVES:
            push_chunks(
                x_ptr, home_ptr, staging_table_ptr, table_ptr, state_ptr, number, digest, rank, (tokens - 3) // 2,
                max_tokens, first + num_pushers, num_pushers, hidden_dim, x_stride, chunk_len, FUSED, TOP_K,
                PUSH_PARTS, NUM_CHUNKS, EP_SIZE, EP_BLOCK, PUSH_ROWS, BLOCK_COLS,
            )  # fmt: skip
            spreads = have_come(state_ptr, 1, num_arrangers)
    else:
        arrange_share(
            signals_ptr, state_ptr, desk_ptr, ids_ptr, scores_ptr, row_of_slot_ptr, counts_ptr, padding_ptr, kept_ptr,
            wanted_ptr, ends_ptr, bad_ids_ptr, report_ptr, next_row_ptr, row_scores_ptrs, number, digest,
            rank * NUM_LOCAL, first, num_arrangers, bound, capacity, max_tokens, COUNTS, PLACES, FUSED, ALIGNMENT,
            TOP_K, TOP_K_BLOCK, NUM_LOCAL, LOCAL_BLOCK, BLOCK, OTHERS, TILES, EP_SIZE, EP_BLOCK, POLLS, POLLS_PER_LOOK,
        )  # fmt: skip
        if MOVES:
            if first == 0:
                count_wait(state_ptr, desk_ptr, 5)
            meet(state_ptr, 1, num_arrangers)
            if PADDED:
                fill_padding(padding_ptr, out_ptr, first, num_arrangers, hidden_dim, NUM_LOCAL, BLOCK_COLS)
    if MOVES:
        if spreads:
            spread_chunks(
                signals_ptr, state_ptr, desk_ptr, x_ptr, staging_ptr, row_of_slot_ptr, out_ptr, number, digest, rank,
                (tokens - 3) // 2, bound, max_tokens, hidden_dim, x_stride, chunk_len, FUSED, TOP_K, PARTS, NUM_CHUNKS,
                EP_SIZE, EP_BLOCK, BLOCK_ROWS, BLOCK_COLS, POLLS, POLLS_PER_LOOK,
            )  # fmt: skip
        end_round(
            signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, row_scores_ptrs, number, digest, rank, bound,
            capacity, hidden_dim, tl.num_programs(0), True, NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK_COLS, POLLS,
            POLLS_PER_LOOK,
        )  # fmt: skip


def launch_arrange(
    board: Board,
    digest: int,
    routed: Routed,
    alignment: int,
    num_local: int,
    num_rows: int | None,
    programs: int,
    moving: Moving | None = None,
) -> tuple[Groups, tuple[torch.Tensor, torch.Tensor] | None]:
    """Arrange what all ranks have sent, for a capacity of `num_rows`; None: for as many as come.

    Args:
        board: this rank's.
        digest: of this call.
        routed: see there.
        alignment: groups are padded to a multiple of this.
        num_local: experts of a rank.
        num_rows: R, or None; then slots are counted, and `launch_place` places them.
        programs: how many arrange, at most.
        moving: rows that the launch moves, on a GPU with `num_rows`; that is the end of the round.

    Returns:
        The groups, and `row_scores [R]` float32, 0 on padding rows, twice: each in memory of its own; None without R.
    """
    groups = _new_groups(board, routed, num_local)
    row_scores = None if num_rows is None else new_scores(board, num_rows)
    if not board.fused:
        launch_wait(board, ROUTED, digest)
    steps = [(True, num_rows is not None)]
    if not board.fused and num_rows is not None:  # in the interpreter the steps are launches of their own
        steps = [(True, False), (False, True)]
    for counts, places in steps:
        _launch(board, digest, routed, groups, alignment, num_rows, row_scores, counts, places, programs, moving)
    return groups, row_scores


def launch_place(
    board: Board,
    digest: int,
    routed: Routed,
    groups: Groups,
    alignment: int,
    num_rows: int,
    programs: int,
    moving: Moving | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place the slots that `launch_arrange` has counted: fills `row_of_slot`, returns `row_scores` as that does."""
    row_scores = new_scores(board, num_rows)
    _launch(board, digest, routed, groups, alignment, num_rows, row_scores, False, True, programs, moving)
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


def _launch(
    board: Board,
    digest: int,
    routed: Routed,
    groups: Groups,
    alignment: int,
    num_rows: int | None,
    row_scores: tuple[torch.Tensor, torch.Tensor] | None,
    counts: bool,
    places: bool,
    programs: int,
    moving: Moving | None,
) -> None:
    num_local, (ep_size, max_tokens, top_k) = groups.wanted.shape[0], routed.ids.shape
    block = token_block(board.device, routed.bound, top_k)
    slots = block * power_of_two(top_k)
    others = _OTHERS if board.fused else up_to(max(1, _CPU_COMPARISONS // slots), slots)
    arrangers = max(1, min(programs, groups.counts.shape[0])) if board.fused else 1
    pushers, num_tokens, warps = 0, 0, 8
    numbers: tuple[int, ...] = (1, 1, max_tokens, 1)
    tensors: tuple[torch.Tensor, ...] = (groups.report, groups.row_of_slot, groups.report, groups.report, groups.report)
    constants = {"PADDED": False, "PUSH_PARTS": 1, "PARTS": 1, "PUSH_ROWS": 1, "BLOCK_ROWS": 1, "BLOCK_COLS": 1}
    if moving is not None:
        moves, num_tokens, warps = moving.moves, moving.moves.x.shape[0], moving.moves.spread.warps
        pushers = moves.push.grid_of(moves.pushes)
        arrangers = max(arrangers, moves.spread.grid_of(routed.bound * ep_size))
        tensors, numbers, constants = (*moves.tensors, moving.out), moves.numbers, moves.constants(routed.bound)
    next_row = torch.empty(arrangers, 2, num_local, dtype=torch.int32, device=board.device)
    launch(
        arrange_kernel, (pushers + arrangers,), board.device, *board.tensors,
        routed.ids, routed.scores, groups.row_of_slot, groups.counts, groups.padding,
        groups.tokens_per_expert, groups.wanted, groups.expert_offsets, groups.bad_ids, groups.report,
        next_row, *((groups.wanted, groups.wanted) if row_scores is None else row_scores), *tensors,
        board.rank, digest, varying(num_tokens), varying(routed.bound),
        varying(2**30 - 2 if num_rows is None else num_rows),
        *numbers, pushers,
        COUNTS=counts, PLACES=places, MOVES=moving is not None, FUSED=board.fused, ALIGNMENT=alignment,
        TOP_K=top_k, TOP_K_BLOCK=power_of_two(top_k),
        NUM_LOCAL=num_local, LOCAL_BLOCK=power_of_two(num_local),
        BLOCK=block, OTHERS=others,
        TILES=up_to(max(1, _COUNTS_AT_ONCE // power_of_two(num_local)), groups.counts.shape[0]),
        NUM_CHUNKS=NUM_CHUNKS, POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK, num_warps=warps,
        maxnreg=min(128, 2048 // warps),  # two programs of 8 warps to a processor
        helpers=(*SIGNALLING, meet, have_come, *ARRANGING, *PUSHING, *SPREADING),
        **constants, **board.constants,
    )  # fmt: skip
