"""Stress: helpers through which programs signal and wait dawdle, and ranks fall behind, at random; races come out.

While `delays` lasts, kernels are built with the slowed twins below in the place of the helpers of the same names (see
`launch.standing_in`); no kernel's arguments change, and otherwise nothing of this is in any kernel. A twin dawdles,
does what it stands for, which it finds as `prompt_<name>`, and dawdles again. What that brings about: a word is told
long after the stores that it tells of, or what follows it comes late; a program waits late, or reads late what it has
waited for; the last of a launch is another one each time. `tell_routed` dawdles through `tell`, and `tell_call`,
behind which a program arrives, in `arrive`.

To dawdle is to add to a word of `state` again and again, each time for the result: on a GPU a trip to its cache and
back, up to 63 times. Atomics, since their result is one for all warps of a program, and they order nothing else here.
They do bring the warps of a program together, so a barrier that is missing inside of one is better found without.

Which visit to a twin dawdles for how long is a hash of its number, which is counted in `state` over all programs and
launches. One visit in 4 dawdles, or in 32, or in 256, in turns of 256 visits: races want either a crowd that is late or
a single one. So runs in the interpreter repeat, for one seed, but for how often they poll.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton.language as tl

from .launch import StandIns, standing_in
from .signal import come as prompt_come
from .signal import have_come as prompt_have_come
from .signal import is_last as prompt_is_last
from .signal import meet as prompt_meet
from .signal import tell as prompt_tell
from .signal import wait_for as prompt_wait_for
from .small import arrive as prompt_arrive
from .small import wait_for_all as prompt_wait_for_all

# Places in `state` that nothing else uses: how often a twin was visited, and the atomics of all that have dawdled.
VISITS, DAWDLED = 12, 13

SEED = tl.constexpr(0)  # `delays` puts its own in this place

_ONE_LAUNCH_IN = 32
# By device: some launches long. In the interpreter most of them take tens of milliseconds.
_LONGEST_SLEEP_S = {"cuda": 0.003, "cpu": 0.1}


def dawdle(state_ptr):
    """Nearly always go on at once; now and then do nothing for some time."""
    visit = tl.atomic_add(state_ptr + 12, 1, sem="relaxed", scope="gpu")
    chance = (visit + SEED) * 1103515245 & 0x7FFFFFFF
    chance = (chance ^ (chance >> 15)) * 73244475 & 0x7FFFFFFF
    one_in = 4 << (visit // 256 % 3 * 3)
    left = tl.where((chance >> 20) % one_in == 0, (chance >> 8) % 64, 0)
    while left > 0:
        before = tl.atomic_add(state_ptr + 13, 1, sem="relaxed", scope="gpu")
        left -= 1 + (before >> 62)  # one, for which the atomic must have come back


# -- the twins --------------------------------------------------------------------------------------------------------


def wait_for(
    signals_ptr, state_ptr, desk_ptr, word, target, digest, max_polls, polls_per_look,
    COMPARES: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Slowed."""
    dawdle(state_ptr)
    code = prompt_wait_for(
        signals_ptr, state_ptr, desk_ptr, word, target, digest, max_polls, polls_per_look, COMPARES, EP_SIZE, EP_BLOCK
    )
    dawdle(state_ptr)
    return code


def tell(table_ptr, state_ptr, word, rank, value, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr):
    """Slowed."""
    dawdle(state_ptr)
    prompt_tell(table_ptr, state_ptr, word, rank, value, EP_SIZE, EP_BLOCK)
    dawdle(state_ptr)


def is_last(state_ptr, counter, total):
    """Slowed."""
    dawdle(state_ptr)
    last = prompt_is_last(state_ptr, counter, total)
    dawdle(state_ptr)
    return last


def meet(state_ptr, counter, total):
    """Slowed."""
    dawdle(state_ptr)
    prompt_meet(state_ptr, counter, total)
    dawdle(state_ptr)


def come(state_ptr, counter):
    """Slowed."""
    dawdle(state_ptr)
    prompt_come(state_ptr, counter)
    dawdle(state_ptr)


def have_come(state_ptr, counter, total):
    """Slowed."""
    dawdle(state_ptr)
    all_there = prompt_have_come(state_ptr, counter, total)
    dawdle(state_ptr)
    return all_there


def arrive(words, state_ptr, first, programs, rank, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr):
    """Slowed."""
    dawdle(state_ptr)
    prompt_arrive(words, state_ptr, first, programs, rank, EP_SIZE, EP_BLOCK)
    dawdle(state_ptr)


def wait_for_all(
    signals_ptr, state_ptr, desk_ptr, small, number, digest, given_up, max_polls, polls_per_look,
    NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Slowed."""
    dawdle(state_ptr)
    code = prompt_wait_for_all(
        signals_ptr, state_ptr, desk_ptr, small, number, digest, given_up, max_polls, polls_per_look,
        NUM_CHUNKS, EP_SIZE, EP_BLOCK,
    )  # fmt: skip
    dawdle(state_ptr)
    return code


SLOWED: dict[str, Callable[..., Any]] = {
    twin.__name__: twin for twin in (wait_for, tell, is_last, meet, come, have_come, arrive, wait_for_all)
}


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Delay what this process launches, on all of its dispatchers, until the context is left.

    Enter and leave it between calls, with a seed of each rank's own: besides, the host sleeps before one launch in 32,
    for up to 3 ms, or 100 ms before one that is interpreted. Kernels are built anew in both cases.
    """
    draw = random.Random(seed)

    def fall_behind(device: torch.device) -> None:
        if draw.randrange(_ONE_LAUNCH_IN) == 0:
            time.sleep(draw.random() ** 2 * _LONGEST_SLEEP_S[device.type])

    constants = {"SEED": tl.constexpr(draw.getrandbits(24))}
    with standing_in(StandIns(SLOWED, (dawdle,), constants, fall_behind)):
        yield
