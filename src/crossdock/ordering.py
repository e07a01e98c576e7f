"""Keeps inductor from swapping our operators.

All operators are ordered effects, and torch's tracing keeps their order. Inductor's lowering of effects, however, notes
the order under buffer names where its scheduler looks up operation names, so the order is lost and the pass that saves
peak memory may swap two operators on independent data (torch 2.11 to 2.14). Here the same edge is noted under the right
name, as a dependency that orders without keeping a buffer alive.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.library import CustomOpDef


def register_ordered(operators: Sequence[CustomOpDef]) -> None:
    """Make the operators ordered effects: compiled graphs thread one token through all of them."""
    for operator in operators:
        _register_effectful_op(operator._opoverload, _EffectType.ORDERED)


def keep_order_in_inductor(operators: Sequence[CustomOpDef]) -> None:
    """Give inductor our lowering, if inductor is loaded; called while tracing, so that importing never loads it."""
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or operators[0]._opoverload in lowering.lowerings:
        return
    for operator in operators:
        _lower_in_order(operator._opoverload, lowering)


def _lower_in_order(overload: Any, lowering: Any) -> None:
    from torch._inductor.virtualized import V

    call = lowering.fallback_handler(overload, add_to_fallback_set=False)

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        first, previous = len(graph.operations), graph.effectful_ops.get(_EffectType.ORDERED)
        outputs = call(*args, **kwargs)
        if previous is not None:
            for operation in graph.operations[first:]:
                graph.additional_buffer_deps[operation.get_operation_name()].add(previous.get_name())
        return outputs

    lowering.register_lowering(overload, type_promotion_kind=None)(lower)
