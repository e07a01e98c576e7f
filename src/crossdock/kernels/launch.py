"""Wraps plain kernel functions for the device they run on, and launches them.

Triton decides at decoration whether a function is compiled or interpreted. Kernels here are not decorated: for each
device type the launcher makes one copy of the kernel whose helper functions are wrapped the same way.

Kernels use the core of `triton.language` only: `tl.zeros`, `tl.sum`, `tl.cumsum` and their like are themselves
decorated, hence compiled, and cannot run in the interpreter; `tl.full`, `tl.reduce` and `tl.associative_scan` can.

Triton's own way from a call to the launch of a compiled kernel costs the host more than most kernels here cost the
GPU. So its result is kept: the first call of a variant takes the *ordinary* path, later ones the *direct* path, to the
compiled kernel's own launcher. A variant is all that Triton compiles for: constexprs and options, dtypes, whether
pointers are multiples of 16 bytes, and what is known of integers (one? a multiple of 16? how wide?). Where Triton's
inner parts are not those that are known here, or hooks want to see every launch, every call takes the ordinary path.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from .rebound import rebound

# What the launchers of compiled kernels take before the kernel's own arguments: Triton 3.6, and 3.7 to 3.9. The first
# takes under `args` what the second names.
_GRID = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_KNOWN_LAUNCHERS = {
    (*_GRID, "args"),
    (*_GRID, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"),
}
_PLAIN = (bool, float, type(None))  # arguments of which Triton looks at nothing but the type
# An integer is the constant 1; or a multiple of 16 or not, of 32 bits, of 64, of 64 without sign.
_INT_FACT = (
    "1 if {0} == 1 else ({0} & 15 == 0) + (2 if -0x80000000 <= {0} <= 0x7FFFFFFF else 4 if {0} < 1 << 63 else 6)"
)


class Chosen:
    """What is the same in many launches of a kernel: its helpers, and its constexprs and compiler options by name.

    Looking at each of them in every launch would cost the host more than the rest, so it remembers what is compiled of
    the kernel for them. Those who have chosen the same share that.
    """

    def __init__(self, helpers: tuple[Callable[..., Any], ...], **options: Any) -> None:
        self.helpers, self.options = helpers, options
        self._found: tuple[Callable[..., None], int, _Variants] | None = None

    def variants(self, kernel: Callable[..., None]) -> _Variants:
        """What is compiled of `kernel`, whoever has asked for it."""
        found, built = self._found, _times_forgotten[0]
        if found is None or found[0] is not kernel or found[1] != built:
            found = self._found = (kernel, built, _variants(kernel, self.helpers, tuple(self.options.items())))
        return found[2]


def launch(
    kernel: Callable[..., None],
    grid: Sequence[int],
    device: torch.device,
    *args: Any,
    chosen: Chosen | None = None,
    helpers: tuple[Callable[..., Any], ...] = (),
    **options: Any,
) -> None:
    """Run `kernel` over `grid` on `device`.

    `options` are constexprs and compiler options such as `num_warps`; who launches often has `chosen` them before.
    """
    if _standing_in:
        _standing_in[-1].before_launch(device)
    chosen = chosen or Chosen(helpers, **options)
    if device.type != "cuda":
        wrapped(kernel, device.type, chosen.helpers)(grid, args, chosen.options)
        return
    current = torch.cuda.current_device()
    if device.index is None or device.index == current:
        chosen.variants(kernel).launch(grid, current, args)
        return
    with torch.cuda.device(device):
        chosen.variants(kernel).launch(grid, device.index, args)


def takes_direct_path(
    kernel: Callable[..., None],
    device: torch.device,
    *args: Any,
    helpers: tuple[Callable[..., Any], ...] = (),
    **options: Any,
) -> bool:
    """Whether `launch` with the same arguments would take the direct path now."""
    if device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return Chosen(helpers, **options).variants(kernel).is_ready(index, args)


@cache
def wrapped(kernel: Callable[..., None], device_type: str, helpers: tuple[Callable[..., Any], ...] = ()) -> Any:
    """`kernel` for "cuda" (compiled) or "cpu" (interpreted); `helpers` are the plain functions that it calls."""
    stand_ins = _standing_in[-1] if _standing_in else _NOBODY
    names = dict(stand_ins.constants)
    for helper in (*stand_ins.helpers, *helpers):
        name, twin = helper.__name__, stand_ins.twins.get(helper.__name__)
        if twin is not None:
            names[f"prompt_{name}"] = _bound(helper, names, device_type)
        names[name] = _bound(twin or helper, names, device_type)
    if device_type == "cuda":
        return _bound(kernel, names, device_type)
    from .interpret import Interpreted

    return Interpreted(kernel, names)


class StandIns(NamedTuple):
    """What takes the place of helpers, see `standing_in`.

    Attributes:
        twins: by the name of a helper, the function that kernels find under it. As `prompt_<name>` it finds the helper.
        helpers: further functions that twins call, bound before all others.
        constants: what twins and these find under such names, before their module's own.
        before_launch: what the host does before every launch on a device.
    """

    twins: Mapping[str, Callable[..., Any]]
    helpers: tuple[Callable[..., Any], ...]
    constants: Mapping[str, Any]
    before_launch: Callable[[torch.device], None]


_NOBODY = StandIns({}, (), {}, lambda device: None)
_standing_in: list[StandIns] = []  # the last one counts
_times_forgotten = [0]


@contextmanager
def standing_in(stand_ins: StandIns) -> Iterator[None]:
    """Build the kernels of this process with other helpers, for tests (see `stress.py`); afterwards as before."""
    _standing_in.append(stand_ins)
    _forget_kernels()
    try:
        yield
    finally:
        _standing_in.pop()
        _forget_kernels()


def _forget_kernels() -> None:
    wrapped.cache_clear()
    _variants.cache_clear()
    _times_forgotten[0] += 1


class _Variant(NamedTuple):
    """A compiled kernel that is loaded on its device.

    Attributes:
        run: launches it, given grid, stream, and the arguments.
        stream: gives a device's current stream, as the launcher takes it.
        function: what has been loaded.
        metadata: what the launcher wants to be told of it.
        by_address: whether the launcher is given addresses instead of tensors.
        constants: the constexprs, which close the list of arguments; the launcher leaves them out.
    """

    run: Callable[..., None]
    stream: Callable[[int], int]
    function: int
    metadata: Any
    by_address: bool
    constants: tuple[Any, ...]


class _Variants:
    """What has been compiled of one kernel with one choice of constants, by what it was compiled for.

    To Triton too, a constexpr that is True is the same as one that is 1.
    """

    def __init__(
        self, kernel: Callable[..., None], helpers: tuple[Callable[..., Any], ...], options: tuple[tuple[str, Any], ...]
    ) -> None:
        from triton import knobs

        self._ordinary, self._options = wrapped(kernel, "cuda", helpers), dict(options)
        self._runtime = knobs.runtime
        self._ready: dict[tuple[type, ...], dict[Any, _Variant]] = {}  # by the arguments' types, then by what they are
        self._last: tuple[tuple[type, ...], Look | None, dict[Any, _Variant]] = ((), None, {})

    def launch(self, grid: Sequence[int], index: int, args: tuple[Any, ...]) -> None:
        """Launch on device `index`, which is the current one."""
        ready, key, addressed = self._look_at(index, args)
        variant = ready.get(key)
        if variant is None or self._is_watched():
            # Products and sums are rounded one after the other, as in plain torch.
            compiled = self._ordinary[tuple(grid)](*args, enable_fp_fusion=False, **self._options)
            if variant is None and key is not None:
                self._remember(ready, key, compiled, args)
            return
        run, stream, function, metadata, by_address, constants = variant
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        passed = addressed if by_address else args
        run(x, y, z, stream(index), function, metadata, None, None, None, *passed, *constants)  # no hooks

    def is_ready(self, index: int, args: tuple[Any, ...]) -> bool:
        """Whether a launch would take the direct path."""
        ready, key, _ = self._look_at(index, args)
        return key in ready and not self._is_watched()

    def _look_at(self, index: int, args: tuple[Any, ...]) -> tuple[dict[Any, _Variant], Any, tuple[Any, ...]]:
        """Variants for such types, which of them a call needs (None where that is not known), and what it passes.

        Two calls with equal keys need the same variant. One that Triton compiles once may have several keys.
        """
        kinds, last = tuple(map(type, args)), self._last
        if kinds != last[0]:
            last = self._last = (kinds, looks_at(kinds), self._ready.setdefault(kinds, {}))
        _, look, ready = last
        if look is None:
            return ready, None, ()
        facts, addressed = look(args)
        return ready, (index, facts), addressed

    def _is_watched(self) -> bool:
        """Whether hooks want to see the launches."""
        return _is_set(self._runtime.launch_enter_hook) or _is_set(self._runtime.launch_exit_hook)

    def _remember(self, ready: dict[Any, _Variant], key: Any, compiled: Any, args: tuple[Any, ...]) -> None:
        constants = _constants(self._ordinary, len(args), self._options)
        if constants is None or not _is_known(compiled):
            return
        from triton.runtime import driver

        ready[key] = _Variant(
            run=compiled.run,
            stream=driver.active.get_current_stream,
            function=compiled.function,
            metadata=compiled.packed_metadata,
            by_address=all(_is_where_it_says(arg) for arg in args if isinstance(arg, torch.Tensor)),
            constants=constants,
        )


_variants = cache(_Variants)


Look = Callable[[tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]


@cache
def looks_at(kinds: tuple[type, ...]) -> Look | None:
    """A function that looks at arguments of these types as Triton does; None where Triton looks at more.

    It gives all that Triton compiles for, and the arguments with addresses in place of tensors. It is written out for
    the types, since a loop over them would cost more than the launch: for a tensor and an integer it is

        a0, a1, = args
        p0 = a0.data_ptr()
        return (a0.dtype, <what is known of a1>, (p0) & 15 and (p0 & 15 == 0,)), (p0, a1)
    """
    tensors = [place for place, kind in enumerate(kinds) if issubclass(kind, torch.Tensor)]
    ints = [place for place, kind in enumerate(kinds) if kind is int]
    if len(tensors) + len(ints) + sum(kind in _PLAIN for kind in kinds) < len(kinds):
        return None
    facts = [f"a{at}.dtype" for at in tensors] + [_INT_FACT.format(f"a{at}") for at in ints]
    if tensors:  # nearly always all are aligned
        bits, each = "|".join(f"p{at}" for at in tensors), ",".join(f"p{at} & 15 == 0" for at in tensors)
        facts.append(f"({bits}) & 15 and ({each},)")
    passed = [f"p{at}" if at in tensors else f"a{at}" for at in range(len(kinds))]
    lines = [f"p{at} = a{at}.data_ptr()" for at in tensors]
    lines.append(f"return ({_listed(facts)}), ({_listed(passed)})")
    if kinds:
        lines.insert(0, f"{_listed([f'a{at}' for at in range(len(kinds))])} = args")
    names: dict[str, Any] = {}
    exec("def look(args):\n " + "\n ".join(lines), names)
    look: Look = names["look"]
    return look


def _listed(items: list[str]) -> str:
    return "".join(f"{item}, " for item in items)


def _is_where_it_says(tensor: torch.Tensor) -> bool:
    """Whether the device finds a tensor where the host does; else the launcher has to ask the driver every time."""
    if tensor.is_cuda:
        return True
    found, device_pointer = ctypes.c_uint64(0), 3  # the attribute's number
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    failed = driver.cuPointerGetAttribute(ctypes.byref(found), device_pointer, ctypes.c_uint64(tensor.data_ptr()))
    return not failed and found.value == tensor.data_ptr()


def _is_set(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))  # a chain of hooks may be empty


def _constants(jit: Any, num_args: int, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """The constexprs, where they are all that follows the first `num_args` arguments; else None."""
    if any(parameter.is_constexpr for parameter in jit.params[:num_args]):
        return None
    last = jit.params[num_args:]
    if not all(parameter.is_constexpr for parameter in last):
        return None
    return tuple([options.get(parameter.name, parameter.default) for parameter in last])


def _is_known(compiled: Any) -> bool:
    """Whether `compiled` is launched in a way that is known here."""
    if torch.version.hip is not None:  # there Triton also looks at how large a tensor is
        return False
    if not isinstance(getattr(compiled, "function", None), int) or not hasattr(compiled, "packed_metadata"):
        return False
    return launcher_is_known(type(compiled.run))


def launcher_is_known(launcher: type) -> bool:
    """Whether the class of a compiled kernel's launcher takes what the direct path passes."""
    return tuple(inspect.signature(launcher.__call__).parameters) in _KNOWN_LAUNCHERS


def _bound(function: Callable[..., Any], names: dict[str, Any], device_type: str) -> Any:
    if device_type == "cuda":
        from triton.runtime.jit import JITFunction

        return JITFunction(rebound(function, names))
    from .interpret import interpreted

    return interpreted(function, names)
