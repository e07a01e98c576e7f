"""A launch on the direct path is the launch that Triton's ordinary path would make."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux only")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

from crossdock.kernels import launch as launching
from crossdock.kernels.launch import Chosen, launch, launcher_is_known, looks_at, takes_direct_path


def scale_kernel(x_ptr, out_ptr, num_elements, factor, BLOCK: tl.constexpr, NEGATED: tl.constexpr = False):
    """Write `factor * x` where there is an `x`, else `factor`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), 1, out_ptr.dtype.element_ty)
    if x_ptr is not None:
        value = tl.load(x_ptr + at, mask=at < num_elements, other=0)
    if NEGATED:
        value = -value
    tl.store(out_ptr + at, value * factor, mask=at < num_elements)


_FLOATS, _BYTES = torch.zeros(64), torch.zeros(64, dtype=torch.uint8)
_ARGUMENTS = [
    *(_FLOATS, _FLOATS[1:], _FLOATS[4:], _FLOATS.to(torch.bfloat16), _BYTES, _BYTES[1:], _BYTES[8:], _BYTES[16:]),
    *(0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 16, -(2**31), -(2**31) - 1, -(2**31) - 16),
    *(2**63 - 1, 2**63 - 16, 2**63, 2**63 + 1, True, False, None, 0.5, 1.0),
]


def _seen_by_triton(argument: Any) -> Any:
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    return specialize(CUDABackend, argument, False, True, True)


def _seen(*arguments: Any) -> tuple[Any, Any]:
    kinds = tuple(map(type, arguments))
    look = looks_at(kinds)
    assert look is not None
    return kinds, look(arguments)[0]


def test_what_triton_tells_apart_is_told_apart():
    for first, second in itertools.product(_ARGUMENTS, repeat=2):
        if _seen_by_triton(first) != _seen_by_triton(second):
            assert _seen(first) != _seen(second)
            assert _seen(_FLOATS, first, 7) != _seen(_FLOATS, second, 7)


def test_calls_that_need_the_same_are_the_same():
    assert _seen(_FLOATS, 48, 4097, 2**40, 0.5) == _seen(_FLOATS[4:], 4096, 3, 2**41, 0.25)


def test_which_of_two_tensors_is_unaligned_matters():
    assert _seen(_FLOATS, _FLOATS[1:]) != _seen(_FLOATS[1:], _FLOATS)


def test_tensors_are_passed_as_addresses():
    look = looks_at((int, torch.Tensor, type(None), torch.nn.Parameter))
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert look is not None
    assert look((5, _FLOATS, None, parameter))[1] == (5, _FLOATS.data_ptr(), None, parameter.data_ptr())


def test_other_types_are_left_to_triton():
    assert looks_at((torch.Tensor, tuple)) is None


def test_the_launcher_of_this_triton_is_known():
    assert launcher_is_known(CudaLauncher)


def test_another_launcher_is_not_known():
    class Other:
        def __call__(self, grid, stream, function, *args):
            pass

    assert not launcher_is_known(Other)


class _Driver:
    """What the direct path asks of a GPU's driver; there is none here."""

    def get_current_stream(self, index: int) -> int:
        return 70 + index


