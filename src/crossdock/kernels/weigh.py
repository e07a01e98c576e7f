"""Combine's backward where it was weighted: gradients come to the rows, scaled by the scores, with the scores' own.

A launch finds where every row's gradient comes from. In the next some programs push this rank's gradients, as in
`move.py`, and the others weigh the rows of its own tokens; when all ranks' have come, another weighs the rest, and the
last adds up parts of dots. Weighing goes through rows in their order, which is what memory is fast at, and through
columns block by block, so that what many rows read of the gradients stays in the cache.

Two ranks with two tokens at most and one now, rank 0, one expert with two rows, for token 0 of either rank:
`row_of_slot = [[[0]], [[1]]]`, so `source_of_row = [0, 2]`, and -1 for rows of padding, which become zero. Row
`[1, 2]`, gradient `[3, 4]`, score 0.5: the gradient becomes `[1.5, 2]`, and the score's is 11; with columns in blocks
of one its parts are 3 and 8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .blocks import Tile, up_to
from .launch import launch
from .move import Moves
from .publish import Opening
from .push import PUSHING, push_chunks
from .round import ROUND_ENDS, begin_round, end_round
from .rounding import round_to
from .signal import (
    CHUNKS,
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    READ,
    SIGNALLING,
    Board,
    is_last,
    varying,
    wide,
)
from .waits import launch_tell, launch_wait

_BLOCK, _CPU_BLOCK = 1024, 1 << 15  # slots, or rows
_PADDING_BLOCK = 128


class Weighed(NamedTuple):
    """What gradients are weighed with, and where they go.

    Attributes:
        rows: `[R, D]`, which were combined.
        scores: `[R]` float32.
        out: `[R, D]`: the rows' gradients.
        parts: `[blocks of columns, R]` float32: of the scores' gradients.
    """

    rows: torch.Tensor
    scores: torch.Tensor
    out: torch.Tensor
    parts: torch.Tensor


def find_sources_kernel(
    row_of_slot_ptr,  # [EP, S, K] int32; below 0 is no row
    padding_ptr,  # [2, e] int64: where each group's padding begins and ends
    source_of_row_ptr,  # [R] int32: out
    places,  # `varying`: S
    max_tokens,
    NUM_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDING_BLOCK: tl.constexpr,
):
    """Where every row's gradient lies among `[EP, max_tokens]`; -1 for padding."""
    first, step, bound = tl.program_id(0), tl.num_programs(0), (places - 3) // 2
    for start in range(first * BLOCK, EP_SIZE * bound * TOP_K, step * BLOCK):
        slot = start + tl.arange(0, BLOCK)
        row = tl.load(row_of_slot_ptr + slot, mask=slot < EP_SIZE * bound * TOP_K, other=-1).to(tl.int64)
        token = slot // TOP_K
        tl.store(source_of_row_ptr + row, token // bound * max_tokens + token % bound, mask=row >= 0)
    for expert in range(first, NUM_LOCAL, step):
        end = tl.load(padding_ptr + NUM_LOCAL + expert)
        for begin in range(tl.load(padding_ptr + expert), end, PADDING_BLOCK):
            row = begin + tl.arange(0, PADDING_BLOCK)
            tl.store(source_of_row_ptr + row, tl.full((PADDING_BLOCK,), -1, tl.int32), mask=row < end)


def weigh_tile(
    grads_ptr, stride, rows_ptr, scores_ptr, out_ptr, parts_ptr, row, source, known, mine, block, num_rows, hidden_dim,
    CONVERTS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A block of columns of rows `[BLOCK_ROWS]`, those that are `mine`; what is not `known` has no gradient."""
    col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (col < hidden_dim)[None, :]
    at = row[:, None] * hidden_dim + col[None, :]
    grad = tl.load(
        grads_ptr + source[:, None] * stride + col[None, :], mask=known[:, None] & inside, other=0.0,
        eviction_policy="evict_last",
    ).to(tl.float32)  # fmt: skip
    value = tl.load(rows_ptr + at, mask=known[:, None] & inside, other=0.0, eviction_policy="evict_first")
    score = tl.load(scores_ptr + row, mask=known, other=0.0)
    weighed = grad * score[:, None]
    if not CONVERTS:  # in the interpreter a conversion would not round; compiled, it is one step
        weighed = round_to(weighed, out_ptr.dtype.element_ty)
    weighed = weighed.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, weighed, mask=mine[:, None] & inside, eviction_policy="evict_first")
    part = tl.reduce(value.to(tl.float32) * grad, 1, tl.standard._sum_combine)
    tl.store(parts_ptr + wide(block) * num_rows + row, part, mask=mine)


def weigh_tiles(
    x_ptr, staging_ptr, source_of_row_ptr, rows_ptr, scores_ptr, out_ptr, parts_ptr, rank, num_tokens, max_tokens, end,
    num_rows, hidden_dim, x_stride, first, step,
    CONVERTS: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, EP_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Weigh rows up to `end` whose gradients are this rank's, and padding, or others'; as program `first` of `step`."""
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_own = wide(rank) * max_tokens
    for tile in range(first, num_blocks * ((hidden_dim + BLOCK_COLS - 1) // BLOCK_COLS), step):
        row = wide(tile % num_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        source = tl.load(source_of_row_ptr + row, mask=row < end, other=-1).to(tl.int64)
        # After a wait that was given up, in an earlier call, a row may have no source.
        known = (row < end) & (source >= 0) & (source < EP_SIZE * max_tokens)
        token = source - first_own
        others = known & ((token < 0) | (token >= max_tokens))
        if OTHERS:
            if tl.reduce(others.to(tl.int32), 0, tl.standard._sum_combine) > 0:
                weigh_tile(
                    staging_ptr, hidden_dim, rows_ptr, scores_ptr, out_ptr, parts_ptr, row, source, others, others,
                    tile // num_blocks, num_rows, hidden_dim, CONVERTS, BLOCK_COLS,
                )  # fmt: skip
        if OWN:
            own = (row < end) & (others == 0)
            if tl.reduce(own.to(tl.int32), 0, tl.standard._sum_combine) > 0:
                weigh_tile(
                    x_ptr, x_stride, rows_ptr, scores_ptr, out_ptr, parts_ptr, row, token,
                    own & known & (token < num_tokens), own, tile // num_blocks, num_rows, hidden_dim, CONVERTS,
                    BLOCK_COLS,
                )  # fmt: skip


WEIGHING = (round_to, weigh_tile, weigh_tiles)


def weigh_rows_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    x_ptr,  # [T, D], gradients `x_stride` elements apart
    home_ptr,  # [T, K] int32
    staging_ptr,  # [EP, max_tokens, D], shared, the dtype of `x`
    staging_table_ptr,  # [EP] int64: addresses of [EP, max_tokens, D]
    source_of_row_ptr,  # [R] int32
    padding_ptr,  # [2, e] int64: where each group's padding begins and ends
    rows_ptr,  # [R, D]
    scores_ptr,  # [R] float32
    out_ptr,  # [R, D]
    parts_ptr,  # [blocks of columns, R] float32
    num_sent_ptr,  # [1] int64: rows that other ranks get
    sent_ptr,  # [1] int64, added to
    rank,
    digest,
    call,  # `varying`: its number
    tokens,  # `varying`: T
    room,  # `varying`: R
    hidden_dim,
    x_stride,
    max_tokens,
    chunk_len,
    num_pushers,
    PUSHES: tl.constexpr,
    OWN: tl.constexpr,  # rows of this rank's tokens, and padding
    OTHERS: tl.constexpr,  # rows of others' tokens, which have come before this launch
    FUSED: tl.constexpr,  # whether programs that push wait and tell
    CONVERTS: tl.constexpr,  # whether conversions round
    NUM_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    PUSH_PARTS: tl.constexpr,  # into which columns are cut
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    PUSH_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """The first or the second part of a round: some programs push, those behind them weigh (patterns free, publish)."""
    first = tl.program_id(0)
    num_tokens, num_rows = (tokens - 3) // 2, (room - 3) // 2
    if PUSHES:
        if first < num_pushers:
            number = tl.load(state_ptr) + 1
            if first == 0:
                tl.store(sent_ptr, tl.load(sent_ptr) + tl.load(num_sent_ptr))
            begin_round(
                signals_ptr, table_ptr, state_ptr, desk_ptr, number, digest, rank, call, first, FUSED, EP_SIZE,
                EP_BLOCK, POLLS, POLLS_PER_LOOK,
            )  # fmt: skip
            push_chunks(
                x_ptr, home_ptr, staging_table_ptr, table_ptr, state_ptr, number, digest, rank, num_tokens, max_tokens,
                first, num_pushers, hidden_dim, x_stride, chunk_len, FUSED, 0, TOP_K, PUSH_PARTS, NUM_CHUNKS,
                EP_SIZE, EP_BLOCK, PUSH_ROWS, PUSH_COLS,
            )  # fmt: skip
            if FUSED:
                # Of all programs these count the round: each that asks for the last one waits for its own stores.
                if is_last(state_ptr, 8, num_pushers):
                    tl.store(state_ptr, number)
                    tl.store(state_ptr + 1, number)
    if OWN or OTHERS:
        if first >= num_pushers:
            weigh_tiles(
                x_ptr, staging_ptr, source_of_row_ptr, rows_ptr, scores_ptr, out_ptr, parts_ptr, rank, num_tokens,
                max_tokens, tl.load(padding_ptr + 2 * NUM_LOCAL - 1), num_rows, hidden_dim, x_stride,
                first - num_pushers, tl.num_programs(0) - num_pushers, CONVERTS, OWN, OTHERS, EP_SIZE, BLOCK_ROWS,
                BLOCK_COLS,
            )  # fmt: skip


def add_parts_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    parts_ptr,  # [parts, R] float32
    dots_ptr,  # [R] float32
    weighed_ptr,  # [R, D]: what becomes NaN where a wait was given up, with the dots
    rank,
    digest,
    room,  # `varying`: R
    hidden_dim,
    FUSED: tl.constexpr,  # whether this kernel tells
    NUM_PARTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Add up parts in their order, and end the round (pattern free)."""
    num_rows = (room - 3) // 2
    row = wide(tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for part in range(NUM_PARTS):
        total += tl.load(parts_ptr + wide(part) * num_rows + row, mask=row < num_rows, other=0.0)
    tl.store(dots_ptr + row, total, mask=row < num_rows)
    if FUSED:
        end_round(
            signals_ptr, table_ptr, state_ptr, desk_ptr, weighed_ptr, wide(num_rows) * hidden_dim,
            (dots_ptr, dots_ptr), num_rows, tl.load(state_ptr), digest, rank, True, tl.num_programs(0), True,
            NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK, POLLS, POLLS_PER_LOOK,
        )  # fmt: skip


def launch_weigh_rows(
    board: Board,
    opening: Opening,
    moves: Moves,
    weighed: Weighed,
    tile: Tile,
    row_of_slot: torch.Tensor,
    padding: torch.Tensor,
    num_sent: torch.Tensor,
    sent: torch.Tensor,
) -> torch.Tensor:
    """Combine's backward, in a round of its own: gradients `moves.x [T, D]` to `weighed.out`.

    `tile` is that of the programs that weigh; the rest as in `launch_move_rows`. Once a wait was given up, results are
    NaN.

    Returns:
        Gradients of the scores by row, `[R]` float32: dots of rows and gradients, in float32. Like `weighed.out` they
        are uninitialised behind the last group's end.
    """
    source_of_row = _launch_find_sources(board, weighed, row_of_slot, padding, moves.staging.own.shape[1])
    run = _Run(board, opening, moves, weighed, tile, source_of_row, padding, num_sent, sent, row_of_slot.shape[2])
    if board.fused:
        run(pushes=True, own=True, others=False)
    else:
        launch_wait(board, READ, opening.digest)
        run(pushes=True, own=False, others=False)
        launch_tell(board, CHUNKS, opening.digest, begins=True)
    launch_wait(board, CHUNKS, opening.digest)
    run(pushes=False, own=not board.fused, others=True)
    dots = _launch_add_parts(board, opening, weighed)
    if not board.fused:
        launch_tell(board, READ, opening.digest)
    return dots


class _Run(NamedTuple):
    """The launches of one round."""

    board: Board
    opening: Opening
    moves: Moves
    weighed: Weighed
    tile: Tile
    source_of_row: torch.Tensor
    padding: torch.Tensor
    num_sent: torch.Tensor
    sent: torch.Tensor
    top_k: int

    def __call__(self, *, pushes: bool, own: bool, others: bool) -> None:
        board, moves, weighed, tile = self.board, self.moves, self.weighed, self.tile
        num_rows, hidden_dim = weighed.out.shape
        num_pushers = moves.push.grid_of(moves.pushes) if pushes else 0
        num_tiles = max(1, -(-num_rows // tile.rows) * -(-hidden_dim // tile.cols))
        num_weighers = min(tile.max_programs, num_tiles) if own or others else 0
        launch(
            weigh_rows_kernel, (num_pushers + num_weighers,), board.device, *board.tensors,
            *moves.tensors, self.source_of_row, self.padding, *weighed, self.num_sent, self.sent,
            board.rank, self.opening.digest, varying(self.opening.number), varying(moves.x.shape[0]),
            varying(num_rows), *moves.numbers, num_pushers,
            PUSHES=pushes, OWN=own, OTHERS=others and board.ep_size > 1, FUSED=board.fused,
            CONVERTS=board.compiled,
            NUM_LOCAL=self.padding.shape[1], TOP_K=self.top_k,
            PUSH_PARTS=moves.push.parts_of(moves.pushes), NUM_CHUNKS=NUM_CHUNKS,
            PUSH_ROWS=moves.push.rows, PUSH_COLS=moves.push.cols, POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK,
            num_warps=tile.warps, helpers=(*SIGNALLING, *ROUND_ENDS, *PUSHING, *WEIGHING),
            **tile.constants, **board.constants,
        )  # fmt: skip


def _launch_find_sources(
    board: Board, weighed: Weighed, row_of_slot: torch.Tensor, padding: torch.Tensor, max_tokens: int
) -> torch.Tensor:
    source_of_row = torch.empty(weighed.out.shape[0], dtype=torch.int32, device=board.device)
    block = _BLOCK if board.fused else _CPU_BLOCK
    launch(
        find_sources_kernel, (max(1, -(-row_of_slot.numel() // block)) if board.fused else 1,), board.device,
        row_of_slot, padding, source_of_row, varying(row_of_slot.shape[1]), max_tokens,
        NUM_LOCAL=padding.shape[1], TOP_K=row_of_slot.shape[2], EP_SIZE=board.ep_size, BLOCK=block,
        PADDING_BLOCK=_PADDING_BLOCK, num_warps=4,
    )  # fmt: skip
    return source_of_row


def _launch_add_parts(board: Board, opening: Opening, weighed: Weighed) -> torch.Tensor:
    num_parts, num_rows = weighed.parts.shape
    dots = torch.empty(num_rows, dtype=torch.float32, device=board.device)
    block = 256 if board.fused else up_to(_CPU_BLOCK, num_rows)
    launch(
        add_parts_kernel, (max(1, -(-num_rows // block)),), board.device, *board.tensors,
        weighed.parts, dots, weighed.out, board.rank, opening.digest, varying(num_rows), weighed.out.shape[1],
        FUSED=board.fused, NUM_PARTS=num_parts, NUM_CHUNKS=NUM_CHUNKS, BLOCK=block,
        POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK,
        num_warps=4, helpers=(*SIGNALLING, *ROUND_ENDS), **board.constants,
    )  # fmt: skip
    return dots
