"""Dispatch of a small batch in one kernel: push rows to their ranks, tell, wait, and copy them to their experts' rows.

Senders do what they alone can do cheaply. They number the slots of an expert among their own (a slot's place is that
number and the expert), and count them. A receiver then knows where every slot goes from the counts `[ep_size, e]`
alone, and each of its programs works that out for itself, so programs of a launch never wait for each other.

Two ranks, one local expert, one slot a token; rank 0 names expert 0 with its token, rank 1 expert 1 and then 0. Rank 0
gets counts `[[1], [1]]` and places `[[0], [-1]]` and `[[-1], [0]]`: the group of its expert begins at row 0, slots of
rank 1 in it at row 1, so `row_of_slot = [[[0], [-1]], [[-1], [1]]]` (the example of `arrange.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl

from .account import Account
from .blocks import power_of_two, up_to
from .launch import Chosen, launch
from .publish import Opening, new_scores
from .signal import (
    ENDLESS,
    NUM_CHUNKS,
    POLLS_PER_LOOK,
    SIGNALLING,
    Board,
    begin_call,
    count_wait,
    group_constants,
    varying,
)
from .small import (
    SMALL,
    Inbox,
    agreed,
    arrive,
    compared,
    count_round,
    launch_wait_small,
    part_of,
    places_of,
    poison,
    spread,
    tell_call,
    wait_for_all,
)
from .small_receive import RECEIVING, clear_padding, fetch_tile, find_groups, place_tile
from .small_send import SENDING, send_share
from .tally import experts_at_once, tally


class SmallGroups(NamedTuple):
    """What a dispatch tells beside rows and their scores; what is not named here is as in `arrange.Groups`.

    Attributes:
        home_of_slot: `[T, K]` int32: the rank that has each slot's expert, -1 for none.
        num_sent: `[1]` int64: rows that other ranks get from here.
    """

    row_of_slot: torch.Tensor
    padding: torch.Tensor
    tokens_per_expert: torch.Tensor
    wanted: torch.Tensor
    expert_offsets: torch.Tensor
    bad_ids: torch.Tensor
    home_of_slot: torch.Tensor
    num_sent: torch.Tensor


def dispatch_small_kernel(
    signals_ptr, table_ptr, state_ptr, desk_ptr,
    x_ptr,  # [T, D], rows `x_stride` elements apart, at a multiple of 16 bytes
    ids_ptr,  # [T, K] int64 or int32
    scores_ptr,  # [T, K] float32
    inbox_rows_ptr,  # [2, EP, S_max, D]
    inbox_places_ptr,  # [2, EP, S_max, K] int32
    inbox_scores_ptr,  # [2, EP, S_max, K] float32
    inbox_counts_ptr,  # [2, EP, e] int32
    inbox_tables_ptr,  # [4, EP] int64: addresses of the four above
    groups_ptr,  # [programs, EP + 2, e] int32
    home_ptr,  # [T, K] int32
    num_sent_ptr,  # [1] int64
    sent_ptr,  # [1] int64, added to
    row_of_slot_ptr,  # [EP, S, K] int32
    padding_ptr,  # [2, e] int64
    kept_ptr,  # [e] int64
    wanted_ptr,  # [e] int64
    ends_ptr,  # [e] int32
    bad_ids_ptr,  # [EP] int64
    row_scores_ptr,  # [R] float32
    kept_scores_ptr,  # [R] float32: the same once more
    out_ptr,  # [R, D]
    words_ptr,  # these five as `tally` takes them
    troubles_ptr,
    told_ptr,
    overflowed_ptr,
    rows_end_ptr,
    rank,
    digest,
    call,  # `varying`: its number
    tokens,  # `varying`: T
    limits,  # `varying`: S
    room,  # `varying`: R
    entry,  # `varying`: the layer's place and the policy, see `Account`: 4 * layer + policy
    max_tokens,  # S_max
    hidden_eighths,  # D / 8
    stride_eighths,  # `x_stride` / 8
    PUSHES: tl.constexpr,
    TAKES: tl.constexpr,
    FUSED: tl.constexpr,  # whether this kernel waits
    ENTERS: tl.constexpr,  # whether the dispatch is entered into an account
    ALIGNMENT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    LOCAL_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr,
    PUSHED_ROWS: tl.constexpr,
    TAKEN_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens whose slots are numbered at a time
    OTHERS: tl.constexpr,
    COUNTED: tl.constexpr,
    READ_TOKENS: tl.constexpr,  # that the clerk looks at, at a time
    POLLS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
):  # fmt: skip
    """The first program is the clerk; the others share the work. A program alone does both."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    workers = tl.where(programs > 1, programs - 1, 1)
    worker = tl.where(programs > 1, first - 1, 0)
    num_tokens, bound, num_rows = (tokens - 3) // 2, (limits - 3) // 2, (room - 3) // 2
    hidden_dim, x_stride = hidden_eighths * 8, stride_eighths * 8  # so they are known to be multiples of a vector
    number, small = tl.load(state_ptr), tl.load(state_ptr + 11)
    if PUSHES:
        number += 1
        small += 1
    half = small % 2
    row_scores_ptrs = (row_scores_ptr, kept_scores_ptr)
    peer = tl.arange(0, EP_BLOCK)
    words = tl.load(table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.int64))
    given_up = agreed(state_ptr + 4)
    num_sent = tl.full((), 0, tl.int32)
    if PUSHES:
        if given_up == 0:
            num_sent = send_share(
                x_ptr, ids_ptr, scores_ptr, inbox_tables_ptr, home_ptr, words, half, num_tokens, hidden_dim, x_stride,
                max_tokens, rank, first, worker, workers, NUM_EXPERTS, NUM_LOCAL, LOCAL_BLOCK, TOP_K, TOP_K_BLOCK,
                PLACES, EP_SIZE, EP_BLOCK, PUSHED_ROWS, BLOCK_COLS, BLOCK, OTHERS, COUNTED, READ_TOKENS,
            )  # fmt: skip
            if first == 0:
                tell_call(words, number, digest, rank, NUM_CHUNKS, EP_SIZE, EP_BLOCK)
            arrive(words, state_ptr, first, programs, rank, EP_SIZE, EP_BLOCK)
        if first == 0:
            begin_call(state_ptr, desk_ptr, call, FUSED)
            tl.store(num_sent_ptr, num_sent.to(tl.int64))
            tl.store(sent_ptr, tl.load(sent_ptr) + num_sent)
            if not FUSED:
                count_round(state_ptr, number, small)
    code = tl.full((), 1, tl.int32)
    if FUSED:
        code = wait_for_all(
            signals_ptr, state_ptr, desk_ptr, small, number, digest, given_up, POLLS, POLLS_PER_LOOK,
            NUM_CHUNKS, EP_SIZE, EP_BLOCK,
        )  # fmt: skip
        if first == 0:
            count_wait(state_ptr, desk_ptr, 6)
            if code == 1:
                count_round(state_ptr, number, small)
    if TAKES:
        alive = code == 1
        brought_ptr = signals_ptr + (23 + half) * EP_SIZE
        if first == 0:
            brought = tl.load(brought_ptr + peer, mask=(peer < EP_SIZE) & alive, other=0)
            tl.store(bad_ids_ptr + peer, brought >> 32, mask=peer < EP_SIZE)
        groups = groups_ptr + first * (NUM_LOCAL * (EP_SIZE + 2))
        num_parts = (hidden_dim + BLOCK_COLS - 1) // BLOCK_COLS
        num_tiles = EP_SIZE * ((bound + TAKEN_ROWS - 1) // TAKEN_ROWS) * num_parts
        # A tile's loads are on their way while groups are found, or while the tile before it is stored.
        value, brought, places = fetch_tile(
            x_ptr, inbox_rows_ptr, inbox_places_ptr, brought_ptr, half, tl.where(worker < 0, num_tiles, worker),
            num_tiles, num_tokens, bound, hidden_dim, x_stride, max_tokens, rank, TOP_K, EP_SIZE, TAKEN_ROWS,
            BLOCK_COLS,
        )  # fmt: skip
        find_groups(
            inbox_counts_ptr, groups, padding_ptr, kept_ptr, wanted_ptr, ends_ptr, half, num_rows, alive, first == 0,
            ALIGNMENT, NUM_LOCAL, LOCAL_BLOCK, EP_SIZE, EP_BLOCK,
        )  # fmt: skip
        if ENTERS:
            if first == 0:
                tally(
                    wanted_ptr, kept_ptr, ends_ptr, bad_ids_ptr, words_ptr, troubles_ptr, told_ptr, overflowed_ptr,
                    rows_end_ptr, (entry - 3) // 8, num_tokens, num_rows, tl.where(bound > 0, bound, 1),
                    (entry - 3) // 2 % 4, NUM_LOCAL, EP_SIZE, ALIGNMENT, EXPERT_BLOCK, EP_BLOCK,
                )  # fmt: skip
        if worker >= 0:
            for tile in range(worker, num_tiles, workers):
                next_value, next_brought, next_places = fetch_tile(
                    x_ptr, inbox_rows_ptr, inbox_places_ptr, brought_ptr, half, tile + workers, num_tiles, num_tokens,
                    bound, hidden_dim, x_stride, max_tokens, rank, TOP_K, EP_SIZE, TAKEN_ROWS, BLOCK_COLS,
                )  # fmt: skip
                place_tile(
                    value, brought, places, inbox_scores_ptr, groups, row_of_slot_ptr, row_scores_ptrs, out_ptr, half,
                    tile, bound, hidden_dim, max_tokens, rank, alive, NUM_LOCAL, TOP_K, PLACES, EP_SIZE, TAKEN_ROWS,
                    BLOCK_COLS,
                )  # fmt: skip
                value, brought, places = next_value, next_brought, next_places
            if ALIGNMENT > 1:
                clear_padding(
                    groups, row_scores_ptrs, out_ptr, hidden_dim, worker, workers, NUM_LOCAL, EP_SIZE, BLOCK_COLS
                )
        if code > 1:
            poison(out_ptr, num_rows.to(tl.int64) * hidden_dim, first, programs, BLOCK_COLS)
            poison(row_scores_ptr, num_rows, first, programs, BLOCK_COLS)
            poison(kept_scores_ptr, num_rows, first, programs, BLOCK_COLS)


HELPERS = (*SIGNALLING, *SMALL, *SENDING, *RECEIVING, tally)


def launch_dispatch_small(
    board: Board,
    opening: Opening,
    inbox: Inbox,
    x: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    sent: torch.Tensor,
    bound: int,
    alignment: int,
    num_experts: int,
    out: torch.Tensor,
    account: Account | None = None,
    rows_end: torch.Tensor | None = None,
) -> tuple[SmallGroups, tuple[torch.Tensor, torch.Tensor]]:
    """A whole dispatch of `x [T, D]`, which no rank has more than `bound` tokens of, into `out [R, D]`.

    Args:
        board: this rank's.
        opening: of this call.
        inbox: see there.
        x: as the dtype of `out`.
        scores: `[T, K]` float32.
        ids: `[T, K]` int64 or int32.
        sent: `[1]` int64: rows that other ranks get from here are added.
        bound: S, at most S_max.
        alignment: groups are padded to a multiple of this.
        num_experts: of all ranks.
        out: R is the capacity.
        account: where the dispatch is entered, or None.
        rows_end: `[1]` int64: out, with an account: the end of the last expert's rows.

    Returns:
        The groups, and `row_scores [R]` float32, 0 on padding rows, twice: each in memory of its own. Once a wait was
        given up there are no groups, and rows and scores are NaN.
    """
    (num_tokens, top_k), num_local = ids.shape, num_experts // board.ep_size
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    ids, scores = ids.contiguous(), scores.contiguous()
    groups = _new_groups(board, bound, num_tokens, top_k, num_local)
    row_scores, kept_scores = new_scores(board, out.shape[0])
    books: tuple[torch.Tensor, ...] = (groups.wanted,) * 5
    entry = 0
    if account is not None and rows_end is not None:
        books, entry = (*account.books, rows_end), 4 * account.layer + account.policy

    def run(*, pushes: bool, takes: bool) -> None:
        plan = _plan(
            board.fused, board.ep_size, inbox.max_programs, inbox.max_tokens, bound, top_k, num_local, out.shape[1],
            out.element_size(), alignment, pushes, takes, account is not None,
        )  # fmt: skip
        launch(
            dispatch_small_kernel, (plan.programs,), board.device, *board.tensors,
            x, ids, scores, inbox.rows, inbox.places, inbox.scores, inbox.counts, inbox.tables, inbox.groups,
            groups.home_of_slot, groups.num_sent, sent, groups.row_of_slot, groups.padding, groups.tokens_per_expert,
            groups.wanted, groups.expert_offsets, groups.bad_ids, row_scores, kept_scores, out, *books,
            board.rank, opening.digest, varying(opening.number), varying(num_tokens), varying(bound),
            varying(out.shape[0]), varying(entry), inbox.max_tokens, out.shape[1] // 8, x.stride(0) // 8,
            chosen=plan.chosen,
        )  # fmt: skip

    if board.fused:
        run(pushes=True, takes=True)
    else:
        run(pushes=True, takes=False)
        launch_wait_small(board, opening.digest)
        run(pushes=False, takes=True)
    return groups, (row_scores, kept_scores)


class _Plan(NamedTuple):
    programs: int
    chosen: Chosen


@lru_cache(1024)
def _plan(
    fused: bool,
    ep_size: int,
    max_programs: int,
    max_tokens: int,
    bound: int,
    top_k: int,
    num_local: int,
    hidden_dim: int,
    num_bytes: int,
    alignment: int,
    pushes: bool,
    takes: bool,
    enters: bool,
) -> _Plan:
    """How many programs share a launch, in which pieces, for elements of so many bytes; no time to find out anew."""
    cols, workers, slots = part_of(hidden_dim, num_bytes), max(max_programs - 1, 1), power_of_two(top_k)
    parts = -(-hidden_dim // cols)
    if fused:
        pushed, taken = spread(bound, parts, workers, 4), spread(ep_size * bound, parts, workers, 8)
        block = spread(bound, 1, workers, 8)
    else:
        pushed = taken = block = up_to(64, bound)
    pieces = max(-(-bound // pushed) * parts + ep_size + -(-bound // block), ep_size * -(-bound // taken) * parts)
    chosen = Chosen(
        HELPERS,
        PUSHES=pushes, TAKES=takes, FUSED=fused, ENTERS=enters, ALIGNMENT=alignment, NUM_EXPERTS=num_local * ep_size,
        NUM_LOCAL=num_local, LOCAL_BLOCK=power_of_two(num_local), EXPERT_BLOCK=experts_at_once(num_local),
        TOP_K=top_k, TOP_K_BLOCK=slots, PLACES=places_of(max_tokens, top_k), NUM_CHUNKS=NUM_CHUNKS,
        PUSHED_ROWS=pushed, TAKEN_ROWS=taken, BLOCK_COLS=cols,
        BLOCK=block, OTHERS=compared(fused, block * slots, bound * top_k),
        COUNTED=compared(fused, num_local, bound * top_k), READ_TOKENS=up_to(128, bound),
        POLLS=ENDLESS, POLLS_PER_LOOK=POLLS_PER_LOOK, num_warps=4 if max(pushed, taken) == 1 else 8,
        **group_constants(ep_size),
    )  # fmt: skip
    return _Plan(min(max_programs, 1 + pieces) if fused else 1, chosen)


def _new_groups(board: Board, bound: int, num_tokens: int, top_k: int, num_local: int) -> SmallGroups:
    device = board.device
    parts = (num_local, board.ep_size)  # what is returned to the caller lies apart
    wanted, bad_ids = torch.empty(sum(parts), dtype=torch.int64, device=device).split_with_sizes(parts)
    return SmallGroups(
        row_of_slot=torch.empty(board.ep_size, bound, top_k, dtype=torch.int32, device=device),
        padding=torch.empty(2, num_local, dtype=torch.int64, device=device),
        tokens_per_expert=torch.empty(num_local, dtype=torch.int64, device=device),
        wanted=wanted,
        expert_offsets=torch.empty(num_local, dtype=torch.int32, device=device),
        bad_ids=bad_ids,
        home_of_slot=torch.empty(num_tokens, top_k, dtype=torch.int32, device=device),
        num_sent=torch.empty(1, dtype=torch.int64, device=device),
    )
