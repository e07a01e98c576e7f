"""Leaving an operator out: called in eager mode, where nobody but torch's dispatcher would see the call.

An operator of `torch.library` costs the host 10 to 60 us beside its body (docs/measurements.md). Compilers, selective
checkpointing, tracers, transforms and tensor subclasses need it; a plain eager call does not, and runs the same body
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

_PLAIN_CLASSES = frozenset({Tensor, torch.nn.Parameter})
# In force for all operators of this thread where nothing has been asked for. Autocast is left to what runs inside.
_ALWAYS_INCLUDED = (DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)).raw_repr()
_WRAPPINGS = (
    DispatchKey.Python,  # a class with `__torch_dispatch__`
    DispatchKey.PythonTLSSnapshot,
    DispatchKey.Functionalize,
    DispatchKey.Negative,  # what is in memory is not yet the value
    DispatchKey.Conjugate,
    DispatchKey.ZeroTensor,
)
_WRAPPED = sum({DispatchKeySet(key).raw_repr() for key in _WRAPPINGS})
_keys_of = torch._C._dispatch_keys
_eval_frame: Any = torch._C._dynamo.eval_frame


def is_plain_call(*tensors: Tensor | None) -> bool:
    """Whether an operator on these tensors would do no more than run its body, with its adjoint in grad mode.

    Not so while a compiler traces, or would trace what is called from here; inside a mode, a transform or a tracer; on
    tensors of another class, or whose memory does not hold their values; and where autograd is switched off beside
    grad mode, as in the body of another operator.
    """
    if torch.compiler.is_compiling() or not _is_unobserved():
        return False
    for tensor in tensors:  # without a call for each; None is nothing at all
        if tensor is not None and (type(tensor) not in _PLAIN_CLASSES or _keys_of(tensor).raw_repr() & _WRAPPED):
            return False
    return True


def without_operator(body: Callable[..., list[Tensor]], *moved: Tensor) -> Callable[..., list[Tensor]] | None:
    """The body of an adjoint's operator; None where the operator is needed, as it is to refuse a second derivative."""
    return None if torch.is_grad_enabled() or not is_plain_call(*moved) else partial(below, body)


def below(body: Callable[..., list[Tensor]], *inputs: Any) -> list[Tensor]:
    """Run a body as its operator does: autograd sees nothing of what it does."""
    with torch._C._AutoDispatchBelowAutograd():
        return body(*inputs)


def _is_unobserved() -> bool:
    """Whether nothing in this thread looks at calls of operators."""
    return (
        not torch._C._dispatch_tls_local_include_set().raw_repr() & ~_ALWAYS_INCLUDED
        and not torch._C._len_torch_function_stack()
        and _eval_frame.get_eval_frame_callback() is None
        and (
            not torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)
            or not torch.is_grad_enabled()
        )
    )
