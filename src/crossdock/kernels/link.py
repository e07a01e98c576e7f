"""Copy tiles of rows to or from the memory of peers as fast as plain loads and stores go: a probe of the link.

Every rank has a buffer of `ep_size` parts, one for each rank, each of `tiles_per_peer` tiles. Tile t of a rank's own
rows belongs to the peer `t % (ep_size - 1)` places behind it, and there to tile `t // (ep_size - 1)` of this rank's
part, so that all peers are busy at once and no two ranks touch the same rows. Three ranks, two tiles a peer: rank 1's
tiles 0 to 3 belong to ranks 2, 0, 2, 0, there to tiles 0, 0, 1, 1 of part 1, which are tiles 2, 2, 3, 3 of the buffer.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import launch

BLOCK_ROWS = 8
_BLOCK_COLS, _NUM_WARPS = 1024, 16


def copy_tiles_kernel(
    table_ptr,  # [EP] int64: addresses of [EP * tiles_per_peer * BLOCK_ROWS, D], the dtype of `rows`
    rows_ptr,  # [num_tiles * BLOCK_ROWS, D], in this rank's memory
    num_tiles,
    tiles_per_peer,
    rank,
    PUT: tl.constexpr,
    HIDDEN_DIM: tl.constexpr,
    EP_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Copy every so many-th tile. No signals: the host meets its peers before and after."""
    line = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        peer = (rank + 1 + tile % (EP_SIZE - 1)) % EP_SIZE
        there = rank * tiles_per_peer + tile // (EP_SIZE - 1)
        base = tl.load(table_ptr + peer).to(tl.pointer_type(rows_ptr.dtype.element_ty))
        # An address out of a table could be any: without the hint it would be accessed element by element.
        base = tl.multiple_of(base, 16)
        remote = base + (there * BLOCK_ROWS + line)[:, None] * HIDDEN_DIM
        own = rows_ptr + (tile * BLOCK_ROWS + line)[:, None] * HIDDEN_DIM
        for start in tl.static_range(0, HIDDEN_DIM, BLOCK_COLS):
            col = (start + tl.arange(0, BLOCK_COLS))[None, :]
            if PUT:
                tl.store(remote + col, tl.load(own + col))
            else:
                tl.store(own + col, tl.load(remote + col))


def launch_copy_tiles(
    table: torch.Tensor, rows: torch.Tensor, rank: int, tiles_per_peer: int, num_blocks: int, *, put: bool
) -> None:
    """Put `rows [tiles_per_peer * (ep_size - 1) * 8, D]` into the peers' buffers, or get them from there.

    `table [ep_size]` int64 holds the addresses of the buffers; D is a multiple of 1024.
    """
    ep_size, hidden_dim = table.shape[0], rows.shape[1]
    assert ep_size > 1 and hidden_dim % _BLOCK_COLS == 0
    launch(
        copy_tiles_kernel,
        (num_blocks,),
        rows.device,
        table,
        rows,
        tiles_per_peer * (ep_size - 1),
        tiles_per_peer,
        rank,
        PUT=put,
        HIDDEN_DIM=hidden_dim,
        EP_SIZE=ep_size,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLS=_BLOCK_COLS,
        num_warps=_NUM_WARPS,
    )
