"""Push a rank's rows to the ranks that want them: each row once to a rank, into this rank's part of its staging buffer.

Three ranks, rank 1, two tokens with two slots: `home_of_slot = [[0, 2], [1, 0]]` pushes token 0 to ranks 2 and 0 and
token 1 to rank 0, there to rows 0 and 1 of part 1. What stays here is not pushed: whoever spreads it reads it where it
is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from .signal import is_last, may_lay_out, tell, wide


class Staging(NamedTuple):
    """Where ranks push rows.

    Attributes:
        own: `[ep_size, max_tokens, D]`, shared: part q is what rank q pushes here.
        table: `[ep_size]` int64: addresses of all ranks' ones.
        chunk_len: tokens of a chunk: what is pushed is told chunk by chunk.
    """

    own: torch.Tensor
    table: torch.Tensor
    chunk_len: int


def tell_empty_chunks(
    table_ptr, state_ptr, number, digest, rank, num_tokens, chunk_len,
    NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Tell the chunks of round `number` that have no tokens; by one program."""
    for chunk in range(NUM_CHUNKS):
        if chunk * chunk_len >= num_tokens:
            word = 6 + number % 2 * NUM_CHUNKS + chunk
            tell(table_ptr, state_ptr, word, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)


def tell_if_last(
    table_ptr, state_ptr, number, digest, rank, token, num_tokens, chunk_len, programs_of_a_tile,
    NUM_CHUNKS: tl.constexpr, EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Once all tiles of the chunk that `token` belongs to are pushed, tell it (pattern publish)."""
    chunk = token // chunk_len
    tokens_left = num_tokens - chunk * chunk_len
    tiles_of_chunk = (tl.where(tokens_left < chunk_len, tokens_left, chunk_len) + BLOCK_ROWS - 1) // BLOCK_ROWS
    if is_last(state_ptr, chunk, tiles_of_chunk * programs_of_a_tile):
        word = 6 + number % 2 * NUM_CHUNKS + chunk
        tell(table_ptr, state_ptr, word, rank, number * 2147483648 + digest, EP_SIZE, EP_BLOCK)


def part_of(table_ptr, there, rank, max_tokens, hidden_dim, dtype: tl.constexpr):
    """Where this rank's part of a shared buffer of rank `there` begins; `max_tokens * hidden_dim` elements a part."""
    staging_ptr = tl.load(table_ptr + there).to(tl.pointer_type(dtype))
    # An address out of a table could be any: without the hint it would be accessed element by element.
    return tl.multiple_of(staging_ptr, 16) + wide(rank) * max_tokens * hidden_dim


def homes_at(home_ptr, inside, NUM_LOCAL: tl.constexpr, EP_SIZE: tl.constexpr):
    """Which ranks have the experts of slots, -1 for none: as it stands there, or with `NUM_LOCAL` from ids."""
    home = tl.load(home_ptr, mask=inside, other=-1)
    if NUM_LOCAL > 0:
        known = (home >= 0) & (home < EP_SIZE * NUM_LOCAL)
        home = tl.where(known, tl.where(known, home, 0).to(tl.int32) // NUM_LOCAL, -1)
    return home


def push_chunks(
    x_ptr, home_ptr, staging_table_ptr, table_ptr, state_ptr, number, digest, rank, num_tokens, max_tokens, first,
    step, hidden_dim, x_stride, chunk_len,
    FUSED: tl.constexpr, NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    EP_SIZE: tl.constexpr, EP_BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Push tiles of tokens, chunk after chunk, as program `first` of `step`, and tell the chunks of round `number`.

    `home_ptr [T, K]` holds ranks, or with `NUM_LOCAL`, the experts of each, ids.
    """
    if FUSED:
        if first == 0:
            tell_empty_chunks(
                table_ptr, state_ptr, number, digest, rank, num_tokens if EP_SIZE > 1 else 0, chunk_len,
                NUM_CHUNKS, EP_SIZE, EP_BLOCK,
            )  # fmt: skip
    if EP_SIZE > 1:
        num_peers = EP_SIZE - 1
        free = may_lay_out(state_ptr)
        span = hidden_dim if PARTS == 1 else BLOCK_COLS
        num_tiles = num_peers * ((num_tokens + BLOCK_ROWS - 1) // BLOCK_ROWS) * PARTS
        for tile in range(first, num_tiles, step):
            # Peers in turn, so that all are busy at once; every rank begins with the one behind it.
            block, to_rank = tile // PARTS // num_peers, (rank + 1 + tile // PARTS % num_peers) % EP_SIZE
            token = wide(block) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            in_range = token < num_tokens
            wants = tl.full((BLOCK_ROWS,), 0, tl.int32)
            for slot in tl.static_range(TOP_K):
                home = homes_at(home_ptr + token * TOP_K + slot, in_range, NUM_LOCAL, EP_SIZE)
                wants = tl.where(home == to_rank, 1, wants)
            wanted = (wants > 0)[:, None]
            there_ptr = part_of(staging_table_ptr, to_rank, rank, max_tokens, hidden_dim, x_ptr.dtype.element_ty)
            for start in range(tile % PARTS * span, tile % PARTS * span + span, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)
                inside = (col < hidden_dim)[None, :]
                value = tl.load(x_ptr + token[:, None] * x_stride + col[None, :], mask=wanted & inside, other=0.0)
                tl.store(there_ptr + token[:, None] * hidden_dim + col[None, :], value, mask=wanted & inside & free)
            if FUSED:
                tell_if_last(
                    table_ptr, state_ptr, number, digest, rank, block * BLOCK_ROWS, num_tokens, chunk_len,
                    num_peers * PARTS, NUM_CHUNKS, EP_SIZE, EP_BLOCK, BLOCK_ROWS,
                )  # fmt: skip


PUSHING = (tell_empty_chunks, tell_if_last, part_of, homes_at, push_chunks)
