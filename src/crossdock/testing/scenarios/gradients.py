"""What autograd sees: grad mode, outputs that a loss leaves out, second derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import ContractViolation, TokenDispatcher
from ..checks import check_trial, judge
from ..compare import assert_bit_equal
from ..oracle import expected
from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat
from ..solving import forward, send
from .calls import refuses


def _inputs(problem: Problem, seat: Seat) -> tuple[Tensor, Tensor, Tensor]:
    parts = (problem.x[seat.rank], problem.topk_scores[seat.rank], problem.topk_expert_ids[seat.rank])
    x, scores, ids = (part.to(seat.device) for part in parts)
    return x, scores, ids


def grad_mode(seat: Seat) -> None:
    """In grad mode all outputs require grad, for T = 0 and plain inputs too, and backward runs; outside none does."""
    problem = seat.problem("ranks without tokens")
    with seat.open(problem.config) as dispatcher:
        routed = dispatcher.dispatch(*_inputs(problem, seat))
        out = dispatcher.combine(routed.rows, routed.handle)
        for name, tensor in (("rows", routed.rows), ("scores", routed.scores), ("output", out)):
            assert tensor.requires_grad, f"{name} does not require grad in grad mode"
        out.sum().backward()
        with torch.no_grad():
            routed = dispatcher.dispatch(*_inputs(problem, seat))
            out = dispatcher.combine(routed.rows, routed.handle)
        for name, tensor in (("rows", routed.rows), ("scores", routed.scores), ("output", out)):
            assert not tensor.requires_grad, f"{name} requires grad outside grad mode"


def without_grad(seat: Seat) -> None:
    """Outside grad mode, and in inference mode, the outputs have the same bits."""
    problem = seat.problem("skewed")
    answer = expected(problem, seat.device)[seat.rank].outcome
    with seat.open(problem.config) as dispatcher:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                attempt = send(dispatcher, problem, seat.rank, seat.device).home(dispatcher)
            assert_bit_equal(attempt.out, answer.out, f"output under {mode.__name__}")


def output_left_out(seat: Seat) -> None:
    """A rank whose loss leaves an output out joins the backward: everybody's gradients are those of a zero gradient."""
    problem = seat.problem("skewed")
    absent = torch.zeros_like(problem.grad_out[0])
    problem = problem.replace(grad_out=(absent, *problem.grad_out[1:]))
    with seat.open(problem.config) as dispatcher:
        layer = dispatcher.layer("left out")
        attempt = forward(layer, problem, seat.rank, seat.device)
        if seat.rank == 0:
            layer.join_backward(attempt.sent.routed.handle)
            check_trial(judge(attempt, attempt.outcome()))
        else:
            check_trial(judge(attempt, attempt.backward()))


def nothing_to_join(seat: Seat) -> None:
    """Joining a backward that there is not is an error, not a hang."""
    problem = seat.problem("ranks without tokens")
    with seat.open(problem.config) as dispatcher:
        attempt = forward(dispatcher, problem, seat.rank, seat.device)
        attempt.backward()
        with torch.no_grad():
            routed = dispatcher.dispatch(*_inputs(problem, seat))
            dispatcher.combine(routed.rows, routed.handle)
        for what, handle in {"a finished": attempt.sent.routed.handle, "an ungraded": routed.handle}.items():
            join: Callable[[], None] = lambda handle=handle: dispatcher.join_backward(handle)  # type: ignore[misc]  # noqa: E731
            refuses(ContractViolation, join, f"join_backward of {what} combine")


def second_derivative(seat: Seat) -> None:
    """There is none, and asking for it says so."""
    problem = seat.problem("skewed")
    with seat.open(problem.config) as dispatcher:
        x, scores, ids = _inputs(problem, seat)
        x.requires_grad_()
        message = refuses(
            ContractViolation, lambda: _differentiate_twice(dispatcher, x, scores, ids), "a second derivative"
        )
        assert "second derivative" in message, message


def _differentiate_twice(dispatcher: TokenDispatcher, x: Tensor, scores: Tensor, ids: Tensor) -> None:
    routed = dispatcher.dispatch(x, scores, ids)
    out = dispatcher.combine(routed.rows * routed.rows, routed.handle)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    grad.sum().backward()


SCENARIOS = (
    Scenario("autograd", "grad mode decides what requires grad", grad_mode),
    Scenario("autograd", "the same bits without grad", without_grad),
    Scenario("autograd", "a loss may leave an output out", output_left_out),
    Scenario("autograd", "joining no backward is an error", nothing_to_join),
    Scenario("autograd", "there is no second derivative", second_derivative),
)
