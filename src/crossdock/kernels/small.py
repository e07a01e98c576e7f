"""Small batches: what dispatch and combine in one kernel each share, an inbox at every rank and the wait for all.

General kernels tell routing first and rows chunk by chunk, and arrange in between, which is most of what few tokens
take. For these a rank pushes each row once into an inbox at every rank that wants it, and tells each rank once. What is
pushed in round n lies in half `n % 2` of the inbox, be it a dispatch's or a combine's, n counting the rounds of this
kind alone (`INBOX` in `state`).
Nothing of such a round waits for `READ`: who pushes in round n + 2 has seen every rank arrive in round n + 1, and a
rank arrives there behind its whole kernel of round n, which has read that half. General rounds between them touch
no inbox. They count in `ROUND` as all rounds do, and their words are written by the same rule: none is written again
before everyone has passed the round in between.

A rank arrives with every program of its kernel: each adds its part to `ARRIVED_SMALL` at every rank, its own included
(pattern publish; what a program has pushed is passed on by its own addition), and all parts make `2^31`. With three
programs a rank, in round 5, the first program adds `2^31 - 2`, the others 1 each, and words of `5 * 2^31` end the wait.
How many tokens a rank brings to a dispatch stands in `BROUGHT + n % 2`, as in `TOKENS`.

Which call it is is told before the first program arrives, by its digest in `ROUTED` and in the first of `CHUNKS`, on
which general rounds of any kind wait; the wait looks at the latter, which all of them tell too. So ranks that make
different calls find that out, whichever kernels they took for them.

The first program is the clerk. It does what is done once: it tells the digest, lets the host see that the wait begins
and ends, and counts the round. Whoever sees all ranks arrived knows that all programs of its own rank are at their wait
too, and have read all they want of `state`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .blocks import power_of_two, up_to
from .launch import launch
from .round import fill
from .signal import NUM_CHUNKS, Board, count_wait, wide
from .waits import wait_on_cpu

MOST_TOKENS = 512
MOST_RANKS = 16  # a kernel has a store for each
_MOST_PLACES = 1 << 31  # a place is one of an expert's on its rank
_GPU_ELEMENTS, _CPU_ELEMENTS = 1 << 13, 1 << 18  # that are compared at a time


class Inbox(NamedTuple):
    """Where ranks push what this one gets, and where their inboxes are. S_max tokens of a rank at most.

    Attributes:
        rows: `[2, ep_size, S_max, D]`, shared: tokens by source rank; or what a combine brings this rank's tokens from
            every rank.
        places: `[2, ep_size, S_max, K]` int32, shared: `expert here * PLACES + slots of it before this one`, or -1.
        scores: `[2, ep_size, S_max, K]` float32, shared: of slots by source rank; or scalars that a combine brings this
            rank's slots, by the rank that has pushed them.
        counts: `[2, ep_size, e]` int32, shared: slots by source rank and expert here.
        tables: `[4, ep_size]` int64: the addresses of all ranks' buffers, in the order above.
        groups: `[programs, e * (ep_size + 2)]` int32 of this rank alone: what each program works out for itself.
    """

    rows: torch.Tensor
    places: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor
    tables: torch.Tensor
    groups: torch.Tensor

    @property
    def max_programs(self) -> int:
        """Of a kernel."""
        return self.groups.shape[0]

    @property
    def max_tokens(self) -> int:
        """S_max."""
        return self.rows.shape[2]


def fits_small(max_tokens: int, top_k: int, hidden_dim: int, num_local: int, ep_size: int) -> bool:
    """Whether there are small kernels for dispatchers of this size."""
    sizes = max_tokens <= MOST_TOKENS and ep_size <= MOST_RANKS and hidden_dim % 8 == 0
    return sizes and num_local * places_of(max_tokens, top_k) <= _MOST_PLACES


def places_of(max_tokens: int, top_k: int) -> int:
    """PLACES: more than an expert can have slots of a rank; a power of two, since kernels divide by it."""
    return power_of_two(max_tokens * top_k + 1)


def inbox_groups(device: torch.device, programs: int, num_local: int, ep_size: int) -> torch.Tensor:
    """`Inbox.groups` for so many programs."""
    return torch.empty(programs, num_local * (ep_size + 2), dtype=torch.int32, device=device)


# -- for kernels to call ----------------------------------------------------------------------------------------------


def agreed(word_ptr):
    """A word that another program may be writing: one value for all warps of a program, whatever each of them sees."""
    lane = tl.arange(0, 256)
    return tl.reduce(tl.load(word_ptr + lane * 0, volatile=True), 0, tl.standard._elementwise_max)


def tell_call(words, number, digest, rank, NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr):
    """Tell all ranks (`words`: where they have their signals) which call this round belongs to; by the clerk."""
    peer = tl.arange(0, EP_BLOCK)
    told = tl.full((EP_BLOCK,), 0, tl.int64) + (number * 2147483648 + digest)
    routed, chunk = words + (2 + number % 2) * EP_SIZE + rank, words + (6 + number % 2 * NUM_CHUNKS) * EP_SIZE + rank
    tl.atomic_xchg(routed, told, mask=peer < EP_SIZE, sem="relaxed", scope="sys")
    tl.atomic_xchg(chunk, told, mask=peer < EP_SIZE, sem="relaxed", scope="sys")


def arrive(words, state_ptr, first, programs, rank, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr):
    """Tell all ranks that this program has pushed all it will."""
    tl.debug_barrier()
    peer = tl.arange(0, EP_BLOCK)
    part = tl.where(first == 0, 2147483648 - (programs - 1).to(tl.int64), 1)
    tl.atomic_add(
        words + 22 * EP_SIZE + rank, tl.full((EP_BLOCK,), 0, tl.int64) + part, mask=peer < EP_SIZE,
        sem="release", scope="sys",
    )  # fmt: skip


def wait_for_all(
    signals_ptr, state_ptr, desk_ptr, small, number, digest, given_up, max_polls, polls_per_look,
    NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait until every rank has arrived in round `small`, which is round `number` of all, with `digest`; how it ended.

    Pattern acquire, in one step: every look at the signals is an acquire.
    """
    # Lanes of the lower half look at arrivals, those of the upper one at digests; all by atomics, as in `wait_for`.
    lane = tl.arange(0, 2 * EP_BLOCK)
    peer = lane % EP_BLOCK
    inside, counts = peer < EP_SIZE, lane < EP_BLOCK
    word = 6 + number % 2 * NUM_CHUNKS
    at = signals_ptr + tl.where(inside, tl.where(counts, 22, word) * EP_SIZE + peer, 0)
    nothing = tl.full((2 * EP_BLOCK,), 0, tl.int64)
    polls = tl.full((), 0, tl.int32)
    code = given_up.to(tl.int32)
    complete = tl.full((), 0, tl.int32)
    while (code == 0) & (polls < max_polls):
        told = tl.atomic_add(at, nothing, mask=inside, sem="acquire", scope="sys")
        late = inside & counts & ((told >> 31) < small)
        silent = inside & (counts == 0) & ((told >> 31) < number)
        other_call = inside & (counts == 0) & ((told >> 31) == number) & ((told & 0x7FFFFFFF) != digest)
        seen = late.to(tl.int32) + silent.to(tl.int32) * 256 + other_call.to(tl.int32) * 65536
        seen = tl.reduce(seen, 0, tl.standard._sum_combine)
        code = tl.where(seen >= 65536, 4, tl.where(seen == 0, 1, 0))
        # All had arrived before, and still one has told nothing of this round: it is in another one.
        code = tl.where((code == 0) & (seen % 256 == 0) & (complete != 0), 4, code)
        complete = (seen % 256 == 0).to(tl.int32)
        polls += 1
        if (code == 0) & (polls % polls_per_look == 0):
            before = tl.atomic_add(state_ptr + 4, wide(0), sem="relaxed", scope="gpu")
            aborted = tl.atomic_add(state_ptr + 10, wide(0), sem="relaxed", scope="sys")
            # Pattern last words.
            departed_at = signals_ptr + tl.where(inside, 5 * EP_SIZE + peer, 0)
            departed = tl.atomic_add(departed_at, nothing, mask=inside, sem="acquire", scope="sys")
            told = tl.atomic_add(at, nothing, mask=inside, sem="acquire", scope="sys")
            gone = inside & counts & ((told >> 31) < small) & (departed != 0)
            left = tl.reduce(gone.to(tl.int32), 0, tl.standard._sum_combine)
            code = tl.where(before != 0, before.to(tl.int32), tl.where(left > 0, 3, tl.where(aborted != 0, 2, 0)))
    if (code > 1) & (given_up == 0):
        tl.store(desk_ptr + 3, code.to(tl.int64))
        tl.store(state_ptr + 9, number)
        tl.store(state_ptr + 4, code.to(tl.int64))
    tl.debug_barrier()
    return code


