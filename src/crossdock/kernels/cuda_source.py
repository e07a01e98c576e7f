"""Compiles CUDA C++ at run time, with the NVRTC that torch's CUDA wheels bring, and launches it through the driver.

Both libraries are called as they are, through `ctypes`. Nothing is looked for until a kernel is wanted, and nothing
outside NVRTC's own library is needed: sources include no header. What stands in the way is a `CannotRun`, so that
the caller can take a portable kernel instead.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

_MAX_DYNAMIC_SHARED_BYTES = 8  # the driver's number of a function's attribute
_INVALID_CONTEXT = 201  # a thread that has not used the device yet
_OPTIONS = ("--std=c++17", "--fmad=false")  # products and sums are rounded one after the other, as in plain torch


class CannotRun(RuntimeError):
    """CUDA source cannot be compiled, loaded or launched here; the message says why."""


class Source(NamedTuple):
    """CUDA C++ with one kernel.

    Attributes:
        text: all of it.
        name: the kernel, `extern "C"`; it takes one structure.
        defines: macros and their values.
    """

    text: str
    name: str
    defines: tuple[tuple[str, int], ...]


class Kernel:
    """A kernel that is loaded on one device."""

    def __init__(self, index: int, function: ctypes.c_void_p):
        self._index, self._function, self._driver = index, function, _driver()

    def launch(self, blocks: int, threads: int, shared_bytes: int, argument: ctypes.Structure) -> None:
        """Launch on the current stream of the device, which is the current one; the argument is copied."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        told = (self._function, blocks, 1, 1, threads, 1, 1, shared_bytes, _stream_of(self._index), pointers, None)
        result = self._driver.cuLaunchKernel(*told)
        if result == _INVALID_CONTEXT:
            _use_context(self._driver, self._index)
            result = self._driver.cuLaunchKernel(*told)
        _check_driver(self._driver, result)


@cache
def load(source: Source, index: int, shared_bytes: int) -> Kernel:
    """The kernel on device `index`, compiled for it, with up to so much dynamic shared memory a block; kept."""
    major, minor = torch.cuda.get_device_capability(index)
    image, driver = compiled(source, f"sm_{major}{minor}"), _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(index):
        _use_context(driver, index)
        _check_driver(driver, driver.cuModuleLoadData(ctypes.byref(module), image))
        _check_driver(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, source.name.encode()))
        _check_driver(driver, driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes))
    return Kernel(index, function)


@cache
def compiled(source: Source, architecture: str) -> bytes:
    """Machine code for an architecture such as "sm_90"."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}", *_OPTIONS]
    options += [f"--define-macro={name}={value}" for name, value in source.defines]
    _check_nvrtc(
        nvrtc,
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.text.encode(), b"%s.cu" % source.name.encode(), 0, 0, 0),
    )
    try:
        passed = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if nvrtc.nvrtcCompileProgram(program, len(options), passed):
            log = _read(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise CannotRun(f"NVRTC does not compile {source.name} for {architecture}: {log.decode().strip()}")
        return _read(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: Any, size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(nvrtc, size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check_nvrtc(nvrtc, read(program, text))
    return text.raw


def _check_nvrtc(nvrtc: Any, result: int) -> None:
    if result:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CannotRun(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(result).decode()}")


@cache
def _nvrtc() -> Any:
    tried = list(_places_of_nvrtc())
    for place in tried:
        try:
            # It looks for its other half by name alone, hence finds it where that is loaded.
            for half in sorted(Path(place).parent.glob("libnvrtc-builtins.so.*")) if Path(place).is_absolute() else ():
                ctypes.CDLL(str(half))
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CannotRun(f"NVRTC was not found: tried {', '.join(tried)}")


def _places_of_nvrtc() -> Iterator[str]:
    """Torch's neighbours among the wheels; then wherever the linker finds it."""
    majors = [torch.version.cuda.split(".")[0]] if torch.version.cuda else ["13", "12"]
    wheels = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in wheels.submodule_search_locations or ()] if wheels else []
    for major in majors:
        for folder in folders:
            yield from sorted(map(str, folder.glob(f"*/lib/libnvrtc.so.{major}")))
        yield f"libnvrtc.so.{major}"


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CannotRun(f"the CUDA driver was not found: {error}") from error
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    driver.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return driver


def _check_driver(driver: Any, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise CannotRun(f"the CUDA driver failed: {(text.value or b'unknown error').decode()} ({result})")


def _use_context(driver: Any, index: int) -> None:
    """Give this thread the device's context, the one that torch uses, unless it has one."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _check_driver(driver, driver.cuCtxGetCurrent(ctypes.byref(context)))
    if context.value is None:
        _check_driver(driver, driver.cuDeviceGet(ctypes.byref(device), index))
        _check_driver(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check_driver(driver, driver.cuCtxSetCurrent(context))


def _stream_of(index: int) -> int:
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what Triton and inductor ask
    stream: int = torch.cuda.current_stream(index).cuda_stream if quick is None else quick(index)
    return stream
