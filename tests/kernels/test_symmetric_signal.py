"""Signals between ranks: who is told what, and how a wait ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

from triton.runtime.interpreter import InterpreterBuilder

from crossdock.kernels import signal
from crossdock.kernels.launch import launch
from crossdock.kernels.signal import (
    ABORT,
    ABORTED,
    ARRIVED,
    BAD_IDS,
    CHUNKS,
    DEPARTED,
    DESK_BEGUN,
    DESK_CODE,
    DESK_ENDED,
    DIFFERS,
    GIVEN_UP,
    LAST_TARGET,
    LEFT,
    NUM_CHUNKS,
    NUM_STATE,
    NUM_WORDS,
    READ,
    ROUND,
    ROUTED,
    SIGNALLING,
    STAGING,
    TOKENS,
    WAITING,
    Board,
    digest_of,
    varying,
)
from crossdock.kernels.waits import GivenUp, launch_tell, launch_wait, wait_kernel, wait_on_cpu
from tests.kernels.symmetric_ranks import CALL, boards, word_of

DIGEST = CALL.digest


# -- numbers that travel ----------------------------------------------------------------------------------------------


@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_a_digest_is_an_odd_number_of_31_bits_above_1(words):
    digest = digest_of(words)
    assert digest % 2 == 1 and 1 < digest < 2**31
    assert digest == digest_of(tuple(words))
    # Neither an odd number nor one of 16's multiples: a kernel compiled for one digest takes every other.
    assert digest % 16 and digest.bit_length() == 31


def test_calls_that_differ_in_one_place_have_other_digests():
    words = list(range(15))
    digests = {digest_of(words)}
    for place in range(len(words)):
        for bit in range(63):
            changed = words.copy()
            changed[place] ^= 1 << bit
            digests.add(digest_of(changed))
    assert len(digests) == 1 + len(words) * 63
    assert len({digest_of([number, *words]) for number in range(20_000)}) == 20_000


def test_a_varying_number_is_never_one_that_triton_looks_at():
    for number in (0, 1, 7, 16, 4096, 2**30 - 2):
        assert varying(number) % 2 == 1 and 1 < varying(number) < 2**31
        assert (varying(number) - 3) // 2 == number


def test_words_and_places_do_not_overlap():
    words = [*range(TOKENS, TOKENS + 2), *range(ROUTED, ROUTED + 2), READ, DEPARTED]
    words += [*range(CHUNKS, CHUNKS + 2 * NUM_CHUNKS), signal.ARRIVED_SMALL, *range(signal.BROUGHT, signal.BROUGHT + 2)]
    assert sorted(words) == list(range(NUM_WORDS))
    places = [ROUND, STAGING, GIVEN_UP, signal.BEGUN, signal.ENDED, BAD_IDS]
    places += [signal.NUM_SENT, LAST_TARGET, ABORT, signal.INBOX]
    places += range(signal.ARRIVALS, signal.ARRIVALS + NUM_CHUNKS + 8)
    assert len(set(places)) == len(places) and max(places) == NUM_STATE - 1


# -- telling ----------------------------------------------------------------------------------------------------------


def _told(board: Board) -> dict[tuple[int, int], int]:
    """Words of this rank's signals that are not 0, by kind and writer."""
    return {(kind, rank): int(board.signals[kind, rank]) for kind, rank in board.signals.nonzero().tolist()}


@pytest.mark.parametrize("ep_size", [1, 2, 3, 5])
def test_everybody_hears_of_routing(ep_size):
    ranks = boards(ep_size)
    sender = ranks[-1]
    for number, (num_tokens, num_bad) in enumerate([(17, 0), (0, 3), (4096, 2**20)], start=1):
        before = [_told(board) for board in ranks]
        sender.state[BAD_IDS] = num_bad
        launch_tell(sender, ROUTED, DIGEST, num_tokens=num_tokens)
        news = {
            (TOKENS + number % 2, sender.rank): num_tokens + (num_bad << 32),
            (ROUTED + number % 2, sender.rank): word_of(number),
        }
        for board, earlier in zip(ranks, before, strict=True):
            assert _told(board) == {key: word for key, word in (earlier | news).items() if word}
        assert sender.state.tolist()[: STAGING + 1] == [number, number]
        assert not sender.state[STAGING + 1 :].any()  # the bad ids have been told


def test_everybody_hears_of_chunks_by_the_round_s_parity():
    ranks = boards(3)
    for number in (1, 2, 3):
        launch_tell(ranks[1], CHUNKS, DIGEST, begins=True)
        assert ranks[1].state.tolist()[: STAGING + 1] == [number, number]
        first = CHUNKS + number % 2 * NUM_CHUNKS
        for board in ranks:
            assert board.signals[first : first + NUM_CHUNKS, 1].tolist() == [word_of(number)] * NUM_CHUNKS
            others = CHUNKS + (number - 1) % 2 * NUM_CHUNKS
            assert board.signals[others : others + NUM_CHUNKS, 1].tolist() == [word_of(number - 1)] * NUM_CHUNKS
            # Who dispatches instead waits for another word, and finds the digest there.
            assert int(board.signals[ROUTED + number % 2, 1]) == word_of(number)
            assert not board.signals[:, (0, 2)].any()
            assert not board.signals[TOKENS : TOKENS + 2].any() and not board.signals[READ : DEPARTED + 1].any()


