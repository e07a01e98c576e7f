"""The account of one dispatch: what its experts wanted and got, added to its layer's words.

Two experts that want 3 and 2 rows, alignment 2, 4 rows of capacity: the first takes up all 4 with its padding. The
demand is 6 with padding, 5 rows are wanted and 3 kept, so one dispatch more has overflowed; its rows end at 4.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from .account import Account
from .blocks import power_of_two
from .launch import launch

_MOST_EXPERTS_AT_ONCE = 1024


def tally(
    wanted_ptr,  # [e] int64
    kept_ptr,  # [e] int64
    offsets_ptr,  # [e] int32
    bad_ids_ptr,  # [EP] int64
    words_ptr,  # [9 + e] int64: calls, tokens, rows, wanted, overflows, demand, capacity, peaks, then wanted by expert
    troubles_ptr,  # [6] int64: overflows, layer, demand, capacity, bad ids, repeats
    told_ptr,  # [6] int64 that the host can read: the same, written where something is wrong
    overflowed_ptr,  # [1] float32
    end_ptr,  # [1] int64: out
    layer,
    num_tokens,
    capacity,  # -1: as many rows as came
    bound,  # tokens of any rank in this call, at least 1
    policy,
    num_local,
    ep_size,
    alignment,
    EXPERT_BLOCK: tl.constexpr,
    EP_BLOCK: tl.constexpr,
):
    """Add one dispatch to its layer's account, by one program; that may have written what is read, before a barrier."""
    expert = tl.arange(0, EXPERT_BLOCK)
    total = tl.full((EXPERT_BLOCK,), 0, tl.int64)
    demand = tl.full((EXPERT_BLOCK,), 0, tl.int64)
    kept = tl.full((EXPERT_BLOCK,), 0, tl.int64)
    for start in range(0, num_local, EXPERT_BLOCK):
        inside = start + expert < num_local
        rows = tl.load(wanted_ptr + start + expert, mask=inside, other=0)
        total += rows
        demand += (rows + alignment - 1) // alignment * alignment
        kept += tl.load(kept_ptr + start + expert, mask=inside, other=0)
        account = words_ptr + 9 + start + expert
        tl.store(account, tl.load(account, mask=inside, other=0) + rows, mask=inside)
    num_wanted = tl.reduce(total, 0, tl.standard._sum_combine)
    num_kept = tl.reduce(kept, 0, tl.standard._sum_combine)
    num_asked = tl.reduce(demand, 0, tl.standard._sum_combine)
    rank = tl.arange(0, EP_BLOCK)
    bad_ids = tl.load(bad_ids_ptr + rank, mask=rank < ep_size, other=0)
    num_bad = tl.reduce(bad_ids, 0, tl.standard._sum_combine)
    dropped = num_wanted > num_kept

    tl.store(words_ptr, tl.load(words_ptr) + 1)
    tl.store(words_ptr + 1, tl.load(words_ptr + 1) + num_tokens)
    tl.store(words_ptr + 2, tl.load(words_ptr + 2) + num_kept)
    tl.store(words_ptr + 3, tl.load(words_ptr + 3) + num_wanted)
    tl.store(words_ptr + 4, tl.load(words_ptr + 4) + dropped.to(tl.int64))
    demand_before = tl.load(words_ptr + 5)
    capacity_before = tl.load(words_ptr + 6)
    bounded = (capacity > 0) & (capacity_before > 0)
    # A share of its capacity as a product, which nothing rounds.
    tighter = num_asked * capacity_before > demand_before * capacity
    first_bound = (capacity > 0) & (capacity_before < 0)
    larger = (capacity < 0) & (capacity_before < 0) & (num_asked > demand_before)
    tighter = (bounded & tighter) | first_bound | larger | (capacity_before == 0)
    tl.store(words_ptr + 5, num_asked, mask=tighter)
    tl.store(words_ptr + 6, tl.full((), 0, tl.int64) + capacity, mask=tighter)
    tl.store(end_ptr, tl.load(offsets_ptr + num_local - 1).to(tl.int64))

    peak = (num_asked * 1048576 + bound - 1) // bound  # rows per 2**20 tokens
    tl.store(words_ptr + 7, tl.maximum(tl.load(words_ptr + 7), peak))
    if dropped & (policy > 0):
        tl.store(words_ptr + 8, tl.maximum(tl.load(words_ptr + 8), peak))
        tl.store(overflowed_ptr, 1.0)
    if dropped & (policy > 1):
        overflows = tl.load(troubles_ptr)
        first = overflows == 0
        tl.store(troubles_ptr + 1, tl.full((), 0, tl.int64) + layer, mask=first)
        tl.store(troubles_ptr + 2, num_asked, mask=first)
        tl.store(troubles_ptr + 3, tl.full((), 0, tl.int64) + capacity, mask=first)
        tl.store(troubles_ptr, overflows + 1)
        tl.store(told_ptr, overflows + 1)
    if num_bad > 0:
        bad_before = tl.load(troubles_ptr + 4)
        tl.store(troubles_ptr + 4, bad_before + num_bad)
        tl.store(told_ptr + 4, bad_before + num_bad)


def tally_kernel(
    wanted_ptr, kept_ptr, offsets_ptr, bad_ids_ptr, words_ptr, troubles_ptr, told_ptr, overflowed_ptr, end_ptr,
    layer, num_tokens, capacity, bound, policy, num_local, ep_size, alignment,
    EXPERT_BLOCK: tl.constexpr, EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """`tally`, in a launch of its own: of a dispatch whose kernels have not done it."""
    tally(
        wanted_ptr, kept_ptr, offsets_ptr, bad_ids_ptr, words_ptr, troubles_ptr, told_ptr, overflowed_ptr, end_ptr,
        layer, num_tokens, capacity, bound, policy, num_local, ep_size, alignment, EXPERT_BLOCK, EP_BLOCK,
    )  # fmt: skip


def launch_tally(entry: Any, account: Account, alignment: int) -> torch.Tensor:
    """Enter a `ledger.Entry`: `[1]` int64, the end of the last expert's rows."""
    wanted, num_local, ep_size = entry.wanted, entry.wanted.shape[0], entry.bad_ids.shape[0]
    end = torch.empty(1, dtype=torch.int64, device=wanted.device)
    launch(
        tally_kernel, (1,), wanted.device,
        wanted, entry.kept, entry.expert_offsets, entry.bad_ids, *account.books, end,
        account.layer, entry.num_tokens, entry.capacity, entry.num_tokens_per_rank, account.policy, num_local, ep_size,
        alignment,
        EXPERT_BLOCK=experts_at_once(num_local), EP_BLOCK=power_of_two(ep_size), num_warps=1, helpers=(tally,),
    )  # fmt: skip
    return end


def experts_at_once(num_local: int) -> int:
    """EXPERT_BLOCK for so many local experts."""
    return min(power_of_two(num_local), _MOST_EXPERTS_AT_ONCE)