def count_round(state_ptr, number, small):
    """Close a round; by the clerk."""
    tl.store(state_ptr, number)
    tl.store(state_ptr + 11, small)


def poison(out_ptr, length, first, programs, BLOCK: tl.constexpr):
    """A program's part of `length` elements becomes NaN."""
    each = (length + programs - 1) // programs
    end = tl.where((first + 1) * each < length, (first + 1) * each, length)
    fill(out_ptr, float("nan"), first * each, end, BLOCK)


SMALL = (agreed, tell_call, arrive, wait_for_all, count_round, fill, poison)


# -- a launch of its own, for the interpreter --------------------------------------------------------------------------


def wait_small_kernel(
    signals_ptr, state_ptr, desk_ptr,
    digest,
    max_polls,
    polls_per_look,
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait until every rank has arrived in the round that is counted already."""
    code = wait_for_all(
        signals_ptr, state_ptr, desk_ptr, tl.load(state_ptr + 11), tl.load(state_ptr), digest, tl.load(state_ptr + 4),
        max_polls, polls_per_look, NUM_CHUNKS, EP_SIZE, EP_BLOCK,
    )  # fmt: skip
    if code > 0:
        count_wait(state_ptr, desk_ptr, 6)


def launch_wait_small(board: Board, digest: int) -> None:
    """On a CPU, wait until every rank has arrived.

    Raises:
        GivenUp: it ended without that.
    """

    def ask(max_polls: int) -> None:
        launch(
            wait_small_kernel, (1,), board.device, board.signals, board.state, board.desk, digest, max_polls, 1,
            NUM_CHUNKS=NUM_CHUNKS, num_warps=1, helpers=(wide, count_wait, wait_for_all), **board.constants,
        )  # fmt: skip

    wait_on_cpu(board, ask)


# -- sizes ------------------------------------------------------------------------------------------------------------


def spread(num_tokens: int, num_parts: int, programs: int, most: int) -> int:
    """Tokens of a tile, a power of two up to `most`: as few as let every program have one tile of one part.

    >>> spread(16, 7, 131, 8), spread(64, 7, 131, 8), spread(512, 7, 131, 8)
    (1, 4, 8)
    """
    return up_to(most, -(-num_tokens * num_parts // programs))


def part_of(hidden_dim: int, num_bytes: int) -> int:
    """Columns of a part, for elements of so many bytes: 2 KB, a vector of 16 bytes for each thread of four warps."""
    return min(2048 // num_bytes, power_of_two(hidden_dim))


def compared(on_gpu: bool, rows: int, columns: int) -> int:
    """Of `columns`, how many are compared with `rows` at a time."""
    return up_to(max((_GPU_ELEMENTS if on_gpu else _CPU_ELEMENTS) // power_of_two(rows), 16), columns)
