"""The sender's part of a small batch's dispatch: push rows, their places and counts (see `small_dispatch.py`)."""

from __future__ import annotations

import triton.language as tl

from .signal import wide


def known_ids(ids_ptr, at, inside, NUM_EXPERTS: tl.constexpr):
    """Ids as int32; -1 where there is none, or none in the range."""
    ids = tl.load(ids_ptr + at, mask=inside, other=-1)
    return tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, -1).to(tl.int32)


def push_rows(
    x_ptr, ids_ptr, rows_table_ptr, half, num_tokens, hidden_dim, x_stride, max_tokens, rank, first, step,
    NUM_EXPERTS: tl.constexpr, NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, EP_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Push tiles of rows to every other rank that wants them, as program `first` of `step`."""
    inboxes = ()
    for nth in tl.static_range(1, EP_SIZE):
        address = tl.load(rows_table_ptr + (rank + nth) % EP_SIZE)
        inboxes += (tl.multiple_of(address.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16),)  # type: ignore[assignment]
    num_parts = (hidden_dim + BLOCK_COLS - 1) // BLOCK_COLS
    num_tiles = (num_tokens + BLOCK_ROWS - 1) // BLOCK_ROWS * num_parts
    for tile in range(first, num_tiles, step):
        token = tile // num_parts * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        col = tile % num_parts * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        brought, inside = token < num_tokens, (col < hidden_dim)[None, :]
        token = token.to(tl.int64)
        value = tl.load(x_ptr + token[:, None] * x_stride + col[None, :], mask=brought[:, None] & inside, other=0.0)
        ranks = tl.full((BLOCK_ROWS,), 0, tl.int32)  # one bit each
        for slot in tl.static_range(TOP_K):
            ids = known_ids(ids_ptr, token * TOP_K + slot, brought, NUM_EXPERTS)
            ranks = tl.where(ids >= 0, ranks | (1 << (tl.where(ids >= 0, ids, 0) // NUM_LOCAL)), ranks)
        at = ((half * EP_SIZE + rank) * max_tokens + token)[:, None] * hidden_dim + col[None, :]
        for nth in tl.static_range(1, EP_SIZE):
            wanted = (ranks >> ((rank + nth) % EP_SIZE)) & 1
            tl.store(inboxes[nth - 1] + at, value, mask=(wanted != 0)[:, None] & inside)


def push_places(
    ids_ptr, scores_ptr, places_table_ptr, scores_table_ptr, home_ptr, half, num_tokens, max_tokens, rank, block,
    NUM_EXPERTS: tl.constexpr, NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr,
    PLACES: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Number the slots of one block of tokens among all that name the same expert, and push them to every rank."""
    flat = tl.arange(0, BLOCK * TOP_K_BLOCK)
    token, slot = block * BLOCK + flat // TOP_K_BLOCK, flat % TOP_K_BLOCK
    at, inside = token * TOP_K + slot, (token < num_tokens) & (slot < TOP_K)
    ids = known_ids(ids_ptr, at, inside, NUM_EXPERTS)
    score = tl.load(scores_ptr + at, mask=inside, other=0.0)
    peer = tl.arange(0, EP_BLOCK)
    places_there = tl.load(places_table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.int32))
    scores_there = tl.load(scores_table_ptr + peer, mask=peer < EP_SIZE, other=0).to(tl.pointer_type(tl.float32))
    before = tl.full((BLOCK * TOP_K_BLOCK,), 0, tl.int32)
    end = tl.where((block + 1) * BLOCK < num_tokens, (block + 1) * BLOCK, num_tokens) * TOP_K
    for start in range(0, end, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_ids = known_ids(ids_ptr, other, other < end, NUM_EXPERTS)
        same = (ids[:, None] == other_ids[None, :]) & (other[None, :] < at[:, None])
        before += tl.reduce(same.to(tl.int32), 1, tl.standard._sum_combine)
    home = tl.where(ids >= 0, ids // NUM_LOCAL, -1)
    tl.store(home_ptr + at, home, mask=inside)
    place = tl.where(ids >= 0, ids % NUM_LOCAL, 0) * PLACES + before
    there = (half * EP_SIZE + rank) * max_tokens * TOP_K + at
    pushed = (peer < EP_SIZE)[:, None] & inside[None, :]
    here = home[None, :] == peer[:, None]
    tl.store(places_there[:, None] + there[None, :], tl.where(here, place[None, :], -1), mask=pushed)
    tl.store(scores_there[:, None] + there[None, :], score[None, :], mask=pushed & here)


def push_counts(
    ids_ptr, counts_table_ptr, half, num_tokens, rank, to_rank, NUM_EXPERTS: tl.constexpr, NUM_LOCAL: tl.constexpr,
    LOCAL_BLOCK: tl.constexpr, TOP_K: tl.constexpr, EP_SIZE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Count the slots of every expert of one rank, and push that to it."""
    counts_there = tl.load(counts_table_ptr + to_rank).to(tl.pointer_type(tl.int32))
    local = tl.arange(0, LOCAL_BLOCK)
    count = tl.full((LOCAL_BLOCK,), 0, tl.int32)
    end = num_tokens * TOP_K
    for start in range(0, end, COUNTED):
        at = start + tl.arange(0, COUNTED)
        expert = known_ids(ids_ptr, at, at < end, NUM_EXPERTS) - to_rank * NUM_LOCAL
        count += tl.reduce((local[:, None] == expert[None, :]).to(tl.int32), 1, tl.standard._sum_combine)
    tl.store(counts_there + (half * EP_SIZE + rank) * NUM_LOCAL + local, count, mask=local < NUM_LOCAL)


def tell_brought(
    ids_ptr, words, half, rank, num_tokens, NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, EP_SIZE: tl.constexpr,
    EP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count rows that other ranks get and ids outside the range; tell all what this rank brings."""
    slot = tl.arange(0, TOP_K_BLOCK)
    num_sent, num_bad = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, num_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = (token < num_tokens)[:, None] & (slot < TOP_K)[None, :]
        ids = tl.load(ids_ptr + token[:, None] * TOP_K + slot[None, :], mask=inside, other=-1)
        bad = ((ids < -1) | (ids >= NUM_EXPERTS)).to(tl.int32)
        num_bad += tl.reduce(tl.reduce(bad, 1, tl.standard._sum_combine), 0, tl.standard._sum_combine)
        home = tl.where((ids < 0) | (ids >= NUM_EXPERTS), -1, ids // NUM_LOCAL).to(tl.int32)
        for to_rank in range(EP_SIZE):
            named = ((home == to_rank) & (to_rank != rank)).to(tl.int32)
            sent = (tl.reduce(named, 1, tl.standard._sum_combine) > 0).to(tl.int32)
            num_sent += tl.reduce(sent, 0, tl.standard._sum_combine)
    peer = tl.arange(0, EP_BLOCK)
    nothing = tl.full((EP_BLOCK,), 0, tl.int64)
    brought = wide(num_tokens) + num_bad.to(tl.int64) * 4294967296
    tl.store(words + (23 + half) * EP_SIZE + rank, nothing + brought, mask=peer < EP_SIZE)
    return num_sent


def send_share(
    x_ptr, ids_ptr, scores_ptr, tables_ptr, home_ptr, words, half, num_tokens, hidden_dim, x_stride, max_tokens, rank,
    first, worker, workers,
    NUM_EXPERTS: tl.constexpr, NUM_LOCAL: tl.constexpr, LOCAL_BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr, PLACES: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
    PUSHED_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
    COUNTED: tl.constexpr, READ_TOKENS: tl.constexpr,
):  # fmt: skip
    """All that worker `worker` of `workers` pushes, or the first program, the clerk, tells; the rows it has counted.

    `tables_ptr [4, EP]`: addresses of all ranks' inboxes, see `small.Inbox`.
    """
    num_sent = tl.full((), 0, tl.int32)
    if worker >= 0:
        if EP_SIZE > 1:
            push_rows(
                x_ptr, ids_ptr, tables_ptr, half, num_tokens, hidden_dim, x_stride, max_tokens, rank, worker, workers,
                NUM_EXPERTS, NUM_LOCAL, TOP_K, EP_SIZE, PUSHED_ROWS, BLOCK_COLS,
            )  # fmt: skip
        # From the other end, since those at this end have more rows.
        for item in range(workers - 1 - worker, EP_SIZE + (num_tokens + BLOCK - 1) // BLOCK, workers):
            if item < EP_SIZE:
                push_counts(
                    ids_ptr, tables_ptr + 3 * EP_SIZE, half, num_tokens, rank, item, NUM_EXPERTS, NUM_LOCAL,
                    LOCAL_BLOCK, TOP_K, EP_SIZE, COUNTED,
                )  # fmt: skip
            else:
                push_places(
                    ids_ptr, scores_ptr, tables_ptr + EP_SIZE, tables_ptr + 2 * EP_SIZE, home_ptr, half, num_tokens,
                    max_tokens, rank, item - EP_SIZE, NUM_EXPERTS, NUM_LOCAL, TOP_K, TOP_K_BLOCK, PLACES, EP_SIZE,
                    EP_BLOCK, BLOCK, OTHERS,
                )  # fmt: skip
    if first == 0:
        num_sent = tell_brought(
            ids_ptr, words, half, rank, num_tokens, NUM_EXPERTS, NUM_LOCAL, TOP_K, TOP_K_BLOCK, EP_SIZE, EP_BLOCK,
            READ_TOKENS,
        )  # fmt: skip
    return num_sent


SENDING = (known_ids, push_rows, push_places, push_counts, tell_brought, send_share)
