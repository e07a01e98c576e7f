"""The kernels over shared memory compile for a Hopper GPU, and signal with the orders that `signal.py` names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossdock.kernels import arrange, combine, publish, pull, scalars, signal
from crossdock.kernels.launch import wrapped
from crossdock.kernels.rounding import round_to
from crossdock.kernels.signal import SIGNALLING


class _Case(NamedTuple):
    kernel: Callable[..., None]
    constants: dict[str, Any]
    helpers: tuple[Callable[..., Any], ...] = ()
    num_warps: int = 8

    def __str__(self) -> str:
        return self.kernel.__name__


_EP = {"EP_SIZE": 4, "EP_BLOCK": 4, "NUM_CHUNKS": 8}
_WAITS = {"FUSED": True, "POLLS": 1 << 30, "POLLS_PER_LOOK": 256, **_EP}
_TILE = {"BLOCK_ROWS": 4, "BLOCK_COLS": 1024}
_TELL = _Case(signal.tell_kernel, {"WORD": 6, "BUFFER": 1, "BEGINS": True, **_EP}, SIGNALLING, 1)
_WAIT = _Case(signal.wait_kernel, {"WORD": 4, "BUFFER": 1, "COUNTS": True, **_EP}, SIGNALLING, 1)
_ROUTING = _Case(
    publish.publish_routing_kernel,
    {
        "NUM_EXPERTS": 256, "NUM_LOCAL": 64, "TOP_K": 7, "TOP_K_BLOCK": 8, "BLOCK": 64,
        **{name: value for name, value in _WAITS.items() if name != "NUM_CHUNKS"},
    },
    SIGNALLING,
    4,
)  # fmt: skip
_ARRANGE = {
    "COPIES": True, "ALIGNMENT": 16, "TOP_K": 7, "TOP_K_BLOCK": 8, "NUM_LOCAL": 64, "LOCAL_BLOCK": 64, "BLOCK": 32,
    "OTHERS": 32, "SCAN_BLOCK": 256, **_WAITS, **_TILE,
}  # fmt: skip
_ARRANGERS = (
    *SIGNALLING, publish.copy_chunks, arrange.count_block, arrange.sum_expert, arrange.fit_groups, arrange.place_block,
    signal.meet,
)  # fmt: skip
_COMBINE = {"GIVES": True, "TAKES": True, "WEIGHTED": True, "TOP_K": 8, **_WAITS, **_TILE}
_COMBINERS = (
    *SIGNALLING, round_to, pull.fill, combine.lay_out_shares, combine.add_ranks, combine.add_slot,
)  # fmt: skip
_CASES = [
    _TELL,
    _WAIT,
    _ROUTING,
    _Case(
        publish.publish_rows_kernel,
        {"BEGINS": True, **_WAITS, **_TILE},
        (*SIGNALLING, publish.copy_chunks),
    ),
    _Case(arrange.arrange_kernel, {"STEPS": 7, **_ARRANGE}, _ARRANGERS),
    _Case(arrange.arrange_kernel, {"STEPS": 3, **_ARRANGE}, _ARRANGERS),
    _Case(arrange.arrange_kernel, {"STEPS": 4, **_ARRANGE, "COPIES": False}, _ARRANGERS),
    _Case(
        pull.pull_rows_kernel,
        {"SCORED": True, "PADDED": True, "NUM_LOCAL": 64, "TOP_K": 8, **_WAITS, **_TILE},
        (*SIGNALLING, pull.fill),
    ),
    _Case(combine.combine_kernel, {"BY_SLOT": False, "FIRST": True, "LAST": True, **_COMBINE}, _COMBINERS),
    _Case(combine.combine_kernel, {"BY_SLOT": True, "FIRST": True, "LAST": False, **_COMBINE}, _COMBINERS),
    _Case(combine.combine_kernel, {"BY_SLOT": True, "FIRST": False, "LAST": True, **_COMBINE}, _COMBINERS),
    _Case(
        scalars.swap_scalars_kernel,
        {"GIVES": True, "TAKES": True, "BLOCK": 1024, **_WAITS},
        (*SIGNALLING, pull.fill),
        4,
    ),
]

# What each pointer leads to; int64 where nothing is said.
_ROWS = ("x_ptr", "rows_ptr", "out_ptr", "shelf_ptr", "shares_ptr")
_INT32 = ("before_ptr", "ends_ptr", "home_ptr", "row_of_slot_ptr")
_FLOAT32 = (
    "scores_ptr", "row_weights_ptr", "slot_weights_ptr", "row_scores_ptr", "sums_ptr", "values_ptr", "slips_ptr",
)  # fmt: skip


def _type_of(name: str, rows: str, kernel: Callable[..., None]) -> str:
    if name == "out_ptr" and kernel is scalars.swap_scalars_kernel:
        return "*fp32"
    kinds = {**dict.fromkeys(_ROWS, f"*{rows}"), **dict.fromkeys(_INT32, "*i32"), **dict.fromkeys(_FLOAT32, "*fp32")}
    if not name.endswith("_ptr"):
        return "i32"
    return kinds.get(name, "*i64")


def compiled(case: _Case, rows: str = "bf16", *, ones: bool = False, sixteens: Sequence[str] = ()) -> str:
    """PTX; with `ones`, every integer argument is 1, which triton compiles as a constant.

    Pointers are multiples of 16 bytes, as all storage is, and so are the integers named by `sixteens`.
    """
    params = list(inspect.signature(case.kernel).parameters)
    names = [name for name in params if name not in case.constants]
    types = {name: _type_of(name, rows, case.kernel) for name in names}
    constants = dict(case.constants)
    if ones:
        constants |= {name: 1 for name in names if not name.endswith("_ptr")}
        types = {name: kind for name, kind in types.items() if name.endswith("_ptr")}
    aligned = [name for name in types if name.endswith("_ptr") or name in sixteens]
    source = ASTSource(
        wrapped(case.kernel, "cuda", case.helpers),
        {**types, **dict.fromkeys(constants, "constexpr")},
        constants,
        attrs={(params.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"enable_fp_fusion": False, "num_warps": case.num_warps}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_compiles_for_hopper(case):
    for rows, ones in (("bf16", False), ("fp32", True), ("fp16", False)):
        if rows == "fp16" and not any(name in inspect.signature(case.kernel).parameters for name in _ROWS):
            continue
        ptx = compiled(case, rows, ones=ones)
        assert ".local" not in ptx, "registers spill into memory"
        assert "fma.rn.f32" not in ptx, "a product and a sum were fused"


def test_signals_are_ordered_over_the_whole_system():
    assert "atom.global.sys.release.exch.b64" in compiled(_TELL)
    waiting = compiled(_WAIT)
    assert waiting.count("atom.global.sys.acquire.add.u64") == 2
    assert "atom.global.sys.relaxed.add.u64" in waiting
    assert "atom.global.gpu.acq_rel.add.u64" in compiled(_ROUTING)


# -- rows move in vectors ---------------------------------------------------------------------------------------------


def _moves(ptx: str) -> set[str]:
    """Loads and stores of global memory, without those of words: `ld.global.v4.b32` and its like."""
    found = set(re.findall(r"\b(?:ld|st)\.(?:volatile\.)?global(?:\.v\d)?\.b\d+", ptx))
    return {move for move in found if ".v" in move or move.endswith((".b16", ".b8"))}


def _of(*kernels: Callable[..., None]) -> list[_Case]:
    return [case for case in _CASES if case.kernel in kernels]


@pytest.mark.parametrize("rows", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "case",
    _of(pull.pull_rows_kernel, combine.combine_kernel, publish.publish_rows_kernel, arrange.arrange_kernel),
    ids=str,
)
def test_rows_move_in_vectors_of_16_bytes(case: _Case, rows: str):
    copies = case.constants.get("COPIES", True)
    moves = _moves(compiled(case, rows, sixteens=("hidden_dim", "x_stride")))
    whole = {"ld.global.v4.b32", "st.global.v4.b32"}
    # `fill`, which makes padding zero and what was given up NaN, has one row's columns for all threads of a program.
    filling = {"st.global.v2.b32"} if pull.fill in case.helpers else set()
    assert moves - filling == (whole if copies else set())


def test_rows_that_are_no_multiple_of_16_bytes_move_otherwise():
    (case,) = _of(publish.publish_rows_kernel)
    assert "ld.global.b16" in _moves(compiled(case, sixteens=("hidden_dim",)))  # its rows lie any distance apart


# -- warps of one program stay together -------------------------------------------------------------------------------

# What an atomic gives back reaches all warps through shared memory; what a load gives may differ from warp to warp.
_BROADCAST = ("st.shared", "bar.sync", "ld.shared")


def _parts_of_polling(ptx: str) -> list[list[str]]:
    """The body of every loop that polls, without labels and remarks."""
    lines = [line.strip() for line in ptx.splitlines()]
    lines = [line for line in lines if line and not line.startswith((".loc", "//", "$L__tmp"))]
    bodies = []
    for polls in (at for at, line in enumerate(lines) if "atom.global.sys.relaxed" in line):
        begins = max(at for at in range(polls) if lines[at].startswith("$L__BB"))
        label = lines[begins].split(":")[0]
        ends = next(
            at for at in range(polls, len(lines)) if re.search(rf"bra(\.uni)?\s+{re.escape(label)};", lines[at])
        )
        bodies.append(lines[begins + 1 : ends + 1])
    return bodies


def _parts_ways(body: Sequence[str]) -> str:
    """How the warps of a program could part in this loop; "" if they cannot."""
    if any(re.search(r"\bld\.(volatile|global|relaxed|acquire)", line) for line in body):
        return "a load decides"
    after = "\n".join(body).split("atom.")[1:]
    for part in after:
        places = [part.find(word) for word in _BROADCAST]
        branch = part.find("bra")
        if -1 in places or places != sorted(places) or -1 < branch < places[-1]:
            return f"an atomic's result is not passed on: {part}"
    return ""


def polling_by_loads_kernel(word_ptr, out_ptr, target):
    """Poll as no kernel may: every warp decides by what it has loaded itself."""
    told = tl.atomic_add(word_ptr, 0, sem="relaxed", scope="sys")
    while told < target:
        told = tl.load(word_ptr, volatile=True)
        tl.atomic_add(out_ptr, 1, sem="relaxed", scope="sys")
        tl.debug_barrier()


@pytest.mark.parametrize("case", [case for case in _CASES if signal.wait_for in case.helpers], ids=str)
def test_nothing_but_atomics_decides_while_a_program_waits(case: _Case):
    bodies = _parts_of_polling(compiled(case))
    waits = case.constants.get("FUSED", case is _WAIT) and case.constants.get("STEPS", 7) % 2 == 1
    assert bool(bodies) == waits
    for body in bodies:
        assert not _parts_ways(body)
        assert sum("atom.global.sys" in line for line in body) == 3


def test_a_load_that_decides_is_found():
    source = ASTSource(
        wrapped(polling_by_loads_kernel, "cuda"), {"word_ptr": "*i64", "out_ptr": "*i64", "target": "i32"}, {}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    bodies = [body for body in _parts_of_polling(ptx[ptx.index("$L__BB") :])]
    assert [_parts_ways(body) for body in bodies] == ["a load decides"]


def test_the_table_has_every_kernel():
    modules = (arrange, combine, publish, pull, scalars, signal)
    written = {kernel for module in modules for name, kernel in vars(module).items() if name.endswith("_kernel")}
    assert written == {case.kernel for case in _CASES}
