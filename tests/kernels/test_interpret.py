"""Kernels in the interpreter do what they do when launched in Triton's own way, and leave the language as it was."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

import triton.language as tl
from triton.runtime import interpreter

from crossdock.kernels import interpret
from crossdock.kernels.launch import launch, wrapped
from crossdock.kernels.signal import SIGNALLING

CPU = torch.device("cpu")


def halved(value, by: tl.constexpr):
    """For the kernel below, and itself a caller of a helper."""
    return twice(value) // (2 * by)


def twice(value):
    """A helper's helper."""
    return value + value


def sums_kernel(x_ptr, out_ptr, length, factor, offset, BLOCK: tl.constexpr, BY: tl.constexpr = 2):
    """`x // BY * factor + offset`, a block a program of the first axis, a row a program of the second."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    value = tl.full((BLOCK,), 0, tl.int32)
    if x_ptr is not None:
        value = tl.load(x_ptr + row * length + at, mask=at < length, other=0)
    value = halved(value, BY) * factor
    if offset:
        value += tl.num_programs(1)
    tl.store(out_ptr + row * length + at, value, mask=at < length)


def failing_kernel(x_ptr, BLOCK: tl.constexpr):
    """Fail behind a store."""
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.full((BLOCK,), 1, tl.float32))
    raise ZeroDivisionError("of the kernel")


HELPERS = (twice, halved)
_OF_A_GRID = {"grid_dim", "grid_idx"}  # which stay as they were at the end


def _outputs() -> list[Any]:
    """What some launches give."""
    x = torch.arange(66, dtype=torch.int32).reshape(3, 22) - 30
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, 22, 3, 1), {"BLOCK": 8}),
        ((x, 22, 2**31 - 1, 0), {"BLOCK": 8, "BY": 4, "num_warps": 2}),  # overflows, as on a device
        ((None, 22, 1, 1), {"BLOCK": 32}),
    ]
    outs = []
    for (source, *rest), options in calls:
        outs.append(torch.full_like(x, 7))
        grid = (-(-22 // options["BLOCK"]), 3)
        launch(sums_kernel, grid, CPU, source, outs[-1], *rest, helpers=HELPERS, **options)
    return [out.tolist() for out in outs]


@pytest.fixture
def in_triton_s_own_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interpret, "_INNER_PARTS", ("_one_that_is_not_there",))
    for cached in (interpret.is_known, wrapped):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (interpret.is_known, wrapped):
        cached.cache_clear()


@pytest.fixture(scope="module")
def outputs() -> list[Any]:
    return _outputs()


def test_this_triton_is_known(outputs):
    assert interpret.is_known()
    assert outputs[0][1][:3] == [int((number - 30) / 2) * 3 + 3 for number in range(22, 25)]  # cut off, as on a GPU


def test_triton_s_own_way_gives_the_same(outputs, in_triton_s_own_way):
    assert not interpret.is_known()
    assert isinstance(wrapped(sums_kernel, "cpu", HELPERS).function, interpreter.InterpretedFunction)
    assert _outputs() == outputs


def _language() -> list[dict[str, Any]]:
    places = (tl, tl.core, tl.math, tl.tensor, tl.dtype, interpreter, interpreter.interpreter_builder)
    return [{name: value for name, value in vars(place).items() if name not in _OF_A_GRID} for place in places]


def test_a_launch_leaves_the_language_as_it_was(outputs):
    before = _language()
    assert _outputs() == outputs
    assert _language() == before


def test_a_kernel_that_fails_says_why_and_leaves_the_language_as_it_was():
    before, out = _language(), torch.zeros(4)
    with pytest.raises(ZeroDivisionError, match="of the kernel"):
        launch(failing_kernel, (1,), CPU, out, BLOCK=4)
    assert out.tolist() == [1.0] * 4
    assert _language() == before


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="BLOCK"):
        launch(failing_kernel, (1,), CPU, torch.zeros(4))
    with pytest.raises(TypeError, match="arguments"):
        launch(failing_kernel, (1,), CPU, torch.zeros(4), 4, 4)


def test_threads_may_build_kernels_at_the_same_time():
    """Python 3.11 mistakes the depth of one thread's syntax tree for that of another's, where it may."""

    def build(_: int) -> int:
        return sum(callable(interpret._rewritten.__wrapped__(helper)) for helper in SIGNALLING)

    def another_turn(*_: object) -> None:
        time.sleep(0)

    thresholds = gc.get_threshold()
    gc.callbacks.append(another_turn)  # threads change where Python code runs while a tree is made
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(build, range(24))) == [len(SIGNALLING)] * 24
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(another_turn)
