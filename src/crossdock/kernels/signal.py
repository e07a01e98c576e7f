"""Signals between ranks, and the memory-order patterns that every kernel over shared memory relies on.

Each rank has `signals [3, ep_size]` int64 in shared memory; word `[kind, q]` is written by rank q alone and only grows:
`PUBLISHED`, the last round whose data rank q has laid out; `READ`, the last round of which rank q has read all it
wants; `DEPARTED`, 1 once rank q has closed. Because they only grow, nothing is ever reset. Rounds are counted on the
device, in `state [1 + num_buffers]` int64 of ordinary memory: the number of the last round, then for every buffer the
last round in which it was written.

The patterns, by name:

* **publish**: a kernel writes shared memory with plain stores; a later launch of the same stream (`send_kernel`)
  writes `PUBLISHED` at every peer with a release of system scope. A launch comes after all that the launch before it
  wrote, and the release passes that on to whoever acquires the word.
* **acquire**: `wait_kernel`, a launch of its own with one program, reads the word with an acquire of system scope until
  it is there. Launches behind it may read what was published with plain loads; they start with empty first-level
  caches.
* **free**: a rank sends `READ` by the same release, after the launches that read. Whoever acquires it may write the
  buffer again.
* **last words**: a rank that leaves writes `DEPARTED` after everything else. A waiting rank looks at `DEPARTED` first
  and at the awaited word afterwards: if a word is missing then, it will never come.

A wait has no clock. It also looks at an abort word, which a watch on the host sets (see `memory/watch.py`); it counts
up `status[0]` when it has ended, and writes to `status[1]` and to `given_up` when it ended without what it waited for.

In the interpreter programs run one after the other, so a kernel that waits has one program, and the host asks again and
again (`max_polls`) so that it can sleep in between. Two ranks, both published round 4, the wait is for 4: signals
`[[4, 4], ...]` end it with code `ARRIVED`; `[[4, 3], ...]` leave it waiting; with `DEPARTED` of rank 1 it ends with
`LEFT`.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import launch

PUBLISHED, READ, DEPARTED = 0, 1, 2
NUM_KINDS = 3
WAITING, ARRIVED, ABORTED, LEFT = 0, 1, 2, 3
ROUND = 0  # the place of the last round's number in `state`

_CPU_POLLS = 2
_CPU_SLEEPS_S = (0.0, 0.0005, 0.001, 0.002, 0.005)  # between looks: soon, then seldom, since ranks share the cores
_POLLS_PER_LOOK = 128  # of the abort word, which on a GPU lies behind the host's bus
_ENDLESS = 1 << 62


class Board(NamedTuple):
    """One rank's signals, and how it reaches its peers'.

    Attributes:
        signals: `[3, ep_size]` int64, shared: what peers have told this rank.
        table: `[ep_size]` int64: addresses of all ranks' signals.
        state: `[1 + num_buffers]` int64: see the module.
        abort: `[1]` int64 that the host can write while a kernel runs.
        status: `[2]` int64 that the host can read while a kernel runs: waits ended, and the code of one given up.
        given_up: `[1]` int64 on the device: set once a wait was given up.
        rank: this one.
    """

    signals: torch.Tensor
    table: torch.Tensor
    state: torch.Tensor
    abort: torch.Tensor
    status: torch.Tensor
    given_up: torch.Tensor
    rank: int

    @property
    def ep_size(self) -> int:
        """Ranks of the group."""
        return self.table.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the kernels run."""
        return self.state.device


def send_kernel(
    table_ptr,  # [EP] int64: addresses of int64 [3, EP]
    state_ptr,  # [1 + num_buffers] int64
    rank,
    KIND: tl.constexpr,
    WORD: tl.constexpr,  # place of the buffer in `state`; used where a new round begins
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
):
    """Tell every rank: a new round is published (pattern publish), or the last one read (pattern free)."""
    number = tl.load(state_ptr)
    if KIND == 0:
        number += 1
        tl.store(state_ptr, number)
        tl.store(state_ptr + WORD, number)
    peer = tl.arange(0, EP_BLOCK)
    words = tl.load(table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.int64))
    value = tl.full((EP_BLOCK,), 0, tl.int64) + number
    tl.atomic_xchg(words + KIND * EP_SIZE + rank, value, mask=peer < EP_SIZE, sem="release", scope="sys")


