"""The kernels for small batches compile for a Hopper GPU, move rows by 16 bytes, and signal in the right orders."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossdock.kernels import small, small_combine, small_dispatch
from crossdock.kernels.launch import wrapped

_SHARED = {
    "PUSHES": True, "TAKES": True, "FUSED": True, "TOP_K": 8, "NUM_CHUNKS": 8, "EP_SIZE": 4, "EP_BLOCK": 4,
    "POLLS": 1 << 30, "POLLS_PER_LOOK": 256,
}  # fmt: skip
_DISPATCH = {
    **_SHARED, "ALIGNMENT": 16, "NUM_EXPERTS": 256, "NUM_LOCAL": 64, "LOCAL_BLOCK": 64, "TOP_K_BLOCK": 8,
    "ENTERS": True, "EXPERT_BLOCK": 64,
    "PLACES": 2048, "BLOCK": 1, "OTHERS": 1024, "COUNTED": 128, "READ_TOKENS": 128,
}  # fmt: skip
_COMBINE = {**_SHARED, "WEIGHTED": True, "SCALARS": False, "TOP_K_BLOCK": 8}
_WITH_SCALARS = {**_COMBINE, "WEIGHTED": False, "SCALARS": True}
_ROWS = ("x_ptr", "rows_ptr", "out_ptr", "inbox_rows_ptr")
_INT32 = ("inbox_places_ptr", "inbox_counts_ptr", "groups_ptr", "home_ptr", "row_of_slot_ptr", "ends_ptr")
_FLOAT32 = (
    "scores_ptr", "inbox_scores_ptr", "row_scores_ptr", "kept_scores_ptr", "weights_ptr", "scalars_ptr",
    "out_scalars_ptr", "overflowed_ptr",
)  # fmt: skip


def compiled(kernel: Callable[..., None], helpers: Any, constants: dict[str, Any], rows: str, num_warps: int) -> str:
    """PTX, for tensors that begin at multiples of 16 bytes."""
    kinds = {**dict.fromkeys(_ROWS, f"*{rows}"), **dict.fromkeys(_INT32, "*i32"), **dict.fromkeys(_FLOAT32, "*fp32")}
    names = list(inspect.signature(kernel).parameters)
    types = {name: kinds.get(name, "*i64") if name.endswith("_ptr") else "i32" for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name.endswith("_ptr")}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(wrapped(kernel, "cuda", helpers), types, constants, aligned)
    options = {"enable_fp_fusion": False, "num_warps": num_warps}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


# Dtype and columns of a tile, its tokens that are pushed and taken, and warps: for 1 token of 7168, and for 128.
@pytest.mark.parametrize(
    ("rows", "cols", "pushed", "taken", "num_warps"),
    [("bf16", 1024, 1, 1, 4), ("fp16", 1024, 4, 8, 8), ("fp32", 512, 4, 8, 8)],
)
@pytest.mark.parametrize(
    ("kernel", "helpers", "constants"),
    [
        (small_dispatch.dispatch_small_kernel, small_dispatch.HELPERS, _DISPATCH),
        (small_combine.combine_small_kernel, small_combine.HELPERS, _COMBINE),
        (small_combine.combine_small_kernel, small_combine.HELPERS, _WITH_SCALARS),
    ],
    ids=["dispatch", "combine", "combine with scalars"],
)
def test_compiles_for_hopper(kernel, helpers, constants, rows, cols, pushed, taken, num_warps):
    if kernel is small_combine.combine_small_kernel:
        taken = min(taken, 4)
    tiles = {"PUSHED_ROWS": pushed, "TAKEN_ROWS": taken, "BLOCK_COLS": cols}
    ptx = compiled(kernel, helpers, {**constants, **tiles}, rows, num_warps)
    assert ".local" not in ptx, "registers spill into memory"
    assert "fma.rn.f32" not in ptx, "a product and a sum were fused"
    assert "atom.global.sys.acquire.add.u64" in ptx and "atom.global.sys.release.add.u64" in ptx
    # All rows go by 16 bytes; only what is filled with NaN or zero may go by less.
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 2 and len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) >= 2
    assert not re.findall(r"ld\.global\S*\.(b16|u16)", ptx)


def test_the_table_has_every_kernel():
    written = {
        name for module in (small, small_dispatch, small_combine) for name in vars(module) if name.endswith("_kernel")
    }
    assert written == {"wait_small_kernel", "dispatch_small_kernel", "combine_small_kernel"}
