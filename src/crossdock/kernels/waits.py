"""Waiting and telling as launches of their own: in the interpreter, and on a GPU between two kernels of one round.

On a GPU most kernels wait and tell by themselves. In the interpreter programs run one after the other, so a wait is a
launch of one program that looks `max_polls` times, and the host asks again and again. Two ranks, both published round
4 of a call with digest 9, the wait is for round 4: words `[4 * 2^31 + 9, 4 * 2^31 + 9]` end it with `ARRIVED`;
`[4 * 2^31 + 9, 3 * 2^31 + 9]` leave it waiting; with `DEPARTED` of rank 1 it ends with `LEFT`;
`[4 * 2^31 + 9, 4 * 2^31 + 8]` end it with `DIFFERS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import triton.language as tl

from .launch import launch
from .signal import (
    CHUNKS,
    DESK_BEGUN,
    DESK_CODE,
    DESK_ENDED,
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    SIGNALLING,
    Board,
    count_wait,
    may_lay_out,
    tell,
    tell_routed,
    varying,
    wait_for,
)

_CPU_POLLS = 2
_CPU_SLEEPS_S = (0.0, 0.0005, 0.001, 0.002, 0.005)  # between looks: soon, then seldom, since ranks share the cores


def tell_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    rank,
    digest,
    tokens,  # `varying`
    WORD: tl.constexpr,  # ROUTED, READ or CHUNKS
    BEGINS: tl.constexpr,  # for CHUNKS: whether they begin a round
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Tell every rank what a launch before this one has written or read."""
    number = tl.load(state_ptr)
    if (WORD == 2) | BEGINS:
        number += 1
        tl.store(state_ptr, number)
    if WORD == 2:
        tl.store(state_ptr + 1, number)
        tell_routed(table_ptr, state_ptr, number, rank, digest, (tokens - 3) // 2, EP_SIZE, EP_BLOCK)
    elif WORD == 4:
        tell(table_ptr, state_ptr, 4, rank, number * 2147483648, EP_SIZE, EP_BLOCK)
    else:
        tl.store(state_ptr + 1, number)
        if BEGINS:
            tell(table_ptr, state_ptr, 2 + number % 2, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)
        # As `tell` does it, for all chunks at once; the interpreter takes lanes in their order, the last chunk last.
        lane = tl.arange(0, NUM_CHUNKS * EP_BLOCK)
        peer, word = lane % EP_BLOCK, 6 + number % 2 * NUM_CHUNKS + lane // EP_BLOCK
        words = tl.load(table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.int64))
        told = tl.full((NUM_CHUNKS * EP_BLOCK,), 0, tl.int64) + (number * 2147483648 + digest)
        heard = (peer < EP_SIZE) & may_lay_out(state_ptr)
        tl.atomic_xchg(words + word * EP_SIZE + rank, told, mask=heard, sem="release", scope="sys")


def wait_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    digest,
    max_polls,
    polls_per_look,
    WORD: tl.constexpr,  # ROUTED, READ or CHUNKS
    COUNTS: tl.constexpr,  # whether its beginning is counted here
    ENDS: tl.constexpr,  # for CHUNKS: whether the last was told behind all others, and stands for them
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait for one word of every rank; counted."""
    number = tl.load(state_ptr)
    if COUNTS:
        count_wait(state_ptr, desk_ptr, 5)
    if WORD == 4:
        target = tl.load(state_ptr + 1)
        code = wait_for(
            signals_ptr, state_ptr, desk_ptr, 4, target, digest, max_polls, polls_per_look, False, EP_SIZE, EP_BLOCK
        )
    else:
        code = tl.full((), 1, tl.int32)
        for nth in range(NUM_CHUNKS - 1 if ENDS else 0, 1 if WORD == 2 else NUM_CHUNKS):
            if code == 1:
                word = (2 + number % 2) if WORD == 2 else (6 + number % 2 * NUM_CHUNKS + nth)
                code = wait_for(
                    signals_ptr, state_ptr, desk_ptr, word, number, digest, max_polls, polls_per_look, True,
                    EP_SIZE, EP_BLOCK,
                )  # fmt: skip
        if ENDS:
            if code == 0:  # a peer with a small batch tells the first chunk, and no other (see `small.py`)
                first = wait_for(
                    signals_ptr, state_ptr, desk_ptr, 6 + number % 2 * NUM_CHUNKS, number, digest, max_polls,
                    polls_per_look, True, EP_SIZE, EP_BLOCK,
                )  # fmt: skip
                code = tl.where(first > 1, first, 0)
    if code > 0:
        count_wait(state_ptr, desk_ptr, 6)


class GivenUp(Exception):
    """A wait ended without what it waited for, with this code; on a CPU, where the host waits."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def launch_tell(board: Board, word: int, digest: int, *, begins: bool = False, num_tokens: int = 0) -> None:
    """Tell all ranks: routing is there (`ROUTED`), rows or scalars are (`CHUNKS`), or the round is read (`READ`)."""
    launch(
        tell_kernel, (1,), board.device, *board.tensors, board.rank, digest, varying(num_tokens),
        WORD=word, BEGINS=begins, NUM_CHUNKS=NUM_CHUNKS,
        num_warps=1, helpers=SIGNALLING, **board.constants,
    )  # fmt: skip


def launch_wait(board: Board, word: int, digest: int) -> None:
    """Wait until all ranks have told `ROUTED` or `CHUNKS` of this round, or `READ` of the last that pushed anything.

    On a GPU in stream order; on a CPU it returns when the wait has ended.

    Raises:
        GivenUp: on a CPU, it ended without that.
    """
    if board.fused:
        _launch_wait(board, word, digest, ENDLESS, POLLS_PER_LOOK)
        return
    wait_on_cpu(board, lambda _: _launch_wait(board, word, digest, 1, 1))


def wait_on_cpu(board: Board, ask: Callable[[int], None]) -> None:
    """Let `ask` launch a wait of so many polls, whenever a word has changed, until it counts its end.

    Raises:
        GivenUp: it ended without what it waited for.
    """
    board.desk[DESK_BEGUN] += 1
    before, looks, seen = int(board.desk[DESK_ENDED]), 0, b""
    while int(board.desk[DESK_ENDED]) == before:
        # A launch costs a hundred times what this does. It looks at the words behind it, and misses none that comes.
        words = board.signals.numpy().tobytes() + board.state.numpy().tobytes()
        if words == seen:
            time.sleep(_CPU_SLEEPS_S[min(looks // 4, len(_CPU_SLEEPS_S) - 1)])
            looks += 1
        else:
            ask(_CPU_POLLS)
            seen = words
    if int(board.desk[DESK_CODE]):
        raise GivenUp(int(board.desk[DESK_CODE]))


def _launch_wait(board: Board, word: int, digest: int, max_polls: int, polls_per_look: int) -> None:
    launch(
        wait_kernel, (1,), board.device, *board.tensors, digest, max_polls, polls_per_look,
        WORD=word, COUNTS=board.fused,
        ENDS=word == CHUNKS and not board.fused,  # `tell_kernel` has told them in their order
        NUM_CHUNKS=NUM_CHUNKS,
        num_warps=1, helpers=SIGNALLING, **board.constants,
    )  # fmt: skip
