"""One float32 per row, back to the slot it came from: pushed into the slips of the slot's rank, which takes it there.

Two ranks, one slot a token. Rank 0 has `row_of_slot = [[[0]], [[1]]]` and values `[7, 9]`: it pushes 7 into its own
slips and 9 into those of rank 1, both to `[0, 0, 0]`: from rank 0, token 0, slot 0. Rank 1, whose token has its
expert on rank 0 (`home_of_slot = [[0]]`), takes `[[9]]`; where `home_of_slot` is -1 it takes 0, and so it does where a
slot was dropped.

Here that is a round of its own; with a `fast` combine scalars ride in the round of the rows (`combine.py`). Either way,
whoever pushes them has waited until all ranks have read what was pushed last, be it slips, rows or routing (`STAGING`
in `state`). Heeding slips alone would let them go out while a slow rank still reads the rows of the round before, which
gains next to nothing: nobody ends a round before that rank has come to it, and it comes when it has read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .blocks import up_to
from .launch import launch
from .publish import Opening
from .push import part_of
from .round import ROUND_ENDS, begin_round, end_round
from .signal import (
    CHUNKS,
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    READ,
    SIGNALLING,
    Board,
    is_last,
    may_lay_out,
    tell,
    varying,
    wait_for,
    wide,
)
from .waits import launch_tell, launch_wait

_CUDA_BLOCK, _CPU_BLOCK = 1024, 1 << 15
_MAX_PROGRAMS = 32


class Slips(NamedTuple):
    """Where ranks push scalars.

    Attributes:
        own: `[ep_size, max_tokens, K]` float32, shared: part q is what rank q pushes for this rank's slots.
        table: `[ep_size]` int64: addresses of all ranks' ones.
    """

    own: torch.Tensor
    table: torch.Tensor


class Scalars(NamedTuple):
    """Scalars that ride home with rows.

    Attributes:
        values: `[R]` float32: of the rows here.
        out: `[T, K]` float32: of this rank's slots, 0 where one has no row.
        slips: see there.
    """

    values: torch.Tensor
    out: torch.Tensor
    slips: Slips


# -- for kernels to call ----------------------------------------------------------------------------------------------


def slots_of(token, in_range, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr):
    """The slots of tokens `[N]`, counted over all tokens: `[N, TOP_K_BLOCK]`; and which there are."""
    slot = tl.arange(0, TOP_K_BLOCK)[None, :]
    return token[:, None] * TOP_K + slot, in_range[:, None] & (slot < TOP_K)


def scalars_of(values_ptr, row_of_slot_ptr, slot, inside):
    """The scalars of one rank's slots, 0 where one was dropped; and which slots are here, dropped ones among them."""
    row = tl.load(row_of_slot_ptr + slot, mask=inside, other=-1).to(tl.int64)
    return tl.load(values_ptr + row, mask=row >= 0, other=0.0), row != -1


def pushed_for(slips_ptr, home_ptr, slot, inside, max_slots):
    """What has been pushed for slots of this rank into its slips, 0 where one has no expert."""
    home = tl.load(home_ptr + slot, mask=inside, other=-1)
    return tl.load(slips_ptr + wide(home) * max_slots + slot, mask=home >= 0, other=0.0)


RIDING = (slots_of, scalars_of, pushed_for)


# -- a round of their own ---------------------------------------------------------------------------------------------


