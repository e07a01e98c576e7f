"""A contender opened for a problem, and its operations, each ready to be called with the number of a set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ... import Dispatched, TokenDispatcher
from .contenders import Contender, traits_here
from .moved import Moved, move
from .problems import Problem

DISPATCH, COMBINE, PAIR = "dispatch", "combine", "pair"
DISPATCH_BACKWARD, COMBINE_BACKWARD = "dispatch backward", "combine backward"
COMBINE_BACKWARD_NO_SCORES = "combine backward, no scores"


class Opened:
    """A dispatcher and what its operations start from. Opening and every operation are collective."""

    def __init__(self, contender: Contender, problem: Problem) -> None:
        self.contender, self.problem = contender, problem
        self.traits = traits_here(problem, contender)
        free = _free_bytes(problem.device)
        config = contender.config(problem, self.traits)
        self.dispatcher = TokenDispatcher(config, backend=contender.backend, device=problem.device)
        taken = _free_bytes(problem.device)
        self.opening_bytes = None if free is None or taken is None else free - taken
        self.moved = [move(self.dispatcher, problem, number) for number in range(problem.num_sets)]

    @property
    def workspace_bytes(self) -> int | None:
        """Persistent bytes as the dispatcher tells them; None where it does not."""
        told: int | None = getattr(self.dispatcher, "workspace_bytes", None)
        return told

    @property
    def capturable(self) -> bool:
        """Whether its calls can be captured in a CUDA graph."""
        on_gpu = self.problem.device.type == "cuda"
        return on_gpu and self.traits.capturable and self.contender.capacity.kind != "exact"

    @property
    def operations(self) -> dict[str, Callable[[int], Any]]:
        """By name, in the order of a layer. An exact reduction changes what adds up, and nothing else."""
        if self.contender.reduction == "exact":
            return {COMBINE: self.combine, DISPATCH_BACKWARD: self.dispatch_backward}
        operations: dict[str, Callable[[int], Any]] = {DISPATCH: self.dispatch, COMBINE: self.combine}
        if self.problem.workload.is_decode:
            operations[PAIR] = self.pair
        operations[DISPATCH_BACKWARD] = self.dispatch_backward
        operations[COMBINE_BACKWARD] = self.combine_backward
        operations[COMBINE_BACKWARD_NO_SCORES] = self.combine_backward_no_scores
        return operations

    @property
    def operations_with_grad(self) -> dict[str, Callable[[int], Any]]:
        """Forward operations again, as autograd records them."""
        return {
            name: partial(operation, grad=True)
            for name, operation in ((DISPATCH, self.dispatch), (COMBINE, self.combine))
            if name in self.operations
        }

    def dispatch(self, number: int, *, grad: bool = False) -> Dispatched:
        """Tokens of a set to their experts."""
        x, scores, ids, _ = self._set(number)
        if grad:
            x, scores = self._moved(number).x, self._moved(number).topk_scores
        with torch.set_grad_enabled(grad):
            return self.dispatcher.dispatch(x, scores, ids)

    def combine(self, number: int, *, grad: bool = False) -> torch.Tensor:
        """Experts' results of a set home."""
        moved = self._moved(number)
        with torch.set_grad_enabled(grad):
            return self.dispatcher.combine(moved.y, moved.routed.handle)

    def pair(self, number: int) -> torch.Tensor:
        """Dispatch, and combine of the rows as they came."""
        with torch.no_grad():
            routed = self.dispatch(number)
            return self.dispatcher.combine(routed.rows, routed.handle)

    def dispatch_backward(self, number: int) -> tuple[torch.Tensor, ...]:
        """Gradients of x and of the scores, from `y` as the rows' gradient."""
        moved = self._moved(number)
        outputs, grads = (moved.routed.rows, moved.routed.scores), (moved.y.detach(), moved.grad_row_scores)
        return torch.autograd.grad(outputs, (moved.x, moved.topk_scores), grads, retain_graph=True)

    def combine_backward(self, number: int) -> tuple[torch.Tensor, ...]:
        """Gradients of the rows and of the scores."""
        moved = self._moved(number)
        return torch.autograd.grad(moved.out, (moved.y, moved.topk_scores), moved.grad_out, retain_graph=True)

    def combine_backward_no_scores(self, number: int) -> tuple[torch.Tensor, ...]:
        """Gradient of the rows, of a combine that applied no scores."""
        moved = self._moved(number)
        return torch.autograd.grad(moved.out_no_scores, (moved.y,), moved.grad_out, retain_graph=True)

    def close(self) -> None:
        """Close the dispatcher; every graph over it is gone by now."""
        self.moved.clear()
        close: Any = self.dispatcher.close
        destroyed = "graphs_destroyed" in inspect.signature(close).parameters
        close(**({"graphs_destroyed": True} if destroyed else {}))

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with suppress(RuntimeError):  # the fault that brought us here is the one to tell
            self.close()

    def _set(self, number: int) -> tuple[torch.Tensor, ...]:
        return self.problem.sets[number % self.problem.num_sets]

    def _moved(self, number: int) -> Moved:
        return self.moved[number % self.problem.num_sets]


def _free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
