"""Rounds begin and end, and ranks arrive in those of small batches, in the numbers of the modules' own examples."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

import triton.language as tl

from crossdock.kernels.launch import launch
from crossdock.kernels.round import ROUND_ENDS, begin_round, end_round
from crossdock.kernels.signal import (
    ABORT,
    ABORTED,
    ARRIVED,
    ARRIVED_SMALL,
    CHUNKS,
    DESK_CALL,
    GIVEN_UP,
    INBOX,
    NUM_CHUNKS,
    READ,
    ROUND,
    ROUND_SHIFT,
    ROUTED,
    SIGNALLING,
    STAGING,
    WAITING,
    Board,
    count_wait,
    varying,
    wide,
)
from crossdock.kernels.small import SMALL, arrive, wait_for_all, wait_small_kernel
from tests.kernels.symmetric_ranks import CALL, boards, word_of


def begin_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr, rank, digest, call, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr
):
    number = tl.load(state_ptr) + 1
    begin_round(
        signals_ptr, table_ptr, state_ptr, desk_ptr, number, digest, rank, call, 0, True, EP_SIZE, EP_BLOCK, 1, 1
    )


def end_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, rank, digest, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr
):
    number = tl.load(state_ptr) + 1
    end_round(
        signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, 2, (out_ptr, out_ptr), 2, number, digest, rank, True, 2,
        False, 8, EP_SIZE, EP_BLOCK, 2, 1, 1,
    )  # fmt: skip


def arrive_kernel(table_ptr, state_ptr, first, programs, rank, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr):
    peer = tl.arange(0, EP_BLOCK)
    words = tl.load(table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.int64))
    arrive(words, state_ptr, first, programs, rank, EP_SIZE, EP_BLOCK)


def two_ranks() -> list[Board]:
    """Ranks of which the last round that pushed anything was the 4th."""
    ranks = boards(2, last_round=4)
    for board in ranks:
        board.state[STAGING] = 4
    return ranks


def begin(board: Board) -> None:
    launch(
        begin_kernel, (1,), board.device, *board.tensors, board.rank, CALL.digest, varying(CALL.number),
        helpers=(*SIGNALLING, *ROUND_ENDS), **board.constants,
    )  # fmt: skip


def end(board: Board, out: torch.Tensor) -> None:
    """As one of two programs."""
    launch(
        end_kernel, (1,), board.device, *board.tensors, out, board.rank, CALL.digest,
        helpers=(*SIGNALLING, *ROUND_ENDS), **board.constants,
    )  # fmt: skip


def test_worked_example_of_beginning_a_round():
    ranks = two_ranks()
    begin(ranks[0])
    assert [int(board.signals[ROUTED + 1, 0]) for board in ranks] == [word_of(5)] * 2
    assert [int(board.signals[ROUTED + 1, 1]) for board in ranks] == [word_of(4)] * 2
    assert int(ranks[0].desk[DESK_CALL]) == CALL.number
    assert int(ranks[0].state[ROUND]) == 4  # its last program to end counts it


def test_a_round_that_not_all_have_made_room_for_is_told_to_nobody():
    ranks = two_ranks()
    ranks[0].signals[READ, 1], ranks[0].state[ABORT] = word_of(3, 0), 1
    begin(ranks[0])
    assert int(ranks[0].state[GIVEN_UP]) == ABORTED
    assert [int(board.signals[ROUTED + 1, 0]) for board in ranks] == [word_of(4)] * 2


@pytest.mark.parametrize("given_up", [0, ABORTED])
def test_worked_example_of_ending_a_round(given_up: int):
    ranks, out = two_ranks(), torch.tensor([1.0, 2.0])
    ranks[0].state[GIVEN_UP] = given_up
    end(ranks[0], out)
    assert int(ranks[0].state[ROUND]) == 4 and int(ranks[1].signals[READ, 0]) == word_of(4)  # not the last one
    end(ranks[0], out)
    assert ranks[0].state[[ROUND, STAGING]].tolist() == [5, 5]
    told = 4 if given_up else 5  # who has given up tells nobody any more
    assert [int(board.signals[READ, 0]) >> ROUND_SHIFT for board in ranks] == [told] * 2
    assert out.isnan().tolist() == [bool(given_up)] * 2


def arrives(ranks: list[Board], rank: int, program: int) -> None:
    board = ranks[rank]
    launch(
        arrive_kernel, (1,), board.device, board.table, board.state, program, 3, rank,
        helpers=SMALL, **board.constants,
    )  # fmt: skip


def stands(board: Board) -> int:
    """How the wait for all stands after one look."""
    before = int(board.state[6])
    launch(
        wait_small_kernel, (1,), board.device, board.signals, board.state, board.desk, CALL.digest, 1, 1,
        NUM_CHUNKS=NUM_CHUNKS, helpers=(wide, count_wait, wait_for_all), **board.constants,
    )  # fmt: skip
    return (int(board.state[GIVEN_UP]) or ARRIVED) if int(board.state[6]) > before else WAITING


def test_worked_example_of_arriving():
    """Three programs a rank, in round 5."""
    ranks = boards(2, last_round=5)
    for board in ranks:
        board.state[INBOX], board.signals[ARRIVED_SMALL] = 5, 4 << ROUND_SHIFT
        assert board.signals[CHUNKS + NUM_CHUNKS].tolist() == [word_of(5)] * 2  # told before the first arrives
    added = {0: 2**31 - 2, 1: 1, 2: 1}
    for rank in (0, 1):
        for program, part in added.items():
            before = int(ranks[1].signals[ARRIVED_SMALL, rank])
            assert stands(ranks[0]) == WAITING
            arrives(ranks, rank, program)
            assert [int(board.signals[ARRIVED_SMALL, rank]) - before for board in ranks] == [part] * 2
    assert ranks[0].signals[ARRIVED_SMALL].tolist() == [5 * 2**31] * 2
    assert stands(ranks[0]) == ARRIVED
