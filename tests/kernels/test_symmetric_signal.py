"""Signals between ranks: who is told what, how a wait ends, and headers beside the data."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

from crossdock.kernels.header import launch_read_headers
from crossdock.kernels.signal import (
    ABORTED,
    ARRIVED,
    DEPARTED,
    LEFT,
    NUM_KINDS,
    PUBLISHED,
    READ,
    ROUND,
    WAITING,
    Board,
    launch_send,
    launch_wait,
    wait_kernel,
)
from tests.kernels.symmetric_ranks import table_of

BUFFER = 2


def boards(ep_size: int, *, last_round: int = 3) -> list[Board]:
    """Boards of ranks that have all published and read `last_round`."""
    signals = [torch.full((NUM_KINDS, ep_size), last_round) for _ in range(ep_size)]
    for words in signals:
        words[DEPARTED] = 0
    table = table_of(signals)
    return [
        Board(
            signals=signals[rank],
            table=table,
            state=torch.tensor([last_round, 0, last_round, 0]),
            abort=torch.zeros(1, dtype=torch.int64),
            status=torch.zeros(2, dtype=torch.int64),
            given_up=torch.zeros(1, dtype=torch.int64),
            rank=rank,
        )
        for rank in range(ep_size)
    ]


@pytest.mark.parametrize("ep_size", [1, 2, 3, 5])
def test_sending(ep_size):
    ranks = boards(ep_size)
    for board in ranks[:-1]:
        launch_send(board, PUBLISHED, BUFFER)
        assert board.state.tolist() == [4, 0, 4, 0]
    for board in ranks:
        assert board.signals[PUBLISHED].tolist() == [4] * (ep_size - 1) + [3]
    launch_send(ranks[0], READ)
    launch_send(ranks[0], PUBLISHED, 1)
    assert ranks[0].state.tolist()[1] == ranks[0].state.tolist()[0]
    for board in ranks:
        assert int(board.signals[READ, 0]) == (4 if ep_size > 1 else 3)
        assert (board.signals[DEPARTED] == 0).all()


def look(board: Board, kind: int, word: int = ROUND) -> int:
    """How a wait stands after one poll."""
    from crossdock.kernels.launch import launch

    before = board.status.tolist()
    launch(
        wait_kernel, (1,), board.device, board.signals, board.state, board.abort, board.status, board.given_up, 1,
        KIND=kind, WORD=word, EP_SIZE=board.ep_size, EP_BLOCK=4, POLLS_PER_LOOK=1,
    )  # fmt: skip
    ended = int(board.status[0]) - before[0]
    code = int(board.status[1])
    assert int(board.given_up) == code
    return (code or ARRIVED) if ended else WAITING


def test_worked_example_of_waiting():
    for published, departed, aborted, code in (
        ([4, 4], [0, 0], 0, ARRIVED),
        ([4, 3], [0, 0], 0, WAITING),
        ([4, 3], [0, 1], 0, LEFT),
        ([4, 3], [0, 0], 1, ABORTED),
        ([4, 4], [0, 1], 1, ARRIVED),  # what is there counts, whatever happened behind it
        ([9, 4], [0, 0], 0, ARRIVED),
    ):
        board = boards(2, last_round=4)[0]
        board.signals[PUBLISHED] = torch.tensor(published)
        board.signals[DEPARTED] = torch.tensor(departed)
        board.abort[0] = aborted
        assert look(board, PUBLISHED) == code


def test_each_kind_waits_for_its_own_word():
    board = boards(3)[1]
    board.signals[READ, 2] = 2
    assert look(board, PUBLISHED) == ARRIVED
    assert look(board, READ, BUFFER) == WAITING
    assert look(board, READ, 1) == ARRIVED  # nothing was ever written there


@pytest.mark.parametrize("end", ["arrives", "is aborted"])
def test_a_wait_ends(end):
    board = boards(2)[0]
    board.state[0] = 4
    board.signals[PUBLISHED, 0] = 4

    def later() -> None:
        time.sleep(0.1)
        if end == "arrives":
            board.signals[PUBLISHED, 1] = 4
        else:
            board.abort[0] = 1

    thread = threading.Thread(target=later)
    thread.start()
    begun = time.monotonic()
    launch_wait(board, PUBLISHED, ROUND)
    assert time.monotonic() - begun < 5.0
    thread.join()
    assert board.status.tolist() == ([1, 0] if end == "arrives" else [1, ABORTED])


def test_headers_are_read_by_parity():
    headers = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])]
    heard = torch.zeros(2, 2, dtype=torch.int64)
    for number, expected in ((5, [[3, 4], [7, 8]]), (6, [[1, 2], [5, 6]])):
        launch_read_headers(table_of(headers), torch.tensor([number, 0, 0, 0]), heard)
        assert heard.tolist() == expected
