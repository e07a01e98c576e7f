"""Wraps plain kernel functions for the device they run on.

Triton decides at decoration whether a function is compiled or interpreted. Kernels here are not decorated: for each
device type the launcher makes one copy of the kernel whose helper functions are wrapped the same way.

Kernels use the core of `triton.language` only: `tl.zeros`, `tl.sum`, `tl.cumsum` and their like are themselves
decorated, hence compiled, and cannot run in the interpreter; `tl.full`, `tl.reduce` and `tl.associative_scan` can.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy
import torch

_interpreting = threading.Lock()  # the interpreter keeps the place in the grid in a variable of its module


@cache
def wrapped(kernel: Callable[..., None], device_type: str, helpers: tuple[Callable[..., Any], ...] = ()) -> Any:
    """`kernel` for "cuda" (compiled) or "cpu" (interpreted); `helpers` are the plain functions that it calls."""
    names: dict[str, Any] = {}
    for helper in helpers:
        names[helper.__name__] = _wrap(_rebound(helper, names), device_type)
    return _wrap(_rebound(kernel, names), device_type)


def launch(
    kernel: Callable[..., None],
    grid: Sequence[int],
    device: torch.device,
    *args: Any,
    helpers: tuple[Callable[..., Any], ...] = (),
    **options: Any,
) -> None:
    """Run `kernel` over `grid` on `device`; `options` are constexprs and compiler options such as `num_warps`."""
    run = wrapped(kernel, device.type, helpers)[tuple(grid)]
    if device.type != "cuda":
        with _interpreting, numpy.errstate(all="ignore"):  # a device says nothing of overflows either
            run(*args, **options)
        return
    options["enable_fp_fusion"] = False  # products and sums are rounded one after the other, as in plain torch
    if device.index == torch.cuda.current_device():
        run(*args, **options)
        return
    with torch.cuda.device(device):
        run(*args, **options)


def _wrap(function: Callable[..., Any], device_type: str) -> Any:
    if device_type == "cuda":
        from triton.runtime.jit import JITFunction

        return JITFunction(function)
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function)


def _rebound(function: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """A copy of `function` that finds `names` before its module's own globals."""
    plain: Any = function
    copy = types.FunctionType(plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__)
    copy.__kwdefaults__, copy.__annotations__ = plain.__kwdefaults__, plain.__annotations__
    copy.__module__, copy.__qualname__, copy.__doc__ = plain.__module__, plain.__qualname__, plain.__doc__
    return copy
