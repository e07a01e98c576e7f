"""Signals between ranks, and the memory-order patterns that every kernel over shared memory relies on.

Each rank has `signals [NUM_WORDS, ep_size]` int64 in shared memory; word `[kind, q]` is written by rank q alone:

* `TOKENS + parity`: what rank q brings to a dispatch: `T + bad ids * 2^32`.
* `ROUTED + parity`: its ids and scores of a dispatch are here; or it makes another call in this round.
* `CHUNKS + parity * NUM_CHUNKS + c`: chunk c of what it brings in a round is here.
* `READ`: it has read all it wants of a round.
* `DEPARTED`: 1 once it has closed or given up.

All but the first and the last hold `round * 2^31 + digest`, the digest being that of the call as its rank understands
it: whoever waits compares it with its own, and needs no message for that. Rounds only grow, so nothing is ever reset.
A digest is an odd number of 31 bits above 1 (see `digest_of`).
Words that open or fill a round stand twice, by the round's parity: a rank may fill the round behind the one that a
slow peer still waits for, and never the next. Rounds are counted in `state` int64 of ordinary memory (see `ROUND` and
below), so a replayed graph counts like an eager call. Small batches have two more kinds of words, see `small.py`.

The patterns, by name:

* **publish**: programs write shared memory with plain stores; each then adds to a counter with acquire and release
  of device scope; the last one writes the words of all peers with a release of system scope. What the others wrote
  is passed on by both. On a CPU a launch of its own (`tell_kernel`) writes the words.
* **acquire**: a program polls the word with relaxed atomics; when it is there, it reads it once more with an acquire
  of system scope, and a barrier passes that on to all of its threads, which may then use plain loads.
* **free**: the same as publish, for `READ`, after the loads. Whoever acquires it may write all buffers again.
* **last words**: a rank that leaves writes `DEPARTED` after everything else. A waiting rank looks at `DEPARTED` first
  and at the awaited word afterwards, both with an acquire: if a word is missing then, it will never come.
* **grid**: programs of one launch meet like publish and acquire with device scope; the launch must fit the device.

A wait has no clock. It also looks at an abort word in `state`, which a watch on the host has written (see
`memory/watch.py`). The host sees in `desk`, which the device only writes, how many waits have begun and ended, in which
call, and with which code one was given up. After that nothing waits any more, and nothing is told to peers.

In the interpreter programs run one after the other, so waiting and telling are launches of their own (`waits.py`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from .blocks import power_of_two

NUM_CHUNKS = 8
TOKENS, ROUTED, READ, DEPARTED, CHUNKS = 0, 2, 4, 5, 6
ARRIVED_SMALL, BROUGHT = CHUNKS + 2 * NUM_CHUNKS, CHUNKS + 2 * NUM_CHUNKS + 1  # of small batches, see `small.py`
NUM_WORDS = BROUGHT + 2
ROUND_SHIFT = 31  # a digest has so many bits

# Places in `state`: the last round; the last one in which ranks pushed what `READ` frees, whatever buffer; the rest.
# Places 2, 3, 14 and 15 are free.
ROUND, STAGING = 0, 1
GIVEN_UP, BEGUN, ENDED, BAD_IDS, NUM_SENT, LAST_TARGET, ABORT = 4, 5, 6, 7, 8, 9, 10
INBOX = 11  # rounds of small batches; 12 and 13 are of `stress.py`
ARRIVALS = 16  # counters of programs that have come so far, each back at zero when the last one has: of every chunk,
# of a launch (8), its part (9) and those who publish (13); from 26 on, those of programs that meet (2), and of tiles
NUM_STATE = ARRIVALS + NUM_CHUNKS + 8

# Places in `desk`, pinned memory of the host.
DESK_BEGUN, DESK_ENDED, DESK_CODE, DESK_CALL = 1, 2, 3, 4
NUM_DESK = 8

WAITING, ARRIVED, ABORTED, LEFT, DIFFERS = 0, 1, 2, 3, 4

POLLS_PER_LOOK = 256  # at who has departed
ENDLESS = 1 << 30


class Board(NamedTuple):
    """One rank's signals, and how it reaches its peers'.

    Attributes:
        signals: `[NUM_WORDS, ep_size]` int64, shared: what peers have told this rank.
        table: `[ep_size]` int64: addresses of all ranks' signals.
        state: `[NUM_STATE]` int64 on the device.
        desk: `[NUM_DESK]` int64 that the device writes and the host sees while a kernel runs.
        rank: this one.
    """

    signals: torch.Tensor
    table: torch.Tensor
    state: torch.Tensor
    desk: torch.Tensor
    rank: int

    @property
    def ep_size(self) -> int:
        """Ranks of the group."""
        return self.table.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the kernels run."""
        return self.state.device

    @property
    def fused(self) -> bool:
        """Whether kernels wait and tell by themselves; in the interpreter launches of their own do."""
        return self.state.is_cuda

    @property
    def compiled(self) -> bool:
        """Whether kernels are compiled: in the interpreter conversions to bfloat16 do not round."""
        return self.state.is_cuda

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What every kernel that waits or tells takes first."""
        return self.signals, self.table, self.state, self.desk

    @property
    def constants(self) -> dict[str, Any]:
        """Constexprs of every kernel that waits or tells."""
        return group_constants(self.table.shape[0])


@cache
def group_constants(ep_size: int) -> dict[str, Any]:
    """`Board.constants` of a group of so many ranks."""
    return {"EP_SIZE": ep_size, "EP_BLOCK": max(2, power_of_two(ep_size))}


# -- for kernels to call ----------------------------------------------------------------------------------------------


def wide(number):
    """`number` as int64, whatever it is."""
    return tl.full((), 0, tl.int64) + number


def wait_for(
    signals_ptr, state_ptr, desk_ptr, word, target, digest, max_polls, polls_per_look,
    COMPARES: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait until every rank has told `word` of round `target` (pattern acquire); returns how it ended."""
    # One lane a rank, and two more: whether a wait was given up, and whether the host wants it. All by atomics, whose
    # result is one for all warps of a program; what they load by themselves may differ, and their ways would part.
    lane = tl.arange(0, 2 * EP_BLOCK)
    inside = lane < EP_SIZE
    at = signals_ptr + tl.where(inside, word * EP_SIZE + lane, 0)
    at = tl.where(lane == EP_SIZE, state_ptr + 4, tl.where(lane == EP_SIZE + 1, state_ptr + 10, at))
    departed_at = signals_ptr + tl.where(inside, 5 * EP_SIZE + lane, 0)
    nothing = tl.full((2 * EP_BLOCK,), 0, tl.int64)
    polls = tl.full((), 0, tl.int32)
    code = tl.full((), 0, tl.int32)
    given_up = tl.full((), 0, tl.int32)
    while (code == 0) & (polls < max_polls):
        told = tl.atomic_add(at, nothing, mask=lane < EP_SIZE + 2, sem="relaxed", scope="sys")
        late = (inside & ((told >> 31) < target)).to(tl.int32)
        missing = tl.reduce(late, 0, tl.standard._sum_combine)
        given_up = tl.reduce(tl.where(lane == EP_SIZE, told, 0).to(tl.int32), 0, tl.standard._sum_combine)
        aborted = tl.reduce(tl.where(lane == EP_SIZE + 1, told, 0).to(tl.int32), 0, tl.standard._sum_combine)
        code = tl.where(given_up != 0, given_up, tl.where(missing == 0, 1, tl.where(aborted != 0, 2, 0)))
        look = (code == 0) & (polls % polls_per_look == polls_per_look - 1)
        # Pattern last words: DEPARTED before what is awaited.
        departed = tl.atomic_add(departed_at, nothing, mask=inside & look, sem="acquire", scope="sys")
        # Once it is there, with an acquire: what has been told of may be read now.
        again = inside & (look | (code == 1))
        told = tl.atomic_add(at, nothing, mask=again, sem="acquire", scope="sys")
        gone = again & ((told >> 31) < target) & (departed != 0)
        left = tl.reduce(gone.to(tl.int32), 0, tl.standard._sum_combine)
        other_call = again & ((told >> 31) == target) & ((told & 0x7FFFFFFF) != digest)
        differs = tl.reduce(other_call.to(tl.int32), 0, tl.standard._sum_combine)
        if COMPARES:
            code = tl.where((code == 1) & (differs > 0), 4, code)
        code = tl.where(look & (left > 0), 3, code)
        polls += 1
    if (code > 1) & (given_up == 0):
        tl.store(desk_ptr + 3, code.to(tl.int64))
        tl.store(state_ptr + 9, target)
        tl.store(state_ptr + 4, code.to(tl.int64))
    tl.debug_barrier()
    return code