def test_whatever_else_is_told_of_a_round_the_last_chunk_is_told_last(monkeypatch):
    told: list[int] = []
    original = InterpreterBuilder.create_atomic_rmw

    def noting(builder: Any, operation: Any, ptr: Any, value: Any, mask: Any, *order: Any) -> Any:
        told.extend(ptr.data[mask.data.astype(bool)].tolist())
        return original(builder, operation, ptr, value, mask, *order)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", noting)
    ranks = boards(3)
    launch_tell(ranks[2], CHUNKS, DIGEST, begins=True)
    words = [ROUTED + 1, *range(CHUNKS + NUM_CHUNKS, CHUNKS + 2 * NUM_CHUNKS)]
    assert told == [board.signals[word, 2].data_ptr() for word in words for board in ranks]


def test_chunks_of_a_round_that_routing_has_begun_and_its_end():
    ranks = boards(2, last_round=6)
    launch_tell(ranks[0], ROUTED, DIGEST, num_tokens=1)
    launch_tell(ranks[0], CHUNKS, DIGEST)
    launch_tell(ranks[0], READ, DIGEST)
    assert ranks[0].state.tolist()[: STAGING + 1] == [7, 7]
    for board in ranks:
        odd = slice(CHUNKS + NUM_CHUNKS, CHUNKS + 2 * NUM_CHUNKS)
        assert board.signals[odd, 0].tolist() == [word_of(7)] * NUM_CHUNKS
        assert board.signals[READ].tolist() == [7 << 31, word_of(6)]  # of no call: whoever waits for it knows none


@pytest.mark.parametrize("word", [ROUTED, CHUNKS, READ])
def test_nobody_hears_of_a_rank_that_has_given_up(word):
    ranks = boards(2)
    ranks[0].state[GIVEN_UP] = ABORTED
    launch_tell(ranks[0], word, DIGEST, begins=word == CHUNKS)
    for board in ranks:
        assert not board.signals[READ:].any() and not board.signals[ROUTED : ROUTED + 2].any()


# -- waiting ----------------------------------------------------------------------------------------------------------


def look(board: Board, word: int, *, digest: int = DIGEST, ends: bool = False) -> int:
    """How a wait stands after one poll; what the host sees agrees."""
    before, given_up = board.desk.tolist(), int(board.state[GIVEN_UP])
    launch(
        wait_kernel, (1,), board.device, *board.tensors, digest, 1, 1,
        WORD=word, COUNTS=False, ENDS=ends, NUM_CHUNKS=NUM_CHUNKS,
        helpers=SIGNALLING, **board.constants,
    )  # fmt: skip
    code, ended = int(board.state[GIVEN_UP]), int(board.desk[DESK_ENDED]) - before[DESK_ENDED]
    if not given_up:
        assert int(board.desk[DESK_CODE]) == code
    return (code or ARRIVED) if ended else WAITING


def _waiting_board(published: list[int], departed: list[int], aborted: int) -> Board:
    board = boards(len(published), last_round=4)[0]
    board.signals[ROUTED] = torch.tensor(published)
    board.signals[DEPARTED] = torch.tensor(departed)
    board.state[ABORT] = aborted
    return board


_FOUR, _OTHER, _THREE = word_of(4, 9), word_of(4, 8), word_of(3, 9)


@pytest.mark.parametrize(
    ("published", "departed", "aborted", "code"),
    [
        ([_FOUR, _FOUR], [0, 0], 0, ARRIVED),
        ([_FOUR, _THREE], [0, 0], 0, WAITING),
        ([_FOUR, _THREE], [0, 1], 0, LEFT),
        ([_THREE, _FOUR], [0, 1], 0, WAITING),  # the one that has left had told
        ([_FOUR, _OTHER], [0, 0], 0, DIFFERS),
        ([_OTHER, _OTHER], [0, 0], 0, DIFFERS),
        ([_FOUR, _THREE], [0, 0], 1, ABORTED),
        ([_FOUR, _FOUR], [0, 1], 1, ARRIVED),  # what is there counts, whatever happened behind it
        ([_OTHER, _THREE], [0, 0], 0, WAITING),  # whether calls differ is asked once all are there
        ([word_of(5, 9), _FOUR], [0, 0], 0, ARRIVED),
        ([_FOUR], [0], 0, ARRIVED),
        ([_FOUR, _FOUR, _FOUR, _FOUR, _THREE], [0, 0, 0, 0, 1], 0, LEFT),
        ([_FOUR, _FOUR, _FOUR, _FOUR, _OTHER], [1, 1, 1, 1, 1], 0, DIFFERS),
    ],
)
def test_how_a_wait_ends(published, departed, aborted, code):
    board = _waiting_board(published, departed, aborted)
    assert look(board, ROUTED, digest=9) == code
    assert int(board.state[LAST_TARGET]) == (4 if code not in (ARRIVED, WAITING) else 0)