def wait_kernel(
    signals_ptr,  # [3, EP] int64, this rank's
    state_ptr,  # [1 + num_buffers] int64
    abort_ptr,  # [1] int64
    status_ptr,  # [2] int64
    given_up_ptr,  # [1] int64
    max_polls,
    KIND: tl.constexpr,
    WORD: tl.constexpr,  # place in `state` of the round that is waited for
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):
    """Wait until every rank has told this one of a round (pattern acquire), or until that is hopeless."""
    peer = tl.arange(0, EP_BLOCK)
    inside = peer < EP_SIZE
    nothing = tl.full((EP_BLOCK,), 0, tl.int64)
    target = tl.load(state_ptr + WORD)
    polls = tl.full((), 0, tl.int64)
    code = tl.full((), 0, tl.int32)
    while (code == 0) & (polls < max_polls):
        # Pattern last words: DEPARTED before what is awaited.
        departed = tl.atomic_add(signals_ptr + 2 * EP_SIZE + peer, nothing, mask=inside, sem="acquire", scope="sys")
        told = tl.atomic_add(signals_ptr + KIND * EP_SIZE + peer, nothing, mask=inside, sem="acquire", scope="sys")
        missing = inside & (told < target)
        num_missing = tl.reduce(missing.to(tl.int32), 0, tl.standard._sum_combine)
        num_left = tl.reduce((missing & (departed != 0)).to(tl.int32), 0, tl.standard._sum_combine)
        look = polls % POLLS_PER_LOOK == POLLS_PER_LOOK - 1
        aborted = tl.load(abort_ptr, mask=look, other=0, volatile=True) != 0
        code = tl.where(num_missing == 0, 1, tl.where(num_left > 0, 3, tl.where(aborted, 2, 0)))
        polls += 1
    if code > 1:
        tl.store(status_ptr + 1, code.to(tl.int64))
        tl.store(given_up_ptr, code.to(tl.int64))
    if code > 0:
        tl.store(status_ptr, tl.load(status_ptr) + 1)


def launch_send(board: Board, kind: int, word: int = ROUND) -> None:
    """Tell all ranks that a round is `PUBLISHED` (a new one, written to the buffer of `state[word]`) or `READ`."""
    launch(
        send_kernel,
        (1,),
        board.device,
        board.table,
        board.state,
        board.rank,
        KIND=kind,
        WORD=word,
        EP_SIZE=board.ep_size,
        EP_BLOCK=triton.next_power_of_2(board.ep_size),
        num_warps=1,
    )


def launch_wait(board: Board, kind: int, word: int) -> None:
    """Wait until all ranks have told `kind` of round `state[word]`; on a CPU returns when the wait has ended."""
    if board.device.type == "cuda":
        _launch_wait(board, kind, word, _ENDLESS, _POLLS_PER_LOOK)
        return
    before, looks = int(board.status[0]), 0
    while int(board.status[0]) == before:
        if looks:
            time.sleep(_CPU_SLEEPS_S[min(looks // 4, len(_CPU_SLEEPS_S) - 1)])
        looks += 1
        _launch_wait(board, kind, word, _CPU_POLLS, 1)


def _launch_wait(board: Board, kind: int, word: int, max_polls: int, polls_per_look: int) -> None:
    launch(
        wait_kernel,
        (1,),
        board.device,
        board.signals,
        board.state,
        board.abort,
        board.status,
        board.given_up,
        max_polls,
        KIND=kind,
        WORD=word,
        EP_SIZE=board.ep_size,
        EP_BLOCK=triton.next_power_of_2(board.ep_size),
        POLLS_PER_LOOK=polls_per_look,
        num_warps=1,
    )
