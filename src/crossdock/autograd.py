"""Dispatch, combine and their adjoints, written once for every backend, as operators of `torch.library`.

The operators are functional, take only tensors, numbers and strings, and find their dispatcher by its key. Where nobody
would see an operator (see `eager.py`), its body runs without it, below one node of autograd with the same adjoint. The
adjoint of dispatch is an unweighted combine with the same reduction; the adjoint of combine dispatches the gradient.
`fast`'s inner rounding is passed straight through.

All four are ordered effects, so a compiler neither drops nor reorders them, and all return one list of tensors:
inductor strips the effect's token as if a single output followed it, and mistakes sizes that an operator with several
outputs creates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .backends.base import Call, Received, Transport, Weights
from .eager import is_plain_call
from .errors import ContractViolation
from .group.fingerprint import CallFacts
from .names import decode_name
from .ordering import keep_order_in_inductor, register_ordered
from .recompute.frames import Layer, Replay, record, replay_of
from .row_capacity import Size


class Operable(Protocol):
    """What the operators need of a dispatcher."""

    transport: Transport

    def run_dispatch(
        self,
        x: Tensor,
        scores: Tensor,
        expert_ids: Tensor,
        local_counts: Tensor | None,
        facts: CallFacts,
        *,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Received]:
        """One dispatch, checked and compared.

        Its call number `[1]` int64 on the CPU, the end of its last expert's rows `[1]` int64, and what it brings.
        """

    def run_redispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, replay: Replay, facts: CallFacts
    ) -> list[Tensor]:
        """All outputs of a dispatch that replays a recorded one."""

    def planned_rows(self, num_tokens: Size, num_tokens_per_rank: Size) -> Size | None:
        """Rows of a dispatch, as far as they are known without the call itself (see `LayerView.dispatch`)."""

    def zero_tail(self, rows: Tensor, rows_end: Tensor) -> None:
        """Zero what lies behind the last expert's rows, in place, where the configuration asks for it."""

    def run(self, facts: CallFacts, movement: Callable[[Transport, Call], list[Tensor]]) -> list[Tensor]:
        """Any other call, numbered and compared."""


_open_dispatchers: WeakValueDictionary[str, Operable] = WeakValueDictionary()


def register(key: str, dispatcher: Operable) -> None:
    """Let the operators find an opened dispatcher by `key` for as long as it lives."""
    _open_dispatchers[key] = dispatcher


def _find(key: str) -> Operable:
    dispatcher = _open_dispatchers.get(key)
    if dispatcher is None:
        raise ContractViolation(
            "the dispatcher of this call no longer exists; keep it alive until its backward has run"
        )
    return dispatcher


# -- forward
# ------------------------------------------------------------------------------------------------------------


def _dispatch(
    x: Tensor,
    topk_scores: Tensor,
    topk_expert_ids: Tensor,
    num_local_tokens_per_expert: Tensor | None,
    anchor: Tensor | None,
    key: str,
    layer: Tensor,
    num_tokens_per_rank: int,
    compiled: bool,
) -> list[Tensor]:
    """Rows, row scores, tokens per expert, expert offsets, this call's number, the rows' end, then the layout.

    `layer` is an encoded name (see `names.py`). `anchor` is given in grad mode only, and makes the outputs require
    grad on every rank alike. `compiled` says whether a compiler has traced the call. Where a checkpointed region is
    recomputed (see `recompute/frames.py`), the call moves its rows along the layout of the one that it replays.
    """
    facts = CallFacts(-1, "dispatch", decode_name(layer), num_tokens_per_rank, grad_mode=anchor is not None)
    dispatcher, of_layer = _find(key), Layer(key, facts.layer)
    replay = replay_of(of_layer, compiled)
    if replay is None:
        number, end, received = dispatcher.run_dispatch(
            x, topk_scores, topk_expert_ids, num_local_tokens_per_expert, facts, compiled=compiled
        )
        told = [received.rows, received.row_scores, received.tokens_per_expert, received.expert_offsets]
        outputs = [*told, number, end, *received.layout]
    else:
        outputs = dispatcher.run_redispatch(x, topk_scores, topk_expert_ids, replay, facts)
    record(of_layer, compiled, topk_expert_ids, outputs[1:])
    return outputs


dispatch = torch.library.custom_op("crossdock::dispatch", mutates_args=())(_dispatch)


