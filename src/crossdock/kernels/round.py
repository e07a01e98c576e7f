"""Begin and end a round (see `signal.py`): what every kernel that pushes and reads does in the same way.

Two ranks, the last round that pushed anything was the 4th. Round 5 begins on a rank when both have told `READ` of round
4; it tells both which call round 5 belongs to, for those that dispatch instead. Its last program to end counts round 5
and tells `READ` of it. Where a wait was given up by then, outputs `[1, 2]` have become `[NaN, NaN]` before.
"""

from __future__ import annotations

import triton.language as tl

from .signal import begin_call, count_wait, is_last, tell, wait_for, wide


def fill(out_ptr, value, first, end, BLOCK: tl.constexpr):
    """Elements `first` up to `end` become `value`; by one program."""
    for start in range(first, end, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(out_ptr + place, value, mask=place < end)


def begin_round(
    signals_ptr, table_ptr, state_ptr, desk_ptr, number, digest, rank, call, first,
    FUSED: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr, POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Begin round `number`, which has no routing, and wait until all may push (pattern free); by all that push."""
    if first == 0:
        begin_call(state_ptr, desk_ptr, call, FUSED)
    if FUSED:
        free = tl.load(state_ptr + 1)
        wait_for(signals_ptr, state_ptr, desk_ptr, 4, free, digest, POLLS, POLLS_PER_LOOK, False, EP_SIZE, EP_BLOCK)
        if first == 0:  # for ranks that dispatch instead
            tell(table_ptr, state_ptr, 2 + number % 2, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)


def forget_claims(state_ptr):
    """For the next launch: no tile is claimed, and nobody has come; by one program, when all have."""
    tl.store(state_ptr + 27, 0)
    tl.store(state_ptr + 28, 0)


def end_round(
    signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, num_elements, scalars_ptrs, num_scalars, number, digest,
    rank, has_waited, programs,
    SCALARS: tl.constexpr, NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, POLLS: tl.constexpr, POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """The last of `programs` tells that this rank has read (pattern free); what was given up becomes NaN before.

    That is `out_ptr [num_elements]` and, with `SCALARS`, both `scalars_ptrs [num_scalars]` (one may stand twice).
    `has_waited`: for this round; else the last program does it.
    """
    if is_last(state_ptr, 8, programs):
        if has_waited == 0:
            wait_for(
                signals_ptr, state_ptr, desk_ptr, 6 + number % 2 * NUM_CHUNKS, number, digest, POLLS,
                POLLS_PER_LOOK, True, EP_SIZE, EP_BLOCK,
            )  # fmt: skip
        if tl.load(state_ptr + 4) != 0:
            fill(out_ptr, float("nan"), 0, wide(num_elements), BLOCK)
            if SCALARS:
                fill(scalars_ptrs[0], float("nan"), 0, wide(num_scalars), BLOCK)
                fill(scalars_ptrs[1], float("nan"), 0, wide(num_scalars), BLOCK)
        tl.store(state_ptr, number)
        tl.store(state_ptr + 1, number)
        forget_claims(state_ptr)
        tell(table_ptr, state_ptr, 4, rank, number * 2147483648, EP_SIZE, EP_BLOCK)
        count_wait(state_ptr, desk_ptr, 6)


ROUND_ENDS = (fill, begin_round, forget_claims, end_round)