def count_wait(state_ptr, desk_ptr, place: tl.constexpr):
    """Count a wait that begins (place 5) or has ended (6), for the host to see; called by one program."""
    number = tl.load(state_ptr + place) + 1
    tl.store(state_ptr + place, number)
    tl.store(desk_ptr + (place - 4), number)


def begin_call(state_ptr, desk_ptr, call, FUSED: tl.constexpr):
    """Let the host see which call begins to wait; by one program."""
    tl.store(desk_ptr + 4, wide((call - 3) // 2))
    if FUSED:
        count_wait(state_ptr, desk_ptr, 5)


def may_lay_out(state_ptr):
    """Whether shared memory may be written: once a wait was given up, it may have been the one for pattern free."""
    return tl.load(state_ptr + 4, volatile=True) == 0


def tell(table_ptr, state_ptr, word, rank, value, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr):
    """Write a word of all ranks (pattern publish); called by one program, behind a barrier."""
    peer = tl.arange(0, EP_BLOCK)
    heard = (peer < EP_SIZE) & may_lay_out(state_ptr)
    words = tl.load(table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(
        words + word * EP_SIZE + rank, tl.full((EP_BLOCK,), 0, tl.int64) + value, mask=heard, sem="release", scope="sys"
    )


def is_last(state_ptr, counter, total):
    """Whether all `total` programs have come to this counter (pattern publish); starts it again for the next launch."""
    tl.debug_barrier()
    before = tl.atomic_add(state_ptr + 16 + counter, 1, sem="acq_rel", scope="gpu")
    last = before == total - 1
    if last:
        tl.store(state_ptr + 16 + counter, 0)
    tl.debug_barrier()
    return last


def tell_routed(table_ptr, state_ptr, number, rank, digest, num_tokens, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr):
    """Tell every rank that ids and scores of round `number` are there, and how many tokens they are."""
    peer = tl.arange(0, EP_BLOCK)
    tokens = wide(num_tokens) + tl.load(state_ptr + 7) * 4294967296
    words = tl.load(table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.int64))
    value = tl.full((EP_BLOCK,), 0, tl.int64) + tokens
    tl.store(words + (number % 2) * EP_SIZE + rank, value, mask=(peer < EP_SIZE) & may_lay_out(state_ptr))
    tl.store(state_ptr + 7, 0)
    tl.debug_barrier()
    tell(table_ptr, state_ptr, 2 + number % 2, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)


def meet(state_ptr, counter, total):
    """Wait until all `total` programs of this launch are here (pattern grid); one of them resets it afterwards."""
    tl.debug_barrier()
    come = tl.atomic_add(state_ptr + 26 + counter, 1, sem="acq_rel", scope="gpu") + 1
    while come < total:  # one thread asks for all: more would hold up those who still come
        come = tl.atomic_add(state_ptr + 26 + counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


def come(state_ptr, counter):
    """Let other programs of this launch see that this one is here (pattern grid); waits for nobody."""
    tl.debug_barrier()
    tl.atomic_add(state_ptr + 26 + counter, 1, sem="acq_rel", scope="gpu")


def have_come(state_ptr, counter, total):
    """Whether all `total` programs are there that were to come or to meet (pattern grid); waits for nobody."""
    there = tl.atomic_add(state_ptr + 26 + counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    return there == total


SIGNALLING = (wide, wait_for, count_wait, begin_call, may_lay_out, tell, is_last, tell_routed)


# -- for the host ------------------------------------------------------------------------------------------------------


def varying(number: int) -> int:
    """A number that is another one in every call, as kernels take it: odd and above 1, so that one variant serves all.

    >>> varying(0), varying(16), (varying(16) - 3) // 2
    (3, 35, 16)
    """
    return 2 * number + 3


def digest_of(words: Sequence[int]) -> int:
    """A call's words as an odd number of 31 bits above 1, the same on every rank that understands the call alike."""
    packed = struct.pack(f"<{len(words)}q", *words)
    return zlib.crc32(packed) & 0x3FFFFFFE | 0x40000001
