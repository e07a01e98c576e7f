"""One float32 per row, back to the slot it came from.

Two ranks, one slot a token. Rank 0 has `row_of_slot = [[[0]], [[1]]]` and values `[7, 9]`: it lays out 7 for rank 0's
token and 9 for rank 1's. Rank 1, whose token has its expert on rank 0 (`home_of_slot = [[0]]`), fetches `[[9]]`; where
`home_of_slot` is -1 it takes 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import up_to
from .header import write_header
from .launch import launch

_CUDA_BLOCK, _CPU_BLOCK = 1024, 1 << 15


def lay_out_scalars_kernel(
    values_ptr,  # [R] float32
    row_of_slot_ptr,  # [EP, S, K] int32; below 0 is no row
    words_ptr,  # [W] int64
    scalars_ptr,  # [EP, max_tokens, K] float32, shared
    headers_ptr,  # [2, W] int64, shared
    state_ptr,  # [1 + num_buffers] int64
    num_slots,  # S * K
    max_slots,  # max_tokens * K
    OPENING: tl.constexpr,  # whether this round carries a header
    NUM_WORDS: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lay out one block of one rank's slots (pattern publish)."""
    if OPENING:  # noqa: SIM102  # known when compiling, the other when running
        if tl.program_id(0) + tl.program_id(1) == 0:
            write_header(words_ptr, headers_ptr, state_ptr, NUM_WORDS, WORDS_BLOCK)
    to_rank = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    row = tl.load(row_of_slot_ptr + to_rank * num_slots + slot, mask=inside, other=-1).to(tl.int64)
    value = tl.load(values_ptr + row, mask=row >= 0, other=0.0)
    tl.store(scalars_ptr + to_rank * max_slots + slot, value, mask=inside & (row != -1))


def fetch_scalars_kernel(
    scalars_table_ptr,  # [EP] int64: addresses of float32 [EP, max_tokens, K]
    home_of_slot_ptr,  # [T, K] int32
    out_ptr,  # [T, K] float32
    num_slots,  # T * K
    max_slots,  # max_tokens * K
    rank,
    BLOCK: tl.constexpr,
):
    """Fetch one block of slots, each from the rank of its expert (pattern acquire)."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    home = tl.load(home_of_slot_ptr + slot, mask=inside, other=-1)
    scalars_ptr = tl.load(scalars_table_ptr + home, mask=home >= 0, other=0).to(tl.pointer_type(tl.float32))
    value = tl.load(scalars_ptr + (tl.full((), 0, tl.int64) + rank) * max_slots + slot, mask=home >= 0, other=0.0)
    tl.store(out_ptr + slot, value, mask=inside)


def launch_lay_out_scalars(
    values: torch.Tensor,
    row_of_slot: torch.Tensor,
    scalars: torch.Tensor,
    header: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """Fill `scalars [ep_size, max_tokens, K]` with `values [R]` float32 by slot; `header` as in `launch_pre_add`."""
    ep_size, num_places, top_k = row_of_slot.shape
    words, headers, state = (row_of_slot,) * 3 if header is None else header
    num_words = 1 if header is None else words.shape[0]
    block = _block(values.device, num_places * top_k)
    launch(
        lay_out_scalars_kernel,
        (max(1, triton.cdiv(num_places * top_k, block)), ep_size),
        values.device,
        values.contiguous(),
        row_of_slot,
        words,
        scalars,
        headers,
        state,
        num_places * top_k,
        scalars.shape[1] * top_k,
        OPENING=header is not None,
        NUM_WORDS=num_words,
        WORDS_BLOCK=triton.next_power_of_2(num_words),
        BLOCK=block,
        num_warps=4,
        helpers=(write_header,),
    )


def launch_fetch_scalars(
    scalars_table: torch.Tensor, home_of_slot: torch.Tensor, rank: int, max_tokens: int
) -> torch.Tensor:
    """`[T, K]` float32: what the ranks have laid out for this one's slots, 0 where a slot has no expert."""
    out = torch.empty(home_of_slot.shape, dtype=torch.float32, device=home_of_slot.device)
    if out.numel():
        block = _block(out.device, out.numel())
        launch(
            fetch_scalars_kernel,
            (triton.cdiv(out.numel(), block),),
            out.device,
            scalars_table,
            home_of_slot,
            out,
            out.numel(),
            max_tokens * home_of_slot.shape[1],
            rank,
            BLOCK=block,
            num_warps=4,
        )
    return out


def _block(device: torch.device, num_slots: int) -> int:
    return _CUDA_BLOCK if device.type == "cuda" else up_to(_CPU_BLOCK, num_slots)