def test_what_was_given_up_before_ends_every_wait():
    board = _waiting_board([_FOUR, _FOUR], [0, 0], 0)
    for before in (ABORTED, LEFT, DIFFERS):
        board.state[GIVEN_UP], board.state[LAST_TARGET] = before, 2
        for word in (ROUTED, CHUNKS, READ):
            assert look(board, word, digest=9) == before
        assert int(board.state[LAST_TARGET]) == 2 and int(board.desk[DESK_CODE]) == 0  # told when it happened


def test_reading_has_no_call_and_waits_for_the_last_round_that_pushed_anything():
    board = boards(3, last_round=3)[1]
    board.signals[READ] = torch.tensor([word_of(3, 0), word_of(3, 0), word_of(2, 0)])
    for last, code in ((0, ARRIVED), (2, ARRIVED), (3, WAITING)):  # in 0 nothing was ever pushed
        board.state[STAGING] = last
        assert look(board, READ, digest=77) == code
    board.signals[READ, 2] = word_of(3, 0)
    assert look(board, READ, digest=77) == ARRIVED


def test_words_of_the_other_parity_do_not_count():
    board = boards(2)[0]
    for number in (1, 2):
        board.state[ROUND] = number
        for word, last in ((ROUTED, ROUTED + number % 2), (CHUNKS, CHUNKS + number % 2 * NUM_CHUNKS + NUM_CHUNKS - 1)):
            board.signals[:] = word_of(number)
            board.signals[DEPARTED] = 0
            assert look(board, word) == ARRIVED
            board.signals[last] = 0
            assert look(board, word) == WAITING


@pytest.mark.parametrize(
    ("first", "last", "departed", "code"),
    [
        (word_of(1), word_of(1), 0, ARRIVED),
        (word_of(1), word_of(1), 1, ARRIVED),
        (0, 0, 0, WAITING),
        (word_of(1), 0, 0, WAITING),  # the others are being told
        (word_of(1), 0, 1, LEFT),
        (word_of(1, 8), 0, 0, DIFFERS),  # a small batch of another call: the last chunk is never told
        (word_of(1, 8), word_of(1, 8), 0, DIFFERS),
    ],
)
def test_the_last_chunk_stands_for_all_where_it_is_told_last(first, last, departed, code):
    board = boards(2)[0]
    board.state[ROUND], board.signals[DEPARTED, 1] = 1, departed
    chunks = board.signals[CHUNKS + NUM_CHUNKS : CHUNKS + 2 * NUM_CHUNKS]
    chunks[0], chunks[-1] = torch.tensor([word_of(1), first]), torch.tensor([word_of(1), last])
    assert look(board, CHUNKS, ends=True) == code
    assert int(board.state[LAST_TARGET]) == (1 if code not in (ARRIVED, WAITING) else 0)


def test_a_wait_is_launched_again_once_something_has_changed():
    board, asked = boards(2)[0], []

    def ask(max_polls: int) -> None:
        asked.append(board.signals[READ, 1].item())
        board.desk[DESK_ENDED] = len(asked) == 3

    def later() -> None:
        for number in (1, 2):
            time.sleep(0.05)
            board.signals[READ, 1] = number

    thread = threading.Thread(target=later)
    thread.start()
    wait_on_cpu(board, ask)
    thread.join()
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("end", [ARRIVED, ABORTED, LEFT, DIFFERS])
def test_a_wait_lasts_until_it_ends(end):
    board = boards(2)[0]
    board.state[ROUND] = 1
    board.signals[ROUTED + 1, 0] = word_of(1)

    def later() -> None:
        time.sleep(0.1)
        if end in (ARRIVED, DIFFERS):
            board.signals[ROUTED + 1, 1] = word_of(1) ^ (2 if end == DIFFERS else 0)
        elif end == LEFT:
            board.signals[DEPARTED, 1] = 1
        else:
            board.state[ABORT] = 1

    thread = threading.Thread(target=later)
    thread.start()
    begun = time.monotonic()
    if end == ARRIVED:
        launch_wait(board, ROUTED, DIGEST)
    else:
        with pytest.raises(GivenUp) as given_up:
            launch_wait(board, ROUTED, DIGEST)
        assert given_up.value.code == end
    assert 0.05 < time.monotonic() - begun < 5.0
    thread.join()
    assert board.desk.tolist()[DESK_BEGUN : DESK_ENDED + 1] == [1, 1]
    assert int(board.desk[DESK_CODE]) == (0 if end == ARRIVED else end)
