"""torch.compile, and torch's own checks of our operators."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import RowCapacity, TokenDispatcher
from ..compare import assert_bit_equal
from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat

_NUM_TOKENS = (8, 5, 0)
_OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
_numbers = itertools.count()
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _problem(seat: Seat, **fields: Any) -> Problem:
    problem = seat.problem("0 to K valid ids", alignment=16)
    return problem.replace(config=dataclasses.replace(problem.config, **fields))


def _step(dispatcher: TokenDispatcher, weight: Tensor) -> Step:
    layer = dispatcher.layer("compiled")

    def step(x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        routed = layer.dispatch(x, scores, ids)
        return layer.combine(routed.rows * weight, routed.handle), routed.tokens_per_expert

    return step


def compiled_aot_eager(seat: Seat) -> None:
    """`fullgraph=True` under aot_eager: equal to the bit, forward and backward, for changing token counts."""
    _compare_compiled(seat, "aot_eager", _problem(seat))


def compiled_inductor(seat: Seat) -> None:
    """`fullgraph=True` under inductor; what stands between our operators is exact here, so all is equal to the bit."""
    _compare_compiled(seat, "inductor", _problem(seat))


def compiled_worst_case(seat: Seat) -> None:
    """The size of the rows follows from that of the inputs, with and without a compiler."""
    problem = _problem(seat, row_capacity=RowCapacity.worst_case(), equal_token_counts=True)
    _compare_compiled(seat, "inductor", problem)


def compiled_calibrated(seat: Seat) -> None:
    """A layer that was calibrated before it was compiled."""
    _compare_compiled(seat, "aot_eager", _problem(seat, row_capacity=RowCapacity.calibrated(3.0)))


def _compare_compiled(seat: Seat, compiler: str, problem: Problem) -> None:
    with seat.open(problem.config) as dispatcher:
        shape, dtype = (problem.config.hidden_dim,), problem.config.dtype
        weight = torch.full(shape, 2.0, dtype=dtype, device=seat.device, requires_grad=True)
        eager = _step(dispatcher, weight)
        compiled = torch.compile(_with_code_of_its_own(eager), backend=compiler, fullgraph=True)
        for num_tokens in _NUM_TOKENS:
            wanted = _run(eager, problem, seat, num_tokens)
            got = _run(compiled, problem, seat, num_tokens)
            for name, mine, theirs in zip(
                ("output", "counts", "grad of x", "grad of scores"), got, wanted, strict=True
            ):
                assert_bit_equal(mine, theirs, f"{name} under {compiler} with {num_tokens} tokens")


def _with_code_of_its_own(function: Step) -> Step:
    """The same function, which shares no compiled code with others: ranks may be threads of one process."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    copy: Step = types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    return copy


def _run(step: Step, problem: Problem, seat: Seat, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rank = seat.rank
    x = problem.x[rank][:num_tokens].to(seat.device, copy=True).requires_grad_()
    scores = problem.topk_scores[rank][:num_tokens].to(seat.device, copy=True).requires_grad_()
    out, counts = step(x, scores, problem.topk_expert_ids[rank][:num_tokens].to(seat.device))
    out.backward(problem.grad_out[rank][:num_tokens].to(seat.device))
    assert x.grad is not None and scores.grad is not None, "no gradient came to the inputs"
    return out.detach(), counts, x.grad, scores.grad


def opcheck(seat: Seat) -> None:
    """`torch.library.opcheck` of dispatch and combine: schema, autograd registration, and shapes under fake tensors."""
    problem = _problem(seat)
    with seat.open(problem.config) as dispatcher:
        for num_tokens in (8, 0):
            for operator, arguments in _operator_calls(dispatcher, problem, seat, num_tokens):
                torch.library.opcheck(operator, arguments, test_utils=_OPCHECKS)


def _operator_calls(
    dispatcher: TokenDispatcher, problem: Problem, seat: Seat, num_tokens: int
) -> list[tuple[torch._ops.OpOverload, tuple[object, ...]]]:
    """Record our operators' calls in one forward."""
    recorder = _Recorder()
    with recorder:
        _step(dispatcher, torch.ones((), device=seat.device))(
            problem.x[seat.rank][:num_tokens].to(seat.device),
            problem.topk_scores[seat.rank][:num_tokens].to(seat.device),
            problem.topk_expert_ids[seat.rank][:num_tokens].to(seat.device),
        )
    assert len(recorder.calls) == 2, f"a dispatch and a combine are 2 operators, not {len(recorder.calls)}"
    return recorder.calls


class _Recorder(torch.overrides.TorchFunctionMode):
    """Notes the calls of the operators of the library `crossdock`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple[object, ...]]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "crossdock":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


SCENARIOS = (
    Scenario("compile", "torch.compile, aot_eager: the same bits", compiled_aot_eager, max_ranks=2),
    Scenario("compile", "torch.compile, inductor: the same bits", compiled_inductor, max_ranks=2),
    Scenario(
        "compile",
        "torch.compile, worst case: the same bits",
        compiled_worst_case,
        min_ranks=2,
        max_ranks=2,
        needs=(("row_capacities", "worst_case"),),
    ),
    Scenario(
        "compile",
        "torch.compile, calibrated: the same bits",
        compiled_calibrated,
        max_ranks=2,
        needs=(("row_capacities", "calibrated"),),
    ),
    Scenario("compile", "torch's checks of our operators", opcheck),
)