@dispatch.register_fake
def _(
    x: Tensor,
    topk_scores: Tensor,
    topk_expert_ids: Tensor,
    num_local_tokens_per_expert: Tensor | None,
    anchor: Tensor | None,
    key: str,
    layer: Tensor,
    num_tokens_per_rank: int,
    compiled: bool,
) -> list[Tensor]:
    keep_order_in_inductor(_OPERATORS)
    dispatcher = _find(key)
    transport, planned = dispatcher.transport, dispatcher.planned_rows(x.shape[0], num_tokens_per_rank)
    new_size = torch.library.get_ctx().new_dynamic_size
    num_rows, num_local = new_size() if planned is None else planned, transport.spec.num_local_experts
    return [
        x.new_empty(num_rows, x.shape[1]),
        x.new_empty(num_rows, dtype=torch.float32),
        x.new_empty(num_local, dtype=torch.int64),
        x.new_empty(num_local, dtype=torch.int32),
        torch.empty(1, dtype=torch.int64, device="cpu"),
        x.new_empty(1, dtype=torch.int64),
        *transport.fake_layout(x.shape[0], num_rows, x, new_size),
    ]


def _combine(
    rows: Tensor,
    topk_scores: Tensor,
    row_scores: Tensor,
    rows_end: Tensor,
    number: Tensor,
    layout: Sequence[Tensor],
    anchor: Tensor | None,
    key: str,
    layer: Tensor,
    apply_scores: bool,
) -> list[Tensor]:
    """`[T, hidden_dim]` from rows `[R, hidden_dim]`."""
    facts = CallFacts(
        -1,
        "combine",
        decode_name(layer),
        grad_mode=anchor is not None,
        apply_scores=apply_scores,
        dispatch_number=int(number),
    )
    weights = Weights(topk_scores, row_scores) if apply_scores else None

    def movement(transport: Transport, call: Call) -> list[Tensor]:
        return [transport.rows_home(rows, weights, layout, call)]

    return _find(key).run(facts, movement)


combine = torch.library.custom_op("crossdock::combine", mutates_args=())(_combine)


@combine.register_fake
def _(
    rows: Tensor,
    topk_scores: Tensor,
    row_scores: Tensor,
    rows_end: Tensor,
    number: Tensor,
    layout: Sequence[Tensor],
    anchor: Tensor | None,
    key: str,
    layer: Tensor,
    apply_scores: bool,
) -> list[Tensor]:
    return [rows.new_empty(topk_scores.shape[0], rows.shape[1])]


# -- adjoints
# -----------------------------------------------------------------------------------------------------------


def _dispatch_backward(
    grad_rows: Tensor,
    grad_row_scores: Tensor,
    number: Tensor,
    layout: Sequence[Tensor],
    key: str,
    layer: Tensor,
    num_tokens: int,
) -> list[Tensor]:
    """Gradients of x `[T, hidden_dim]` and of the scores `[T, top_k]`."""

    def movement(transport: Transport, call: Call) -> list[Tensor]:
        return list(transport.dispatch_backward(grad_rows, grad_row_scores, layout, call))

    return _find(key).run(CallFacts(-1, "dispatch_backward", decode_name(layer), dispatch_number=int(number)), movement)


dispatch_backward = torch.library.custom_op("crossdock::dispatch_backward", mutates_args=())(_dispatch_backward)


@dispatch_backward.register_fake
def _(
    grad_rows: Tensor,
    grad_row_scores: Tensor,
    number: Tensor,
    layout: Sequence[Tensor],
    key: str,
    layer: Tensor,
    num_tokens: int,
) -> list[Tensor]:
    top_k = _find(key).transport.spec.top_k
    return [grad_rows.new_empty(num_tokens, grad_rows.shape[1]), grad_row_scores.new_empty(num_tokens, top_k)]


def _combine_backward(
    grad_out: Tensor,
    rows: Tensor,
    row_scores: Tensor,
    rows_end: Tensor,
    number: Tensor,
    layout: Sequence[Tensor],
    key: str,
    layer: Tensor,
    apply_scores: bool,
) -> list[Tensor]:
    """Gradients of rows `[R, hidden_dim]` and of the scores `[T, top_k]` (empty without `apply_scores`)."""

    def movement(transport: Transport, call: Call) -> list[Tensor]:
        if apply_scores:
            grad_rows, grad_scores = transport.combine_backward(grad_out, rows, row_scores, layout, call)
        else:
            grad_rows, grad_scores = transport.rows_out(grad_out, layout, call), row_scores.new_empty(0)
        dispatcher.zero_tail(grad_rows, rows_end)
        return [grad_rows, grad_scores]

    dispatcher = _find(key)
    return dispatcher.run(
        CallFacts(-1, "combine_backward", decode_name(layer), apply_scores=apply_scores, dispatch_number=int(number)),
        movement,
    )


