"""Move rows out along a known layout: some programs push this rank's rows, the others spread those that have come.

What both do stands in `push.py` and `spread.py`. On a GPU a dispatch leaves it to the kernel that arranges
(`dispatch.py`), so this one serves layouts of earlier dispatches: in backwards and recomputation. Programs that push
come first and wait for nothing but a free buffer, so those that wait for peers may take what is left of a device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from .blocks import Tile
from .launch import Chosen, launch
from .publish import Opening
from .push import PUSHING, Staging, push_chunks
from .round import ROUND_ENDS, begin_round, end_round, forget_claims
from .signal import (
    CHUNKS,
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    READ,
    SIGNALLING,
    Board,
    come,
    group_constants,
    have_come,
    varying,
    wide,
)
from .spread import SPREADING, fill_padding, spread_chunks
from .waits import launch_tell, launch_wait


class Moves(NamedTuple):
    """Rows on their way.

    Attributes:
        x: `[T, D]`; each row is in one piece.
        home_of_slot: `[T, K]` int32: ranks of this rank's slots.
        staging: see there.
        push: tile and programs that push.
        spread: of those that spread.
        padded: whether groups have padding, which becomes zero.
    """

    x: torch.Tensor
    home_of_slot: torch.Tensor
    staging: Staging
    push: Tile
    spread: Tile
    padded: bool

    @property
    def pushes(self) -> int:
        """Rows that are pushed, at most."""
        return self.x.shape[0] * (self.staging.table.shape[0] - 1)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As kernels take them."""
        return self.x, self.home_of_slot, self.staging.own, self.staging.table

    @property
    def numbers(self) -> tuple[int, ...]:
        """As kernels take them."""
        return self.x.shape[1], self.x.stride(0), self.staging.own.shape[1], self.staging.chunk_len


def moving_constants(push: Tile, spread: Tile, padded: bool, pushes: int, places: int) -> dict[str, Any]:
    """Constexprs of programs that push so many rows at most, and of those that spread what is in so many places."""
    return {
        "PADDED": padded,
        "PUSH_ROWS": push.rows,
        "PUSH_PARTS": push.parts_of(pushes),
        "PARTS": spread.parts_of(places),
        **spread.constants,
    }


