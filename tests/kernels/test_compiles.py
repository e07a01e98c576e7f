"""Every kernel compiles for a Hopper GPU on a machine without one, without spilling or fusing products into sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossdock.kernels import gather, leave, place, poison, reduce, score
from crossdock.kernels.launch import wrapped
from crossdock.kernels.rounding import round_to


class _Case(NamedTuple):
    kernel: Callable[..., None]
    types: dict[str, str]
    constants: dict[str, Any]
    helpers: tuple[Callable[..., Any], ...] = ()
    num_warps: int = 8


_SHARE = {"num_arrived": "i32", "num_lower": "i32", "num_own": "i32", "first_expert": "i32"}
_BLOCK = {"TOP_K": 7, "TOP_K_BLOCK": 8, "NUM_LOCAL": 64, "BLOCK": 32, "CHUNK": 32}
_HEADER = {"TOP_K": 8, "TOP_K_BLOCK": 8, "NUM_LOCAL": 64, "EP_SIZE": 4, "NUM_WORDS": 80, "ROWS_WORD": 13}
_CASES = [
    _Case(
        gather.gather_rows_kernel,
        {"table_ptr": "*bf16", "index_ptr": "*i64", "out_ptr": "*bf16", "flag_ptr": "*i64",
         "num_rows": "i32", "hidden_dim": "i32",
         "table_stride": "i32"},
        {"DIVISOR": 8, "FLAGGED": True, "BLOCK_ROWS": 4, "BLOCK_COLS": 1024},
    ),
    _Case(
        reduce.reduce_rows_kernel,
        {"rows_ptr": "*bf16", "index_ptr": "*i64", "weights_ptr": "*fp32", "out_ptr": "*bf16", "flag_ptr": "*i64",
         "num_places": "i32",
         "hidden_dim": "i32", "num_terms": "i32"},
        {"WEIGHTS": 1, "FLAGGED": True, "BLOCK_PLACES": 4, "BLOCK_COLS": 1024},
        (round_to,),
    ),
    _Case(
        score.score_gradient_kernel,
        {
            "rows_ptr": "*bf16", "grad_ptr": "*bf16", "scores_ptr": "*fp32", "out_ptr": "*fp32", "num_rows": "i32",
            "hidden_dim": "i32",
        },
        {"BLOCK_ROWS": 1, "BLOCK_COLS": 2048},
        (round_to,),
        4,
    ),
    _Case(poison.poison_kernel, {"flag_ptr": "*i64", "out_ptr": "*bf16", "num_elements": "i64"}, {"BLOCK": 1024}),
    _Case(
        leave.count_leaving_kernel,
        {"ids_ptr": "*i64", "headers_ptr": "*i64", "num_tokens": "i32"},
        {**_HEADER, "BAD_WORD": 14, "COUNTS_WORD": 15, "BLOCK": 32},
        (),
        4,
    ),
    _Case(
        leave.place_leaving_kernel,
        {"ids_ptr": "*i32", "headers_ptr": "*i64", "token_of_sent_ptr": "*i64", "sent_of_token_ptr": "*i64",
         "sent_slot_ptr": "*i64", "num_tokens": "i32", "rank": "i32"},
        {**_HEADER, "EP_BLOCK": 4, "BLOCK": 1024},
    ),
    _Case(place.count_block_kernel, {"slots_ptr": "*i32", "counts_ptr": "*i32", **_SHARE}, _BLOCK, (place.table_row,)),
    _Case(
        place.scan_blocks_kernel,
        {"counts_ptr": "*i32", "totals_ptr": "*i64", "num_blocks": "i32"},
        {"NUM_LOCAL": 64, "BLOCK": 256},
        (),
        4,
    ),
    _Case(
        place.pad_groups_kernel,
        {"totals_ptr": "*i64", "starts_ptr": "*i64", "ends_ptr": "*i32"},
        {"ALIGNMENT": 16, "NUM_LOCAL": 64, "BLOCK": 64},
        (),
        4,
    ),
    _Case(
        place.place_block_kernel,
        {"slots_ptr": "*i32", "before_ptr": "*i32", "starts_ptr": "*i64", "row_of_slot_ptr": "*i64",
         "slot_of_row_ptr": "*i64", "row_scores_ptr": "*fp32", **_SHARE},
        _BLOCK,
        (place.table_row,),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.kernel.__name__)
def test_compiles_for_hopper(case):
    source = ASTSource(
        wrapped(case.kernel, "cuda", case.helpers),
        {**case.types, **dict.fromkeys(case.constants, "constexpr")},
        case.constants,
    )
    options = {"enable_fp_fusion": False, "num_warps": case.num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".local" not in compiled.asm["ptx"], "registers spill into memory"
    assert "fma.rn.f32" not in compiled.asm["ptx"], "a product and a sum were fused"


def test_the_table_has_every_kernel():
    written = {
        kernel
        for module in (gather, leave, place, poison, reduce, score)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }
    assert written == {case.kernel for case in _CASES}
