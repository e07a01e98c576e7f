"""Move rows out along a known layout: some programs push this rank's rows, the others spread those that have come.

What both do stands in `push.py` and `spread.py`. On a GPU a dispatch leaves it to the kernel that arranges
(`arrange.py`), so this one serves layouts of earlier dispatches: in backwards and recomputation. Programs that push
come first and wait for nothing but a free buffer, so those that wait for peers may take what is left of a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .blocks import Tile
from .launch import launch
from .publish import Opening
from .push import PUSHING, Staging, begin_moving, push_chunks
from .signal import (
    CHUNKS,
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    READ,
    SIGNALLING,
    STAGING,
    Board,
    come,
    have_come,
    launch_tell,
    launch_wait,
    varying,
)
from .spread import SPREADING, end_round, fill_padding, forget_claims, spread_chunks


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

    def constants(self, bound: int) -> dict[str, int]:
        """Constexprs of the programs that push, and of those that spread tiles of so many tokens a rank."""
        return {
            "PADDED": self.padded,
            "PUSH_ROWS": self.push.rows,
            "PUSH_PARTS": self.push.parts_of(self.pushes),
            "PARTS": self.spread.parts_of(bound * self.staging.table.shape[0]),
            **self.spread.constants,
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
    number = tl.load(state_ptr)
    num_tokens, bound = (tokens - 3) // 2, (places - 3) // 2
    if BEGINS:
        number += 1
    if PUSHES:
        if first < num_pushers:
            if BEGINS:
                begin_moving(
                    signals_ptr, table_ptr, state_ptr, desk_ptr, num_sent_ptr, sent_ptr, number, digest, rank, call,
                    first, FUSED, EP_SIZE, EP_BLOCK, POLLS, POLLS_PER_LOOK,
                )  # fmt: skip
            push_chunks(
                x_ptr, home_ptr, staging_table_ptr, table_ptr, state_ptr, number, digest, rank, num_tokens, max_tokens,
                first, num_pushers, hidden_dim, x_stride, chunk_len, FUSED, TOP_K, PUSH_PARTS, NUM_CHUNKS,
                EP_SIZE, EP_BLOCK, PUSH_ROWS, BLOCK_COLS,
            )  # fmt: skip
    if SPREADS:
        spreads = first >= num_pushers
        if spreads:
            come(state_ptr, 1)
            if PADDED:
                step = tl.num_programs(0) - num_pushers
                fill_padding(padding_ptr, out_ptr, first - num_pushers, step, hidden_dim, NUM_LOCAL, BLOCK_COLS)
        else:
            spreads = have_come(state_ptr, 1, tl.num_programs(0) - num_pushers)
        if spreads:
            spread_chunks(
                signals_ptr, state_ptr, desk_ptr, x_ptr, staging_ptr, row_of_slot_ptr, out_ptr, number, digest, rank,
                num_tokens, bound, max_tokens, hidden_dim, x_stride, chunk_len, FUSED, TOP_K, PARTS, NUM_CHUNKS,
                EP_SIZE, EP_BLOCK, BLOCK_ROWS, BLOCK_COLS, POLLS, POLLS_PER_LOOK,
            )  # fmt: skip
        if FUSED:
            end_round(
                signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, out_ptr, number, digest, rank, bound,
                (room - 3) // 2, hidden_dim, tl.num_programs(0), False, NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK_COLS,
                POLLS, POLLS_PER_LOOK,
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
    launch_wait(board, READ, opening.digest, buffer=STAGING)
    run(pushes=True, spreads=False, begins=True)
    launch_tell(board, CHUNKS, opening.digest, buffer=STAGING, begins=True)
    launch_wait(board, CHUNKS, opening.digest)
    run(pushes=False, spreads=True, begins=False)
    launch_tell(board, READ, opening.digest)


def launch_push_rows(board: Board, opening: Opening, moves: Moves, none: torch.Tensor) -> None:
    """In the interpreter: push the rows of a dispatch whose routing is published, and tell; `none [1]` is not used."""
    row_of_slot, padding = moves.home_of_slot.view(1, *moves.home_of_slot.shape), none.view(1, 1)
    run = _Run(board, opening, moves, row_of_slot, padding, moves.x, none, none)
    run(pushes=True, spreads=False, begins=False)
    launch_tell(board, CHUNKS, opening.digest, buffer=STAGING)


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
        ep_size, bound, top_k = self.row_of_slot.shape
        num_pushers = moves.push.grid_of(moves.pushes) if pushes else 0
        num_spreaders = moves.spread.grid_of(bound * ep_size) if spreads else 0
        launch(
            move_rows_kernel, (num_pushers + num_spreaders,), board.device, *board.tensors,
            *moves.tensors, self.row_of_slot, self.padding, out, self.num_sent, self.sent,
            board.rank, self.opening.digest, varying(self.opening.number), varying(moves.x.shape[0]), varying(bound),
            varying(out.shape[0]), *moves.numbers, num_pushers,
            PUSHES=pushes, SPREADS=spreads, BEGINS=begins, FUSED=board.fused,
            NUM_LOCAL=self.padding.shape[1], TOP_K=top_k, NUM_CHUNKS=NUM_CHUNKS,
            POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK,
            num_warps=moves.spread.warps, helpers=(*SIGNALLING, come, have_come, *PUSHING, *SPREADING),
            **moves.constants(bound), **board.constants,
        )  # fmt: skip