combine_backward = torch.library.custom_op("crossdock::combine_backward", mutates_args=())(_combine_backward)


@combine_backward.register_fake
def _(
    grad_out: Tensor,
    rows: Tensor,
    row_scores: Tensor,
    rows_end: Tensor,
    number: Tensor,
    layout: Sequence[Tensor],
    key: str,
    layer: Tensor,
    apply_scores: bool,
) -> list[Tensor]:
    top_k = _find(key).transport.spec.top_k
    grad_rows = grad_out.new_empty(row_scores.shape[0], grad_out.shape[1])
    return [grad_rows, row_scores.new_empty(grad_out.shape[0], top_k) if apply_scores else row_scores.new_empty(0)]


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, *_, ctx.key, layer, _, _ = inputs
    ctx.num_tokens, ctx.hidden_dim, ctx.dtype = x.shape[0], x.shape[1], x.dtype
    _, row_scores, _, _, number, _, *layout = output
    ctx.save_for_backward(layer, row_scores, number, *layout)
    ctx.mark_non_differentiable(*output[2:])  # else a layout of floats would lead a combine's backward back here
    ctx.set_materialize_grads(False)  # else every integer output would get a gradient of zeros


def _dispatch_adjoint(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    layer, row_scores, number, *layout = ctx.saved_tensors
    grad_rows, grad_scores = grads[0], grads[1]  # None where the loss uses only the other: every rank still takes part
    if grad_rows is None:
        grad_rows = row_scores.new_zeros(row_scores.shape[0], ctx.hidden_dim, dtype=ctx.dtype)
    if grad_scores is None:
        grad_scores = torch.zeros_like(row_scores)
    run = _without_operator(_dispatch_backward, grad_rows, grad_scores) or dispatch_backward
    dx, dscores = run(grad_rows.contiguous(), grad_scores.contiguous(), number, layout, ctx.key, layer, ctx.num_tokens)
    needs_x, needs_scores = ctx.needs_input_grad[:2]
    return dx if needs_x else None, dscores if needs_scores else None, None, None, None, None, None, None, None


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, _, row_scores, rows_end, number, layout, _, ctx.key, layer, ctx.apply_scores = inputs
    saved_rows = rows if ctx.apply_scores else rows.new_empty(0)
    ctx.save_for_backward(layer, saved_rows, row_scores, rows_end, number, *layout)


def _combine_adjoint(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    layer, rows, row_scores, rows_end, number, *layout = ctx.saved_tensors
    run = _without_operator(_combine_backward, grads[0], rows) or combine_backward
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


# -- without the operators, where nobody would see them
# -----------------------------------------------------------------------------------------------------------


def call_dispatch(*inputs: Any) -> Sequence[Tensor]:
    """`dispatch`, with all inputs but the last one: whether a compiler traces this call."""
    if not is_plain_call(*inputs[:4]):
        outputs: Sequence[Tensor] = dispatch(*inputs, torch.compiler.is_compiling())
    elif torch.is_grad_enabled():
        outputs = _DispatchNode.apply(*inputs, False)  # type: ignore[no-untyped-call]
    else:
        outputs = _below(_dispatch, *inputs, False)
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
        outputs = _below(_combine, rows, topk_scores, row_scores, rows_end, number, layout, *rest)
    return outputs[0]


def _without_operator(body: Callable[..., list[Tensor]], *moved: Tensor) -> Callable[..., list[Tensor]] | None:
    """The body of an adjoint's operator; None where the operator is needed, as it is to refuse a second derivative."""
    return None if torch.is_grad_enabled() or not is_plain_call(*moved) else partial(_below, body)


def _below(body: Callable[..., list[Tensor]], *inputs: Any) -> list[Tensor]:
    """Run a body as its operator does: autograd sees nothing of what it does."""
    with torch._C._AutoDispatchBelowAutograd():
        return body(*inputs)


class _DispatchNode(torch.autograd.Function):
    """`dispatch` in a graph of autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = _below(_dispatch, *inputs)
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
        outputs = _below(_combine, *inputs)
        _combine_setup(ctx, inputs, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needed = _combine_adjoint(ctx, grads)
        return (*needed[:_FIRST], *needed[_FIRST], *needed[_FIRST + 1 :])
