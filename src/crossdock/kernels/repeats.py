"""How many tokens name an expert twice, where it was declared that none does.

Ids `[[3, 3], [1, 2], [-1, -1]]`: one token does; -1 names no expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch

_REPEATS = 5  # place among the ledger's words of trouble
_BLOCK = 128


def count_repeats_kernel(
    ids_ptr,  # [T, K] int64
    troubles_ptr,  # [6] int64
    told_ptr,  # [6] int64 that the host can read
    num_tokens,
    TOP_K: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Look at a block of tokens, every pair of slots."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    repeats = tl.full((BLOCK,), 0, tl.int32)
    for later in range(1, TOP_K):
        slot = tl.load(ids_ptr + token * TOP_K + later, mask=inside, other=-1)
        for earlier in range(0, later):
            same = slot == tl.load(ids_ptr + token * TOP_K + earlier, mask=inside, other=-1)
            repeats |= (same & (slot >= 0)).to(tl.int32)
    num = tl.reduce(repeats, 0, tl.standard._sum_combine).to(tl.int64)
    if num > 0:
        before = tl.atomic_add(troubles_ptr + WORD, num, sem="relaxed")
        tl.store(told_ptr + WORD, before + num)  # any of the blocks' numbers will do: it is not 0


def launch_count_repeats(expert_ids: torch.Tensor, troubles: torch.Tensor, told: torch.Tensor) -> None:
    """Add the tokens of `expert_ids [T, top_k]` (int64) that name an expert twice to the ledger's words of trouble."""
    num_tokens, top_k = expert_ids.shape
    if num_tokens and top_k > 1:
        launch(
            count_repeats_kernel,
            (triton.cdiv(num_tokens, _BLOCK),),
            expert_ids.device,
            expert_ids.contiguous(),
            troubles,
            told,
            num_tokens,
            TOP_K=top_k,
            WORD=_REPEATS,
            BLOCK=_BLOCK,
            num_warps=4,
        )
