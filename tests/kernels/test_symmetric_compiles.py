"""The kernels over shared memory compile for a Hopper GPU, and signal with the orders that `signal.py` names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossdock.kernels import add_home, arrange, header, pre_add, publish, pull, scalars, signal
from crossdock.kernels.header import write_header
from crossdock.kernels.launch import wrapped
from crossdock.kernels.rounding import round_to


class _Case(NamedTuple):
    kernel: Callable[..., None]
    constants: dict[str, Any]
    helpers: tuple[Callable[..., Any], ...] = ()
    num_warps: int = 8


_EP = {"EP_SIZE": 4, "EP_BLOCK": 4}
_WORDS = {"NUM_WORDS": 14, "WORDS_BLOCK": 16}
_TILE = {"BLOCK_ROWS": 4, "BLOCK_COLS": 1024}
_SLOTS = {"TOP_K": 7, "TOP_K_BLOCK": 8, "NUM_LOCAL": 64, "BLOCK": 32, "CHUNK": 32}
_SEND = _Case(signal.send_kernel, {"KIND": 0, "WORD": 1, **_EP}, (), 1)
_WAIT = _Case(signal.wait_kernel, {"KIND": 1, "WORD": 1, "POLLS_PER_LOOK": 128, **_EP}, (), 1)
_CASES = [
    _SEND,
    _WAIT,
    _Case(header.read_headers_kernel, _WORDS, (), 1),
    _Case(
        publish.publish_kernel,
        {
            "ROUTED": True,
            "NUM_EXPERTS": 256,
            "NUM_LOCAL": 64,
            "EP_SIZE": 4,
            "TOP_K": 7,
            "TOP_K_BLOCK": 8,
            **_WORDS,
            **_TILE,
        },
        (write_header,),
    ),
    _Case(arrange.count_published_kernel, _SLOTS, (), 4),
    _Case(arrange.scan_published_kernel, {"NUM_LOCAL": 64, "EXPERTS": 1, "BLOCK": 256}, (), 4),
    _Case(arrange.fit_groups_kernel, {"ALIGNMENT": 16, "NUM_LOCAL": 64, "BLOCK": 64}, (), 4),
    _Case(arrange.place_published_kernel, _SLOTS),
    _Case(pull.pull_rows_kernel, {"TOP_K": 8, "EP_SIZE": 4, **_TILE}),
    _Case(pull.zero_padding_kernel, {"NUM_LOCAL": 64, **_TILE}),
    _Case(
        pre_add.pre_add_kernel,
        {"WEIGHTED": True, "OPENING": True, "TOP_K": 8, **_WORDS, **_TILE},
        (write_header, round_to),
    ),
    _Case(add_home.add_ranks_kernel, {"TOP_K": 8, "EP_SIZE": 4, **_TILE}, (round_to,)),
    _Case(add_home.add_slot_kernel, {"TOP_K": 8, "WEIGHTED": True, "FIRST": False, "LAST": True, **_TILE}, (round_to,)),
    _Case(add_home.add_slot_kernel, {"TOP_K": 8, "WEIGHTED": True, "FIRST": True, "LAST": False, **_TILE}, (round_to,)),
    _Case(scalars.lay_out_scalars_kernel, {"OPENING": True, "BLOCK": 1024, **_WORDS}, (write_header,), 4),
    _Case(scalars.fetch_scalars_kernel, {"BLOCK": 1024}, (), 4),
]

# What each pointer leads to; int64 where nothing is said.
_ROWS = ("x_ptr", "rows_ptr", "out_ptr", "shelf_rows_ptr", "partials_ptr")
_INT32 = (
    "counts_ptr", "before_ptr", "ends_ptr", "home_ptr", "home_of_slot_ptr", "row_of_slot_ptr", "shelf_ids_ptr",
)  # fmt: skip
_FLOAT32 = (
    "scores_ptr", "weights_ptr", "shelf_scores_ptr", "row_scores_ptr", "sums_ptr", "values_ptr", "scalars_ptr",
)  # fmt: skip


def _type_of(name: str, rows: str) -> str:
    kinds = {**dict.fromkeys(_ROWS, f"*{rows}"), **dict.fromkeys(_INT32, "*i32"), **dict.fromkeys(_FLOAT32, "*fp32")}
    if not name.endswith("_ptr"):
        return "i64" if name == "max_polls" else "i32"
    return kinds.get(name, "*i64")


def compiled(case: _Case, rows: str = "bf16", *, ones: bool = False) -> str:
    """PTX; with `ones`, every integer argument is 1, which triton compiles as a constant."""
    names = [name for name in inspect.signature(case.kernel).parameters if name not in case.constants]
    types = {name: _type_of(name, rows) for name in names}
    constants = dict(case.constants)
    if ones:
        constants |= {name: 1 for name in names if not name.endswith("_ptr")}
        types = {name: kind for name, kind in types.items() if name.endswith("_ptr")}
    source = ASTSource(
        wrapped(case.kernel, "cuda", case.helpers), {**types, **dict.fromkeys(constants, "constexpr")}, constants
    )
    options = {"enable_fp_fusion": False, "num_warps": case.num_warps}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.kernel.__name__)
def test_compiles_for_hopper(case):
    for rows, ones in (("bf16", False), ("fp32", True), ("fp16", False)):
        if rows == "fp16" and not any(name in inspect.signature(case.kernel).parameters for name in _ROWS):
            continue
        ptx = compiled(case, rows, ones=ones)
        assert ".local" not in ptx, "registers spill into memory"
        assert "fma.rn.f32" not in ptx, "a product and a sum were fused"


def test_signals_are_ordered_over_the_whole_system():
    assert "atom.global.sys.release.exch.b64" in compiled(_SEND)
    waiting = compiled(_WAIT)
    assert waiting.count("atom.global.sys.acquire.add.u64") == 2
    assert "ld.volatile.global.b64" in waiting


def test_the_table_has_every_kernel():
    modules = (add_home, arrange, header, publish, pull, pre_add, scalars, signal)
    written = {kernel for module in modules for name, kernel in vars(module).items() if name.endswith("_kernel")}
    assert written == {case.kernel for case in _CASES}
