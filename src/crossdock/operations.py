"""What the operators do, as plain functions: find the dispatcher by its key, and make one call of its group's.

`autograd.py` makes operators of them and says how they are differentiated; where nobody would see an operator (see
`eager.py`), they run without it. They take only tensors, numbers and strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from .backends.base import Call, Received, Transport, Weights
from .errors import ContractViolation
from .group.fingerprint import CallFacts
from .names import decode_name
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

    def note_combine(self, facts: CallFacts, num_rows: int) -> None:
        """Write down that a combine of so many rows begins."""

    def run(self, facts: CallFacts, movement: Callable[[Transport, Call], list[Tensor]]) -> list[Tensor]:
        """Any other call, numbered and compared."""


_open_dispatchers: WeakValueDictionary[str, Operable] = WeakValueDictionary()


def register(key: str, dispatcher: Operable) -> None:
    """Let the operators find an opened dispatcher by `key` for as long as it lives."""
    _open_dispatchers[key] = dispatcher


def find(key: str) -> Operable:
    """The dispatcher that was registered by `key`.

    Raises:
        ContractViolation: it is gone.
    """
    dispatcher = _open_dispatchers.get(key)
    if dispatcher is None:
        raise ContractViolation(
            "the dispatcher of this call no longer exists; keep it alive until its backward has run"
        )
    return dispatcher


def dispatch(
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
    """Rows, row scores, tokens per expert, expert offsets; kept scores, this call's number, the rows' end, the layout.

    The caller may write to the first four; the kept scores are the row scores as they were. `layer` is an encoded name
    (see `names.py`). `anchor` is given in grad mode only, and makes the outputs require grad on every rank alike.
    `compiled` says whether a compiler has traced the call. Where a checkpointed region is recomputed (see
    `recompute/frames.py`), the call moves its rows along the layout of the one that it replays.
    """
    facts = CallFacts(-1, "dispatch", decode_name(layer), num_tokens_per_rank, grad_mode=anchor is not None)
    dispatcher, of_layer = find(key), Layer(key, facts.layer)
    replay = replay_of(of_layer, compiled)
    if replay is None:
        number, end, received = dispatcher.run_dispatch(
            x, topk_scores, topk_expert_ids, num_local_tokens_per_expert, facts, compiled=compiled
        )
        told = [received.rows, received.row_scores, received.tokens_per_expert, received.expert_offsets]
        kept = received.row_scores.clone() if received.kept_scores is None else received.kept_scores
        outputs = [*told, kept, number, end, *received.layout]
    else:
        outputs = dispatcher.run_redispatch(x, topk_scores, topk_expert_ids, replay, facts)
    record(of_layer, compiled, topk_expert_ids, outputs[2:])
    return outputs


def combine(
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

    dispatcher = find(key)
    dispatcher.note_combine(facts, rows.shape[0])
    return dispatcher.run(facts, movement)


def dispatch_backward(
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

    return find(key).run(CallFacts(-1, "dispatch_backward", decode_name(layer), dispatch_number=int(number)), movement)


def combine_backward(
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

    dispatcher = find(key)
    return dispatcher.run(
        CallFacts(-1, "combine_backward", decode_name(layer), apply_scores=apply_scores, dispatch_number=int(number)),
        movement,
    )
