"""Runs kernels in Triton's interpreter, on a CPU, at less than half of what its own way of launching them costs.

The interpreter exchanges parts of the language, `tl.load` say, for parts of its own. Its own way looks for all of them
at every launch, and once more at every call of a helper. Here they are looked for once: helpers are plain functions,
and a launch exchanges what was found and puts it back, and some more (see `_exchanges`).

That takes inner parts of Triton, the same in 3.6 to 3.9. Where they are not those that are known here, kernels and
helpers are wrapped and launched in Triton's own way.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy
import triton.language as tl
from triton.runtime import interpreter

from .rebound import rebound

_interpreting = threading.Lock()  # what is exchanged is everyone's, and so is the place in the grid
_rewriting = threading.Lock()  # Python 3.11 counts the depth of syntax trees once for all threads that parse
_INNER_PARTS = (
    "_LangPatchScope",
    "_patch_lang",
    "_get_np_dtype",
    "_implicit_cvt",
    "TensorHandle",
    "interpreter_builder",
)
_ABSENT = object()


class Interpreted:
    """A kernel for the interpreter; a call of it is a launch.

    Attributes:
        function: what runs, and finds `names`: helpers as `interpreted` gives them.
    """

    def __init__(self, kernel: Callable[..., None], names: Mapping[str, Any]):
        self.function = interpreted(kernel, names)
        parameters = inspect.signature(kernel).parameters
        self._takes = frozenset(parameters)
        self._constexprs = {name for name, one in parameters.items() if "constexpr" in str(one.annotation)}

    def __call__(self, grid: Sequence[int], args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Run all programs, one after the other. Of `options`, those that are the kernel's are its constexprs."""
        with _interpreting, numpy.errstate(all="ignore"):  # a device says nothing of overflows either
            if not is_known():
                self.function[tuple(grid)](*args, **options)
                return
            with _exchanged(_exchanges()):
                self._run((*grid, 1, 1)[:3], args, options)

    def _run(self, grid: tuple[int, ...], args: Sequence[Any], options: Mapping[str, Any]) -> None:
        constants = {name: value for name, value in options.items() if name in self._takes}
        named = inspect.getcallargs(self.function, *args, **constants)
        for name in named.keys() - self._constexprs:
            named[name] = interpreter._implicit_cvt(named[name])
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        for place in itertools.product(*map(range, grid)):
            builder.set_grid_idx(*place)
            self.function(**named)


def interpreted(function: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """`function` as a kernel for the interpreter calls it, finding `names`."""
    if not is_known():
        return interpreter.InterpretedFunction(rebound(function, names))
    return rebound(_rewritten(function), names)


@cache
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """As the interpreter writes it anew; what that adds to the globals must not be added to the module's."""
    with _rewriting:
        rewritten: Callable[..., Any] = interpreter.InterpretedFunction(rebound(function, {})).rewrite()
        return rewritten


@cache
def is_known() -> bool:
    """Whether the inner parts of this Triton are those that are known here."""
    if not all(hasattr(interpreter, name) for name in _INNER_PARTS):
        return False
    taken = tuple(inspect.signature(interpreter._patch_lang).parameters)
    return taken == ("fn",) and hasattr(interpreter.InterpretedFunction, "rewrite")


class _Exchange(NamedTuple):
    """That `name` of a module, class, or object is another `value` while a kernel is interpreted."""

    place: Any
    name: str
    value: Any


@cache
def _exchanges() -> tuple[_Exchange, ...]:
    """What the interpreter exchanges, and for speed and for its faults some more."""
    scope = interpreter._patch_lang(rebound(_remembering, {"tl": tl}))  # it looks for the language among the globals
    found = [_Exchange(place, name, getattr(place, name)) for place, name, _ in scope._changes]
    scope.restore()
    builder = interpreter.interpreter_builder
    # Sums of integers are checked for overflow otherwise, and nobody is told of it.
    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    found += [
        _Exchange(builder, "options", unchecked),
        _Exchange(interpreter, "_get_np_dtype", _remembering(interpreter._get_np_dtype)),
        _Exchange(builder, "create_splat", _splat),
        _Exchange(tl.tensor, "__index__", _index),
        _Exchange(tl.core.block_type, "__init__", _remembering_shapes(tl.core.block_type.__init__)),
    ]
    return tuple({(id(one.place), one.name): one for one in found}.values())  # the last of each


def _splat(type_of_block: Any, number: Any) -> Any:
    """One number everywhere. The interpreter makes a comparison of integers an integer; from 3.9 on no mask may be."""
    data = numpy.full(type_of_block.shape, number.data, dtype=number.data.dtype)
    return interpreter.TensorHandle(data, number.dtype.scalar)


def _index(number: Any) -> int:
    """In Triton 3.6 the interpreter expects of an array of one element what numpy has given up since."""
    return int(number.handle.data.item())


def _remembering_shapes(init: Callable[..., None]) -> Callable[..., None]:
    """The language checks and names a type of blocks whenever it makes one, which is in nearly every operation."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def remembered(block: Any, element: Any, shape: Any) -> None:
        key = (element.name, *shape)
        if key not in known:
            init(block, element, shape)
            known[key] = dict(vars(block))
        vars(block).update(known[key])

    return remembered


def _remembering(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's own makes a table of all dtypes at every call."""
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = dtype_of(dtype)
        return known[dtype.name]

    return remembered


@contextmanager
def _exchanged(exchanges: Sequence[_Exchange]) -> Iterator[None]:
    before = [(place, name, vars(place).get(name, _ABSENT)) for place, name, _ in exchanges]
    try:
        for place, name, value in exchanges:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            if value is _ABSENT:
                delattr(place, name)
            else:
                setattr(place, name, value)
