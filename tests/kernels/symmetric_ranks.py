"""Several ranks' shared memory inside one test: ordinary tensors, tables of their addresses, and a board a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from crossdock.kernels.publish import Opening
from crossdock.kernels.signal import (
    ABORT,
    DEPARTED,
    NUM_DESK,
    NUM_STATE,
    NUM_WORDS,
    ROUND,
    ROUND_SHIFT,
    Board,
    digest_of,
)
from crossdock.kernels.waits import GivenUp

Result = TypeVar("Result")

CALL = Opening(digest_of([4, 7]), 4)


def table_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses `[ep_size]` int64."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def boards(ep_size: int, *, last_round: int = 0) -> list[Board]:
    """Boards of ranks that have told and read everything up to `last_round`, in calls with the digest of `CALL`."""
    signals = [torch.full((NUM_WORDS, ep_size), word_of(last_round)) for _ in range(ep_size)]
    table = table_of(signals)
    ranks = []
    for rank in range(ep_size):
        signals[rank][DEPARTED] = 0
        state = torch.zeros(NUM_STATE, dtype=torch.int64)
        state[ROUND] = last_round
        ranks.append(Board(signals[rank], table, state, torch.zeros(NUM_DESK, dtype=torch.int64), rank))
    return ranks


def word_of(number: int, digest: int = CALL.digest) -> int:
    """What is told of a round."""
    return (number << ROUND_SHIFT) + (digest if number else 0)


def together(ranks: Sequence[Board], act: Callable[[Board], Result]) -> list[Result]:
    """What `act` gives on each of `ranks`, which wait for each other, for no longer than a minute."""

    def give_up() -> None:
        for board in ranks:
            board.state[ABORT] = 1

    watch = threading.Timer(60.0, give_up)
    watch.start()
    with ThreadPoolExecutor(len(ranks)) as threads:
        running = [threads.submit(act, board) for board in ranks]
        if any(future.exception() is not None for future in wait(running, return_when=FIRST_EXCEPTION).done):
            give_up()  # the others would wait for ever
        watch.cancel()
    failed = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, GivenUp)):
        raise error  # what made the others give up, if it is there
    return [future.result() for future in running]


def random_ids(
    generator: torch.Generator, num_tokens: Sequence[int], top_k: int, num_experts: int
) -> list[torch.Tensor]:
    """Ids `[T, K]` int64 by rank, -1 and repeats among them."""
    return [torch.randint(-1, num_experts, (tokens, top_k), generator=generator) for tokens in num_tokens]


def homes(ids: torch.Tensor, num_local: int) -> torch.Tensor:
    """Rank of every slot's expert, int32, -1 for none."""
    return torch.where(ids < 0, -1, ids // num_local).to(torch.int32)
