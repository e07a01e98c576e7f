"""What the host reads of tensors that lie on a device, told by name; a CPU stands in for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import crossdock as cd
from crossdock.host_copy import HostCopy
from crossdock.ledger import DeviceLedger

# Methods that take values to the host. On a CPU no operator runs for them.
_METHODS = {"tolist", "cpu", "numpy", "__array__", "__dlpack__", "__repr__"}
# Operators whose result, or the size of it, the host learns: of `item`, `bool`, `equal`, `nonzero`, a mask as an index.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

EARLIER, FRESH = "a copy that was under way", "a copy of now"


@contextmanager
def host_reads(dispatcher: cd.TokenDispatcher) -> Iterator[list[str]]:
    """Note what the host reads, by the method's or operator's name, until the end of the block.

    A `HostCopy` is noted once, when its values are first asked for: `EARLIER` was made before the block, `FRESH` in it.
    What the device has told in memory of the host is no read. A device that the dispatcher or a tensor has handed out
    is where the tensors lie, and so is one that torch's own code names; any other, in `.to("cpu")` say, is the host.
    Copies into tensors of the host are not seen: only a GPU tells them from others.
    """
    seen: list[str] = []
    methods = _Methods(seen, dispatcher)
    with pytest.MonkeyPatch.context() as patch, methods, _Operators(seen, methods.is_told):
        _tell_copies(patch, methods)
        yield seen


@contextmanager
def device_ledger(dispatcher: cd.TokenDispatcher) -> Iterator[None]:
    """The ledger of a GPU, its kernels in the interpreter."""
    pytest.importorskip("triton", reason="triton is published for Linux only")
    dispatcher._open.accounts._ledger = DeviceLedger(1, 4, torch.device("cpu"))
    yield


class _Methods(TorchFunctionMode):
    """Sees what torch is asked for, whether operators run for it or not."""

    def __init__(self, seen: list[str], dispatcher: cd.TokenDispatcher) -> None:
        super().__init__()
        self.seen, self.is_paused = seen, False
        self._devices: list[Any] = [dispatcher._open.device]
        ledger = dispatcher._open.accounts.ledger
        self._told = ledger._told.untyped_storage().data_ptr() if isinstance(ledger, DeviceLedger) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        by_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        moves = name == "to" and not by_torch and self._leads_to_the_host(*args[1:], *kwargs.values())
        if (name in _METHODS or moves) and not (self.is_paused or self.is_told(args)):
            self.seen.append(name)
        result = func(*args, **kwargs)
        if name == "__get__" and isinstance(result, torch.device):
            self._devices.append(result)
        return result

    def is_told(self, args: Any) -> bool:
        """Whether a call is about what the device has told already."""
        tensor = args[0] if args else None
        return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() == self._told

    def _leads_to_the_host(self, *arguments: Any) -> bool:
        named = [each for each in arguments if isinstance(each, (str, torch.device))]
        return any(
            torch.device(each).type == "cpu" and not any(each is known for known in self._devices) for each in named
        )


class _Operators(TorchDispatchMode):
    """Sees what runs, whoever has asked for it."""

    def __init__(self, seen: list[str], is_told: Callable[[Any], bool]) -> None:
        super().__init__()
        self._seen, self._is_told = seen, is_told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _TAGS.intersection(func.tags) and not self._is_told(args):
            self._seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _tell_copies(patch: pytest.MonkeyPatch, methods: _Methods) -> None:
    """Note copies by their age, in the place of what reads them."""
    make, values = HostCopy.__init__, HostCopy.values
    made: list[HostCopy] = []
    read: list[HostCopy] = []

    def made_now(copy: HostCopy, source: Tensor) -> None:
        make(copy, source)
        made.append(copy)

    def told(copy: HostCopy) -> list[Any]:
        if not any(copy is each for each in read):
            read.append(copy)
            methods.seen.append(FRESH if any(copy is each for each in made) else EARLIER)
        methods.is_paused = True
        try:
            return values(copy)
        finally:
            methods.is_paused = False

    patch.setattr(HostCopy, "__init__", made_now)
    patch.setattr(HostCopy, "values", told)
