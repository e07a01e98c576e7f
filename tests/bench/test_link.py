"""The probe of the link: rows land where they belong, and the kernel compiles to wide accesses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux only")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossdock.bench.movements.cells import ceilings_here
from crossdock.kernels.launch import wrapped
from crossdock.kernels.link import BLOCK_ROWS, copy_tiles_kernel, launch_copy_tiles


def test_the_worked_example():
    """Three ranks, two tiles a peer: see the module."""
    hidden_dim, ep_size, tiles_per_peer = 1024, 3, 2
    buffers = [torch.zeros(ep_size * tiles_per_peer * BLOCK_ROWS, hidden_dim) for _ in range(ep_size)]
    table = torch.tensor([buffer.data_ptr() for buffer in buffers])
    num_rows = (ep_size - 1) * tiles_per_peer * BLOCK_ROWS
    sent = [torch.randn(num_rows, hidden_dim) for _ in range(ep_size)]
    for rank, rows in enumerate(sent):
        launch_copy_tiles(table, rows, rank, tiles_per_peer, 3, put=True)
    tiles = [rows.view(-1, BLOCK_ROWS, hidden_dim) for rows in sent]
    landed = [buffer.view(-1, BLOCK_ROWS, hidden_dim) for buffer in buffers]
    for tile, (peer, place) in enumerate([(2, 2), (0, 2), (2, 3), (0, 3)]):
        assert torch.equal(landed[peer][place], tiles[1][tile])
    for rank, buffer in enumerate(landed):
        own = slice(rank * tiles_per_peer, (rank + 1) * tiles_per_peer)
        assert not buffer[own].any(), "a rank writes nothing to itself"
    for rank, rows in enumerate(sent):
        back = torch.zeros_like(rows)
        launch_copy_tiles(table, back, rank, tiles_per_peer, 2, put=False)
        assert torch.equal(back, rows)


@pytest.mark.parametrize("put", [True, False])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_compiles_for_hopper_with_wide_accesses(put: bool, ep_size: int):
    constants: dict[str, Any] = {
        "PUT": put, "HIDDEN_DIM": 7168, "EP_SIZE": ep_size, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLS": 1024,
    }  # fmt: skip
    types = {"table_ptr": "*i64", "rows_ptr": "*bf16", "num_tiles": "i32", "tiles_per_peer": "i32", "rank": "i32"}
    source = ASTSource(
        wrapped(copy_tiles_kernel, "cuda"),
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        attrs={(1,): [["tt.divisibility", 16]]},
    )
    options = {"num_warps": 16, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert ".local" not in ptx
    assert ptx.count("ld.global.v4") == ptx.count("st.global.v4") == 14  # 7 tiles of 1024, two accesses a thread


@pytest.mark.gpu(2)
def test_the_link_between_two_gpus(gpu_ranks):
    ceilings = gpu_ranks(2).run(ceilings_here, timeout_s=110.0)[0]
    assert "symmetric memory" in ceilings.link
    assert ceilings.put_gb_per_s > 100 and ceilings.get_gb_per_s > 100
    assert set(ceilings.by_blocks["put"]) == {32, 64, 132}