class _Launcher:
    """Takes what a compiled kernel's launcher takes, and keeps it."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.launches.append((gridX, gridY, gridZ, stream, function, *args))


class _Ordinary:
    """Takes what a JITFunction takes, and counts."""

    def __init__(self, params: Any) -> None:
        self.params, self.function, self.packed_metadata, self.run, self.calls = params, 99, "m", _Launcher(), 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> _Ordinary:
            assert options.pop("enable_fp_fusion") is False
            self.calls += 1
            return self

        return run


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Ordinary]:
    """Return the ordinary path of `scale_kernel` on a device that is not there."""
    stand_in = _Ordinary(launching.wrapped(scale_kernel, "cuda").params)
    monkeypatch.setattr(launching, "wrapped", cache(lambda *_: stand_in))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(type(driver), "active", _Driver())
    launching._variants.cache_clear()
    yield stand_in
    launching._variants.cache_clear()


def test_the_second_call_of_a_variant_goes_straight_to_the_launcher(ordinary):
    device, out = torch.device("cuda", 3), torch.zeros(32)
    for num_elements, x in ((17, _FLOATS), (19, _FLOATS[4:])):
        launch(scale_kernel, (5,), device, x, out, num_elements, 0.5, BLOCK=16, num_warps=2)
    assert ordinary.calls == 1
    # Here tensors are the host's, hence passed as they are.
    (told,) = ordinary.run.launches
    assert told[:9] == (5, 1, 1, 73, 99, "m", None, None, None)
    assert told[9].data_ptr() == _FLOATS[4:].data_ptr()
    assert told[10:] == (out, 19, 0.5, 16, False)
    assert takes_direct_path(scale_kernel, device, _FLOATS, out, 21, 0.5, BLOCK=16, num_warps=2)


def test_who_has_chosen_the_same_shares_what_is_compiled(ordinary):
    device, args = torch.device("cuda", 3), (_FLOATS, torch.zeros(32), 17, 0.5)
    for _ in range(50):  # as of calls with another number of tokens each
        launch(scale_kernel, (1,), device, *args, chosen=Chosen((), BLOCK=16, num_warps=2))
    launch(scale_kernel, (1,), device, *args, BLOCK=16, num_warps=2)
    assert ordinary.calls == launching._variants.cache_info().currsize == 1
    assert len(ordinary.run.launches) == 50
    launch(scale_kernel, (1,), device, *args, chosen=Chosen((), BLOCK=16, num_warps=4))
    assert ordinary.calls == 2


def test_nothing_keeps_a_choice_alive(ordinary):
    chosen = Chosen((), BLOCK=16)
    launch(scale_kernel, (1,), torch.device("cuda", 3), _FLOATS, torch.zeros(32), 17, 0.5, chosen=chosen)
    alive = weakref.ref(chosen)
    del chosen
    assert alive() is None


def test_a_choice_finds_kernels_that_were_built_anew(ordinary):
    device, args, chosen = torch.device("cuda", 3), (_FLOATS, torch.zeros(32), 17, 0.5), Chosen((), BLOCK=16)
    for _ in range(2):
        launch(scale_kernel, (1,), device, *args, chosen=chosen)
    with launching.standing_in(launching._NOBODY):
        launch(scale_kernel, (1,), device, *args, chosen=chosen)
    launch(scale_kernel, (1,), device, *args, chosen=chosen)
    assert ordinary.calls == 3


def test_another_variant_takes_the_ordinary_path_first(ordinary):
    device, out = torch.device("cuda", 3), torch.zeros(32)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((_FLOATS, out, 17, 0.5), {"BLOCK": 16}),
        ((None, out, 17, 0.5), {"BLOCK": 16}),
        ((_FLOATS[1:], out, 17, 0.5), {"BLOCK": 16}),
        ((_FLOATS, out, 16, 0.5), {"BLOCK": 16}),
        ((_FLOATS, out, 17, 0.5), {"BLOCK": 32}),
        ((_FLOATS, out, 17, 0.5), {"BLOCK": 16, "NEGATED": True}),
        ((_FLOATS, out, 17, 0.5), {"BLOCK": 16, "num_warps": 8}),
    ]
    for args, options in calls * 2:
        launch(scale_kernel, (1,), device, *args, **options)
    assert ordinary.calls == len(ordinary.run.launches) == len(calls)


def test_hooks_see_every_launch(ordinary):
    device, args = torch.device("cuda", 3), (_FLOATS, torch.zeros(32), 17, 0.5)
    launch(scale_kernel, (1,), device, *args, BLOCK=16)
    assert takes_direct_path(scale_kernel, device, *args, BLOCK=16)
    knobs.runtime.launch_exit_hook.add(print)
    try:
        assert not takes_direct_path(scale_kernel, device, *args, BLOCK=16)
        launch(scale_kernel, (1,), device, *args, BLOCK=16)
    finally:
        knobs.runtime.launch_exit_hook.remove(print)
    assert ordinary.calls == 2
    assert not ordinary.run.launches
    launch(scale_kernel, (1,), device, *args, BLOCK=16)
    assert len(ordinary.run.launches) == 1


def test_constexprs_among_the_positional_arguments_take_the_ordinary_path(ordinary):
    for _ in range(2):
        launch(scale_kernel, (1,), torch.device("cuda", 3), _FLOATS, torch.zeros(32), 17, 0.5, 16)
    assert ordinary.calls == 2


def test_an_unknown_launcher_takes_the_ordinary_path(ordinary, monkeypatch):
    monkeypatch.setattr(launching, "_KNOWN_LAUNCHERS", set())
    for _ in range(2):
        launch(scale_kernel, (1,), torch.device("cuda", 3), _FLOATS, torch.zeros(32), 17, 0.5, BLOCK=16)
    assert ordinary.calls == 2


def test_on_a_cpu_there_is_no_direct_path():
    out = torch.zeros(32)
    for _ in range(2):
        launch(scale_kernel, (2,), torch.device("cpu"), _FLOATS + 3, out, 17, 0.5, BLOCK=16)
    assert not takes_direct_path(scale_kernel, torch.device("cpu"), _FLOATS + 3, out, 17, 0.5, BLOCK=16)
    assert out.tolist() == [1.5] * 17 + [0.0] * 15


@pytest.mark.gpu
def test_both_paths_do_the_same_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    base = torch.arange(4099.0, device=device)
    for offset, num_elements, negated in itertools.product((0, 1, 4), (1, 16, 17, 4095), (False, True)):
        x, outs = base[offset:], [torch.zeros_like(base) for _ in range(3)]
        for out in outs:
            launch(
                scale_kernel, (triton.cdiv(num_elements, 64),), device, x, out, num_elements, 0.5, BLOCK=64,
                NEGATED=negated,
            )  # fmt: skip
        assert takes_direct_path(scale_kernel, device, x, outs[0], num_elements, 0.5, BLOCK=64, NEGATED=negated)
        expected = torch.zeros_like(base)
        expected[:num_elements] = x[:num_elements] * (-0.5 if negated else 0.5)
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.gpu
def test_the_direct_path_can_be_captured():
    device = torch.device("cuda", torch.cuda.current_device())
    x, out = torch.ones(32, device=device), torch.zeros(32, device=device)
    launch(scale_kernel, (1,), device, x, out, 32, 0.5, BLOCK=32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert takes_direct_path(scale_kernel, device, x, out, 32, 2.0, BLOCK=32)
        launch(scale_kernel, (1,), device, x, out, 32, 2.0, BLOCK=32)
    x.fill_(3)
    graph.replay()
    assert out.tolist() == [6.0] * 32
