"""The kernels over shared memory compile for a Hopper GPU, and signal with the orders that `signal.py` names.

What is compiled is what their launchers would launch on a GPU.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux only")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossdock.kernels import combine, dispatch, move, round, scalars, signal, waits, weigh
from crossdock.kernels.account import Account
from crossdock.kernels.arrange import Routed
from crossdock.kernels.blocks import Tile
from crossdock.kernels.combine import Routes, launch_combine, launch_combine_slot
from crossdock.kernels.dispatch import Moving, Sizes, launch_count, launch_dispatch, launch_place
from crossdock.kernels.launch import Chosen, wrapped
from crossdock.kernels.move import Moves, launch_move_rows
from crossdock.kernels.publish import Routing
from crossdock.kernels.push import Staging
from crossdock.kernels.scalars import Scalars, Slips, launch_swap_scalars
from crossdock.kernels.signal import CHUNKS, READ, ROUTED
from crossdock.kernels.waits import launch_tell, launch_wait
from crossdock.kernels.weigh import Weighed, launch_weigh_rows
from tests.kernels.symmetric_ranks import CALL, boards

_MODULES = (combine, dispatch, move, scalars, waits, weigh)
_TARGET = GPUTarget("cuda", 90, 32)
_KINDS = {
    torch.int32: "i32", torch.int64: "i64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


class _Case(NamedTuple):
    """One launch: the kernel, its arguments by name, constants, helpers, and the compiler's options."""

    name: str
    kernel: Callable[..., None]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    helpers: tuple[Callable[..., Any], ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def waits(self) -> bool:
        if self.kernel in (weigh.weigh_rows_kernel, weigh.add_parts_kernel):
            return bool(self.constants.get("PUSHES"))
        return bool(self.constants.get("FUSED", self.kernel is waits.wait_kernel))


@cache
def cases(dtype: torch.dtype = torch.bfloat16, x_stride: int = 2048) -> dict[str, _Case]:
    """Every launch that a GPU sees, by name, for rows of this dtype."""
    found: dict[str, _Case] = {}
    name = ""

    def record(
        kernel: Any, grid: Any, device: Any, *args: Any, chosen: Chosen | None = None, helpers: Any = (), **options: Any
    ) -> None:
        helpers, options = (helpers, options) if chosen is None else (chosen.helpers, chosen.options)
        names = list(inspect.signature(kernel).parameters)
        constants = {key: value for key, value in options.items() if key in names}
        rest = {key: value for key, value in options.items() if key not in names}
        part = "own" if options.get("OWN") else "others'"
        here = {
            weigh.find_sources_kernel: "find sources", weigh.weigh_rows_kernel: f"weigh {part} rows",
            weigh.add_parts_kernel: "add parts",
        }.get(kernel, name)  # fmt: skip
        found[here] = _Case(here, kernel, dict(zip(names, args, strict=False)), constants, helpers, rest)

    tokens, hidden, top_k, local = 64, 2048, 7, 64
    (board, *_), count, tile = boards(4), torch.zeros(1, dtype=torch.int64), Tile(4, 1024, 64, 2)
    table, places = board.table, torch.zeros(4, tokens, top_k)
    x, scores, ids = torch.zeros(tokens, x_stride, dtype=dtype)[:, :hidden], places[0], places[0].long()
    home, row_of_slot, rows = ids.int(), places.int(), torch.zeros(320, hidden, dtype=dtype)
    out, weights = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(320)
    routing = Routing(ids, scores, table, table, tokens, 4 * local, count, home, count)
    routed, staging = Routed(row_of_slot, places, tokens), Staging(out.new_zeros(4, tokens, hidden), table, 64)
    moving = Moving(Moves(x, home, staging, tile, tile, padded=True), rows)
    account = Account(count, count, count, weights, 3, 1)
    routes = Routes(row_of_slot, home, count)
    padding, sums = torch.zeros(2, local).long(), torch.zeros(tokens, hidden)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in _MODULES:
            monkeypatch.setattr(module, "launch", record)
        monkeypatch.setattr(signal.Board, "fused", property(lambda board: True))
        monkeypatch.setattr(signal.Board, "compiled", property(lambda board: True))
        monkeypatch.setattr(dispatch, "token_block", lambda *_: 32)
        monkeypatch.setattr(dispatch, "routing_block", lambda *_: 64)
        for word, kind in ((ROUTED, "routing"), (CHUNKS, "chunks"), (READ, "reading")):
            name = f"tell {kind}"
            launch_tell(board, word, CALL.digest, begins=word == CHUNKS)
            name = f"wait for {kind}"
            launch_wait(board, word, CALL.digest)
        asked, sizes = (board, CALL, routing, routed), Sizes(16, local, 64)
        name = "dispatch"
        launch_dispatch(*asked, sizes, moving._replace(account=account, rows_end=count))
        name = "publish and count"
        groups = launch_count(*asked, sizes, None)
        name = "place and move"
        launch_place(*asked, groups, sizes, 320, moving)
        name = "move rows"
        launch_move_rows(board, CALL, moving.moves, row_of_slot, padding, rows, count, count)
        name = "wait for chunks"  # in between
        weighed = Weighed(rows, weights, rows, places.view(4, -1))
        launch_weigh_rows(
            board, CALL, moving.moves, weighed, tile._replace(warps=4), row_of_slot, padding, count, count
        )
        for by_row in (None, weights):
            name = f"combine{'' if by_row is None else ' weighted'}"
            launch_combine(board, CALL, staging, routes, rows, by_row, out, tile, tile._replace(rows=2))
        slips = Slips(places, table)
        name = "combine with scalars"
        riding = Scalars(weights, scores, slips)
        launch_combine(board, CALL, staging, routes, rows, None, out, tile, tile._replace(rows=2), riding)
        for slot in (0, 1, top_k - 1):
            name = f"combine slot {slot}"
            launch_combine_slot(board, CALL, staging, routes, rows, scores, slot, sums, out, tile, tile)
        name = "swap scalars"
        launch_swap_scalars(board, CALL, slips, weights, row_of_slot, home, 64)
    return found


def compiled(case: _Case, *, ones: bool = False) -> str:
    """PTX as triton compiles it for these arguments; with `ones`, every integer is 1, which makes it a constant."""
    params = list(inspect.signature(case.kernel).parameters)
    types, constants, attrs = dict.fromkeys(case.constants, "constexpr"), dict(case.constants), {}
    for name, argument in case.arguments.items():
        is_tensor = isinstance(argument, torch.Tensor)
        if is_tensor:
            types[name] = f"*{_KINDS[argument.dtype]}"
        elif ones or argument == 1:
            types[name], constants[name] = "constexpr", 1
            continue
        else:
            types[name] = "i32"
        if (argument.data_ptr() if is_tensor else argument) % 16 == 0:
            attrs[(params.index(name),)] = [["tt.divisibility", 16]]
    source = ASTSource(
        wrapped(case.kernel, "cuda", case.helpers), {name: types[name] for name in params}, constants, attrs=attrs
    )
    ptx: str = triton.compile(source, target=_TARGET, options={"enable_fp_fusion": False, **case.options}).asm["ptx"]
    return ptx


_NAMES = list(cases())
_ROWS = [name for name in _NAMES if re.search("move|combine|weigh", name)]


def _assert_neither_spills_nor_fuses(ptx: str) -> None:
    assert ".local" not in ptx, "registers spill into memory"
    assert "fma.rn.f32" not in ptx, "a product and a sum were fused"


@pytest.mark.parametrize("name", _NAMES)
def test_compiles_for_hopper(name: str):
    for dtype, ones in ((torch.bfloat16, False), (torch.float32, True)):
        _assert_neither_spills_nor_fuses(compiled(cases(dtype)[name], ones=ones))


@pytest.mark.full
@pytest.mark.parametrize("name", _ROWS)
def test_float16_compiles_for_hopper(name: str):
    _assert_neither_spills_nor_fuses(compiled(cases(torch.float16)[name]))


def test_every_kernel_is_launched():
    written = {kernel for module in _MODULES for name, kernel in vars(module).items() if name.endswith("_kernel")}
    assert written == {case.kernel for case in cases().values()}


def test_numbers_of_a_call_are_no_constants_of_a_kernel():
    """Triton compiles another kernel where an integer is 1 or a multiple of 16: in a call, none ever is."""
    fixed = {"hidden_dim", "x_stride", "max_tokens", "max_slots", "chunk_len", "rank", "num_pushers", "num_givers"}
    fixed |= {"max_polls", "polls_per_look"}
    for case in cases().values():
        for name, argument in case.arguments.items():
            if not isinstance(argument, torch.Tensor) and name not in fixed:
                assert argument % 2 == 1 and argument > 1, f"{case}: {name} is {argument}"


def test_signals_are_ordered_over_the_whole_system():
    assert "atom.global.sys.release.exch.b64" in compiled(cases()["tell chunks"])
    waiting = compiled(cases()["wait for reading"])
    assert waiting.count("atom.global.sys.acquire.add.u64") == 2
    assert "atom.global.sys.relaxed.add.u64" in waiting
    assert "atom.global.gpu.acq_rel.add.u64" in compiled(cases()["publish and count"])


# -- rows move in vectors ---------------------------------------------------------------------------------------------


def _moves(ptx: str) -> set[str]:
    """How the kernel loads and stores vectors, and numbers of 16 bits, which single elements of rows are."""
    found = re.findall(r"\b((?:ld|st)\.global)(?:\.L\d::\w+)*\.(v\d\.b\d+|b16)\b", ptx)
    return {".".join(parts) for parts in found}


@pytest.mark.parametrize("name", _ROWS)
def test_rows_move_in_vectors_of_16_bytes(name: str):
    case = cases()[name]
    # `fill`, which makes padding zero and what was given up NaN, has few elements for each thread; so has counting.
    others = {"st.global.v2.b32"} if round.fill in case.helpers else set()
    if case.kernel is dispatch.dispatch_kernel:
        others.add("ld.global.v2.b32")
    assert _moves(compiled(case)) - others == {"ld.global.v4.b32", "st.global.v4.b32"}


def test_rows_that_lie_any_distance_apart_are_read_one_by_one():
    for name in ("move rows", "dispatch"):
        moves = _moves(compiled(cases(x_stride=2051)[name]))
        # What others have pushed is read in vectors.
        assert {"ld.global.b16", "ld.global.v4.b32", "st.global.v4.b32"} <= moves


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


@pytest.mark.parametrize("name", _NAMES)
def test_nothing_but_atomics_decides_while_a_program_waits(name: str):
    case = cases()[name]
    bodies = _parts_of_polling(compiled(case))
    assert bool(bodies) == case.waits
    for body in bodies:
        assert not _parts_ways(body)
        assert sum("atom.global.sys" in line for line in body) == 3


def test_a_load_that_decides_is_found():
    source = ASTSource(
        wrapped(polling_by_loads_kernel, "cuda"), {"word_ptr": "*i64", "out_ptr": "*i64", "target": "i32"}, {}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    assert [_parts_ways(body) for body in _parts_of_polling(ptx[ptx.index("$L__BB") :])] == ["a load decides"]