def move_rows_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    x_ptr,  # [T, D], rows `x_stride` elements apart
    home_ptr,  # [T, K] int32
    staging_ptr,  # [EP, max_tokens, D], shared, the dtype of `x`
    staging_table_ptr,  # [EP] int64: addresses of [EP, max_tokens, D]
    row_of_slot_ptr,  # [EP, S, K] int32; below 0 is no row
    padding_ptr,  # [2, e] int64: where each group's padding begins and ends
    out_ptr,  # [R, D]
    num_sent_ptr,  # [1] int64: rows that other ranks get
    sent_ptr,  # [1] int64, added to
    rank,
    digest,
    call,  # `varying`: its number
    tokens,  # `varying`: T
    places,  # `varying`: S
    room,  # `varying`: R
    hidden_dim,
    x_stride,
    max_tokens,
    chunk_len,
    num_pushers,
    PUSHES: tl.constexpr,
    SPREADS: tl.constexpr,
    BEGINS: tl.constexpr,  # whether this begins a round, without routing
    FUSED: tl.constexpr,  # whether this kernel waits and tells
    PADDED: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
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
    """One round: some programs push, those behind them spread (patterns free, publish and acquire)."""
    first = tl.program_id(0)
    ahead = tl.where(tl.num_programs(0) > 1, num_pushers, 0)  # of those that spread; a program alone does both
    number = tl.load(state_ptr)
    num_tokens, bound = (tokens - 3) // 2, (places - 3) // 2
    if BEGINS:
        number += 1
    if PUSHES:
        if first < num_pushers:
            if BEGINS:
                if first == 0:
                    tl.store(sent_ptr, tl.load(sent_ptr) + tl.load(num_sent_ptr))
                begin_round(
                    signals_ptr, table_ptr, state_ptr, desk_ptr, number, digest, rank, call, first, FUSED, EP_SIZE,
                    EP_BLOCK, POLLS, POLLS_PER_LOOK,
                )  # fmt: skip
            push_chunks(
                x_ptr, home_ptr, staging_table_ptr, table_ptr, state_ptr, number, digest, rank, num_tokens, max_tokens,
                first, num_pushers, hidden_dim, x_stride, chunk_len, FUSED, 0, TOP_K, PUSH_PARTS, NUM_CHUNKS,
                EP_SIZE, EP_BLOCK, PUSH_ROWS, BLOCK_COLS,
            )  # fmt: skip
    if SPREADS:
        num_spreaders = tl.num_programs(0) - ahead
        spreads = first >= ahead
        if spreads:
            come(state_ptr, 1)
            if PADDED:
                fill_padding(padding_ptr, out_ptr, first - ahead, num_spreaders, hidden_dim, NUM_LOCAL, BLOCK_COLS)
        else:
            spreads = have_come(state_ptr, 1, num_spreaders)
        if spreads:
            spread_chunks(
                signals_ptr, state_ptr, desk_ptr, x_ptr, staging_ptr, row_of_slot_ptr, out_ptr, number, digest, rank,
                num_tokens, bound, max_tokens, hidden_dim, x_stride, chunk_len, FUSED, TOP_K, PARTS, NUM_CHUNKS,
                EP_SIZE, EP_BLOCK, BLOCK_ROWS, BLOCK_COLS, POLLS, POLLS_PER_LOOK,
            )  # fmt: skip
        if FUSED:
            end_round(
                signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, wide((room - 3) // 2) * hidden_dim,
                (out_ptr, out_ptr), 0, number, digest, rank, bound > 0, tl.num_programs(0), False, NUM_CHUNKS,
                EP_SIZE, EP_BLOCK, BLOCK_COLS, POLLS, POLLS_PER_LOOK,
            )  # fmt: skip
        elif first == 0:
            forget_claims(state_ptr)


def launch_move_rows(
    board: Board,
    opening: Opening,
    moves: Moves,
    row_of_slot: torch.Tensor,
    padding: torch.Tensor,
    out: torch.Tensor,
    num_sent: torch.Tensor,
    sent: torch.Tensor,
) -> None:
    """Move rows out along a known layout, in a round of its own, into `out [R, D]`.

    `row_of_slot [ep_size, S, K]` int32 and `padding [2, e]` int64 are those of `arrange.Groups`; `num_sent [1]` is
    added to `sent [1]`. Once a wait was given up, `out` is NaN.
    """
    run = _Run(board, opening, moves, row_of_slot, padding, out, num_sent, sent)
    if board.fused:
        run(pushes=True, spreads=True, begins=True)
        return
    launch_wait(board, READ, opening.digest)
    run(pushes=True, spreads=False, begins=True)
    launch_tell(board, CHUNKS, opening.digest, begins=True)
    launch_wait(board, CHUNKS, opening.digest)
    run(pushes=False, spreads=True, begins=False)
    launch_tell(board, READ, opening.digest)


def launch_push_rows(board: Board, opening: Opening, moves: Moves, none: torch.Tensor) -> None:
    """In the interpreter: push the rows of a dispatch whose routing is published, and tell; `none [1]` is not used."""
    row_of_slot, padding = moves.home_of_slot.view(1, *moves.home_of_slot.shape), none.view(1, 1)
    run = _Run(board, opening, moves, row_of_slot, padding, moves.x, none, none)
    run(pushes=True, spreads=False, begins=False)
    launch_tell(board, CHUNKS, opening.digest)


def launch_spread_rows(
    board: Board, opening: Opening, moves: Moves, row_of_slot: torch.Tensor, padding: torch.Tensor, out: torch.Tensor
) -> None:
    """In the interpreter: the rest of such a dispatch; the end of its round."""
    launch_wait(board, CHUNKS, opening.digest)
    run = _Run(board, opening, moves, row_of_slot, padding, out, padding, padding)
    run(pushes=False, spreads=True, begins=False)
    launch_tell(board, READ, opening.digest)


class _Run(NamedTuple):
    """The launches of one movement."""

    board: Board
    opening: Opening
    moves: Moves
    row_of_slot: torch.Tensor
    padding: torch.Tensor
    out: torch.Tensor
    num_sent: torch.Tensor
    sent: torch.Tensor

    def __call__(self, *, pushes: bool, spreads: bool, begins: bool) -> None:
        board, moves, out = self.board, self.moves, self.out
        _, bound, top_k = self.row_of_slot.shape
        plan = _plan(
            board.fused, board.ep_size, top_k, moves.pushes, bound, self.padding.shape[1], moves.push, moves.spread,
            moves.padded, pushes, spreads, begins,
        )  # fmt: skip
        launch(
            move_rows_kernel, (plan.programs,), board.device, *board.tensors,
            *moves.tensors, self.row_of_slot, self.padding, out, self.num_sent, self.sent,
            board.rank, self.opening.digest, varying(self.opening.number), varying(moves.x.shape[0]), varying(bound),
            varying(out.shape[0]), *moves.numbers, plan.pushers,
            chosen=plan.chosen,
        )  # fmt: skip


class _Plan(NamedTuple):
    programs: int
    pushers: int
    chosen: Chosen


@lru_cache(1024)
def _plan(
    fused: bool,
    ep_size: int,
    top_k: int,
    num_pushed: int,
    bound: int,
    num_local: int,
    push: Tile,
    spread: Tile,
    padded: bool,
    pushes: bool,
    spreads: bool,
    begins: bool,
) -> _Plan:
    """How many programs share a launch, and its constants; no time to find out anew in every call."""
    chosen = Chosen(
        (*SIGNALLING, come, have_come, *ROUND_ENDS, *PUSHING, *SPREADING),
        PUSHES=pushes, SPREADS=spreads, BEGINS=begins, FUSED=fused, NUM_LOCAL=num_local, TOP_K=top_k,
        NUM_CHUNKS=NUM_CHUNKS, POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK, num_warps=spread.warps,
        **moving_constants(push, spread, padded, num_pushed, bound * ep_size), **group_constants(ep_size),
    )  # fmt: skip
    pushers = push.grid_of(num_pushed) if pushes else 0
    spreaders = spread.grid_of(bound * ep_size) if spreads else 0
    return _Plan(pushers + spreaders, pushers, chosen)
