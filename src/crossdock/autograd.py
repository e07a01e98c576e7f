"""Dispatch, combine and their adjoints, written once for every backend, as operators of `torch.library`.

The operators are functional, take only tensors, numbers and strings, and find their dispatcher by its key: their bodies
stand in `operations.py`. Where nobody would see an operator (see `eager.py`), its body runs without it, below one node
of autograd with the same adjoint. The adjoint of dispatch is an unweighted combine with the same reduction; the adjoint
of combine dispatches the gradient. `fast`'s inner rounding is passed straight through.

All four are ordered effects, so a compiler neither drops nor reorders them, and all return one list of tensors:
inductor strips the effect's token as if a single output followed it, and mistakes sizes that an operator with several
outputs creates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import operations
from .eager import below, is_plain_call, without_operator
from .errors import ContractViolation
from .operations import find
from .ordering import keep_order_in_inductor, register_ordered

# -- the operators, and their shapes for tracing, of what they need of their inputs ------------------------------------


dispatch = torch.library.custom_op("crossdock::dispatch", mutates_args=())(operations.dispatch)


@dispatch.register_fake
def _(x: Tensor, *rest: Any) -> list[Tensor]:
    *_, key, _, num_tokens_per_rank, _ = rest
    keep_order_in_inductor(_OPERATORS)
    dispatcher = find(key)
    transport, planned = dispatcher.transport, dispatcher.planned_rows(x.shape[0], num_tokens_per_rank)
    new_size = torch.library.get_ctx().new_dynamic_size
    num_rows, num_local = new_size() if planned is None else planned, transport.spec.num_local_experts
    return [
        x.new_empty(num_rows, x.shape[1]),
        x.new_empty(num_rows, dtype=torch.float32),
        x.new_empty(num_local, dtype=torch.int64),
        x.new_empty(num_local, dtype=torch.int32),
        x.new_empty(num_rows, dtype=torch.float32),
        torch.empty(1, dtype=torch.int64, device="cpu"),
        x.new_empty(1, dtype=torch.int64),
        *transport.fake_layout(x.shape[0], num_rows, x, new_size),
    ]


combine = torch.library.custom_op("crossdock::combine", mutates_args=())(operations.combine)


@combine.register_fake
def _(rows: Tensor, topk_scores: Tensor, *_: Any) -> list[Tensor]:
    return [rows.new_empty(topk_scores.shape[0], rows.shape[1])]


dispatch_backward = torch.library.custom_op("crossdock::dispatch_backward", mutates_args=())(
    operations.dispatch_backward
)


@dispatch_backward.register_fake
def _(grad_rows: Tensor, grad_row_scores: Tensor, *rest: Any) -> list[Tensor]:
    *_, key, _, num_tokens = rest
    top_k = find(key).transport.spec.top_k
    return [grad_rows.new_empty(num_tokens, grad_rows.shape[1]), grad_row_scores.new_empty(num_tokens, top_k)]


combine_backward = torch.library.custom_op("crossdock::combine_backward", mutates_args=())(operations.combine_backward)


@combine_backward.register_fake
def _(grad_out: Tensor, _rows: Tensor, row_scores: Tensor, *rest: Any) -> list[Tensor]:
    *_, key, _, apply_scores = rest
    top_k = find(key).transport.spec.top_k
    grad_rows = grad_out.new_empty(row_scores.shape[0], grad_out.shape[1])
    return [grad_rows, row_scores.new_empty(grad_out.shape[0], top_k) if apply_scores else row_scores.new_empty(0)]


# -- adjoints ---------------------------------------------------------------------------------------------------------


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, *_, ctx.key, layer, _, _ = inputs
    ctx.num_tokens, ctx.hidden_dim, ctx.dtype = x.shape[0], x.shape[1], x.dtype
    kept_scores, number, _, *layout = output[4:]
    ctx.save_for_backward(layer, kept_scores, number, *layout)  # nothing that the caller may write to
    ctx.mark_non_differentiable(*output[2:])  # else a layout of floats would lead a combine's backward back here
    ctx.set_materialize_grads(False)  # else every integer output would get a gradient of zeros


def _dispatch_adjoint(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    layer, kept_scores, number, *layout = ctx.saved_tensors
    grad_rows, grad_scores = grads[0], grads[1]  # None where the loss uses only the other: every rank still takes part
    if grad_rows is None:
        grad_rows = kept_scores.new_zeros(kept_scores.shape[0], ctx.hidden_dim, dtype=ctx.dtype)
    if grad_scores is None:
        grad_scores = torch.zeros_like(kept_scores)
    run = without_operator(operations.dispatch_backward, grad_rows, grad_scores) or dispatch_backward
    dx, dscores = run(grad_rows.contiguous(), grad_scores.contiguous(), number, layout, ctx.key, layer, ctx.num_tokens)
    needs_x, needs_scores = ctx.needs_input_grad[:2]
    return dx if needs_x else None, dscores if needs_scores else None, None, None, None, None, None, None, None


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, _, row_scores, rows_end, number, layout, _, ctx.key, layer, ctx.apply_scores = inputs
    saved_rows = rows if ctx.apply_scores else rows.new_empty(0)
    ctx.save_for_backward(layer, saved_rows, row_scores, rows_end, number, *layout)


def _combine_adjoint(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    layer, rows, row_scores, rows_end, number, *layout = ctx.saved_tensors
    run = without_operator(operations.combine_backward, grads[0], rows) or combine_backward
    grad_rows, dscores = run(
        grads[0].contiguous(), rows, row_scores, rows_end, number, layout, ctx.key, layer, ctx.apply_scores
    )
    needs_rows, needs_scores = ctx.needs_input_grad[:2]
    dscores = dscores if ctx.apply_scores and needs_scores else None
    return grad_rows if needs_rows else None, dscores, None, None, None, [None] * len(layout), None, None, None, None


def _refuse_double_backward(ctx: Any, *_: Any) -> Any:
    raise ContractViolation(
        "crossdock's dispatch and combine have no second derivative: do not differentiate their backward"
    )


dispatch.register_autograd(_dispatch_adjoint, setup_context=_dispatch_setup)
combine.register_autograd(_combine_adjoint, setup_context=_combine_setup)
dispatch_backward.register_autograd(_refuse_double_backward)
combine_backward.register_autograd(_refuse_double_backward)
_OPERATORS = (dispatch, combine, dispatch_backward, combine_backward)
register_ordered(_OPERATORS)


# -- without the operators, where nobody would see them ---------------------------------------------------------------


def call_dispatch(*inputs: Any) -> Sequence[Tensor]:
    """`dispatch`, with all inputs but the last one: whether a compiler traces this call."""
    if not is_plain_call(*inputs[:4]):
        outputs: Sequence[Tensor] = dispatch(*inputs, torch.compiler.is_compiling())
    elif torch.is_grad_enabled():
        outputs = _DispatchNode.apply(*inputs, False)  # type: ignore[no-untyped-call]
    else:
        outputs = below(operations.dispatch, *inputs, False)
    return outputs


def call_combine(
    rows: Tensor,
    topk_scores: Tensor,
    row_scores: Tensor,
    rows_end: Tensor,
    number: Tensor,
    layout: Sequence[Tensor],
    *rest: Any,
) -> Tensor:
    """`combine`, and of its outputs the only one."""
    if not is_plain_call(rows, topk_scores, row_scores):
        outputs: Sequence[Tensor] = combine(rows, topk_scores, row_scores, rows_end, number, list(layout), *rest)
    elif torch.is_grad_enabled():
        flat = (rows, topk_scores, row_scores, rows_end, number, *layout, *rest)
        outputs = _CombineNode.apply(*flat)  # type: ignore[no-untyped-call]
    else:
        outputs = below(operations.combine, rows, topk_scores, row_scores, rows_end, number, layout, *rest)
    return outputs[0]


class _DispatchNode(torch.autograd.Function):
    """`dispatch` in a graph of autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = below(operations.dispatch, *inputs)
        _dispatch_setup(ctx, inputs, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _dispatch_adjoint(ctx, grads)


_FIRST, _LAST = 5, -4  # of a combine's inputs: what stands before and behind its layout, as a node takes it: unpacked


class _CombineNode(torch.autograd.Function):
    """`combine` in a graph of autograd."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> tuple[Tensor, ...]:
        inputs = (*flat[:_FIRST], flat[_FIRST:_LAST], *flat[_LAST:])
        outputs = below(operations.combine, *inputs)
        _combine_setup(ctx, inputs, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needed = _combine_adjoint(ctx, grads)
        return (*needed[:_FIRST], *needed[_FIRST], *needed[_FIRST + 1 :])