def swap_scalars_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    values_ptr,  # [R] float32
    row_of_slot_ptr,  # [EP, S, K] int32; below 0 is no row
    slips_ptr,  # [EP, max_tokens, K] float32, shared
    slips_table_ptr,  # [EP] int64: addresses of float32 [EP, max_tokens, K]
    home_ptr,  # [T, K] int32
    out_ptr,  # [T, K] float32
    rank,
    digest,
    call,  # `varying`: its number
    there,  # `varying`: S * K
    here,  # `varying`: T * K
    max_slots,  # max_tokens * K
    GIVES: tl.constexpr,
    TAKES: tl.constexpr,
    FUSED: tl.constexpr,  # whether this kernel waits and tells
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """Push scalars, tell, wait, take those of own slots (patterns free, publish, acquire)."""
    first, step = tl.program_id(0), tl.num_programs(0)
    number = tl.load(state_ptr)
    if FUSED:
        number += 1  # the last program of this launch counts it
    num_there, num_here = (there - 3) // 2, (here - 3) // 2
    if GIVES:
        begin_round(
            signals_ptr, table_ptr, state_ptr, desk_ptr, number, digest, rank, call, first, FUSED, EP_SIZE, EP_BLOCK,
            POLLS, POLLS_PER_LOOK,
        )  # fmt: skip
        may = may_lay_out(state_ptr)
        num_blocks = (num_there + BLOCK - 1) // BLOCK
        for block in range(first, EP_SIZE * num_blocks, step):
            to_rank = wide(block // num_blocks)
            slot = wide(block % num_blocks) * BLOCK + tl.arange(0, BLOCK)
            value, known = scalars_of(values_ptr, row_of_slot_ptr + to_rank * num_there, slot, slot < num_there)
            there_ptr = part_of(slips_table_ptr, to_rank, rank, max_slots, 1, tl.float32)
            tl.store(there_ptr + slot, value, mask=known & may)
        if FUSED:
            if is_last(state_ptr, 9, step):
                word = 6 + number % 2 * NUM_CHUNKS
                tell(table_ptr, state_ptr, word, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)
    if TAKES:
        if FUSED:
            word = 6 + number % 2 * NUM_CHUNKS
            wait_for(
                signals_ptr, state_ptr, desk_ptr, word, number, digest, POLLS, POLLS_PER_LOOK, True, EP_SIZE, EP_BLOCK
            )
        for block in range(first, (num_here + BLOCK - 1) // BLOCK, step):
            slot = wide(block) * BLOCK + tl.arange(0, BLOCK)
            inside = slot < num_here
            tl.store(out_ptr + slot, pushed_for(slips_ptr, home_ptr, slot, inside, max_slots), mask=inside)
        if FUSED:
            end_round(
                signals_ptr, table_ptr, state_ptr, desk_ptr, out_ptr, num_here, (out_ptr, out_ptr), 0, number, digest,
                rank, True, step, False, NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK, POLLS, POLLS_PER_LOOK,
            )  # fmt: skip


def launch_swap_scalars(
    board: Board,
    opening: Opening,
    slips: Slips,
    values: torch.Tensor,
    row_of_slot: torch.Tensor,
    home_of_slot: torch.Tensor,
    max_programs: int,
) -> torch.Tensor:
    """Bring `values [R]` float32 home, by so many programs at most: `[T, K]`, 0 where a slot has no row.

    `row_of_slot [ep_size, S, K]` int32 tells the rows here of all ranks' slots, `home_of_slot [T, K]` int32 the ranks
    of this rank's slots. Once a wait was given up, the result is NaN.
    """
    (ep_size, bound, top_k), values = row_of_slot.shape, values.contiguous()
    out = torch.empty(home_of_slot.shape, dtype=torch.float32, device=board.device)
    most = max(bound, out.shape[0]) * top_k
    block = _CUDA_BLOCK if board.fused else up_to(_CPU_BLOCK, most)

    def run(*, gives: bool, takes: bool) -> None:
        programs = min(max_programs, _MAX_PROGRAMS, max(1, ep_size * -(-most // block))) if board.fused else 1
        launch(
            swap_scalars_kernel, (programs,), board.device, *board.tensors,
            values, row_of_slot, slips.own, slips.table, home_of_slot, out,
            board.rank, opening.digest, varying(opening.number), varying(bound * top_k), varying(out.numel()),
            slips.own.shape[1] * top_k,
            GIVES=gives, TAKES=takes, FUSED=board.fused, NUM_CHUNKS=NUM_CHUNKS, BLOCK=block,
            POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK,
            num_warps=4, helpers=(*SIGNALLING, *ROUND_ENDS, part_of, *RIDING), **board.constants,
        )  # fmt: skip

    if board.fused:
        run(gives=True, takes=True)
        return out
    launch_wait(board, READ, opening.digest)
    run(gives=True, takes=False)
    launch_tell(board, CHUNKS, opening.digest, begins=True)
    launch_wait(board, CHUNKS, opening.digest)
    run(gives=False, takes=True)
    launch_tell(board, READ, opening.digest)
    return out
