"""The host runs ahead of the device, and other work beside it: what a call was given may change hands at once.

On a GPU the device is kept busy first, so that all of this is decided before a call's first kernel runs, and some of
the work goes to a second stream. On a CPU, where every call has ended when it returns, the same steps are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...types import DispatchLayer, RowCapacity
from ..compare import assert_bit_equal
from ..oracle import expected
from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat
from ..solving import Outcome

_BUSY_CYCLES = 20_000_000  # of a GPU: about 10 ms
_JUNK = 0x7F7F7F7F7F7F7F7F
_Stream = torch.cuda.Stream | None


def _problem(seat: Seat, capacity: RowCapacity, seed: int = 0) -> Problem:
    problem = seat.problem("0 to K valid ids", experts="identity")
    ids = [part.flip(0) if seed else part for part in problem.topk_expert_ids]
    return problem.replace(config=dataclasses.replace(problem.config, row_capacity=capacity)).redrawn(ids, seed)


def _rounds(seat: Seat) -> range:
    return range(20 if seat.device.type == "cuda" else 2)


def _wanted(problem: Problem, seat: Seat) -> Outcome:
    return expected(problem, seat.device)[seat.rank].outcome


def _here(parts: tuple[Tensor, ...], seat: Seat) -> Tensor:
    """A copy of this rank's part, on its device."""
    return parts[seat.rank].to(seat.device, copy=True)


def _keep_busy(seat: Seat) -> None:
    if seat.device.type == "cuda":
        torch.cuda._sleep(_BUSY_CYCLES)


def _fork(seat: Seat) -> _Stream:
    """A second stream, behind what the current one has to do so far; None on a CPU."""
    if seat.device.type != "cuda":
        return None
    stream = torch.cuda.Stream(seat.device)
    stream.wait_stream(torch.cuda.current_stream(seat.device))
    return stream


def _on(stream: _Stream) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _join(stream: _Stream) -> None:
    """Let the current stream wait for another one."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


def edited_just_before(capacity: RowCapacity, seat: Seat) -> None:
    """Ids are masked and rows doubled in place, in the same tensors every time, and dispatched at once."""
    problems = [_problem(seat, capacity, seed) for seed in (0, 1)]
    x, scores, ids = (_here(parts, seat) for parts in _inputs(problems[0]))
    with seat.open(problems[0].config) as dispatcher, torch.no_grad():
        for number in _rounds(seat):
            problem = problems[number % 2]
            want, (all_x, all_scores, all_ids) = _wanted(problem, seat), _inputs(problem)
            half, of_tokens, named = _here(all_x, seat) / 2, _here(all_scores, seat), _here(all_ids, seat)
            stream = _fork(seat) if number % 4 == 3 else None
            with _on(stream):
                _keep_busy(seat)
                x.copy_(half).mul_(2)
                scores.copy_(of_tokens)
                ids.copy_(named.clamp(min=0)).masked_fill_(named < 0, -1)
                routed = dispatcher.dispatch(x, scores, ids)
                out = dispatcher.combine(routed.rows, routed.handle)
            _join(stream)
            assert_bit_equal(routed.tokens_per_expert, want.tokens_per_expert, f"tokens_per_expert in round {number}")
            assert_bit_equal(out, want.out, f"output in round {number}")


def _inputs(problem: Problem) -> tuple[tuple[Tensor, ...], ...]:
    return problem.x, problem.topk_scores, problem.topk_expert_ids


def dropped_right_after(capacity: RowCapacity, seat: Seat) -> None:
    """Whatever a call was given is dropped, and its memory and pinned words are taken up by something else."""
    problem = _problem(seat, capacity)
    want = _wanted(problem, seat)
    with seat.open(problem.config) as dispatcher:
        for number in _rounds(seat):
            x, scores = _here(problem.x, seat).requires_grad_(), _here(problem.topk_scores, seat).requires_grad_()
            grad = _here(problem.grad_out, seat)
            with _kept_on_the_host() if number % 2 else nullcontext():
                out = _there_and_back(dispatcher, problem, (x, scores), seat)
            taken = _take_up_memory(out)
            _keep_busy(seat)
            out.backward(grad)
            del grad
            taken += _take_up_memory(out)
            assert x.grad is not None and scores.grad is not None
            assert_bit_equal(out, want.out, f"output in round {number}")
            assert_bit_equal(x.grad, want.grad_x, f"gradient in round {number}")
            tolerance = 1e-5 * max(1.0, problem.config.hidden_dim / 40)  # a dot's summands
            torch.testing.assert_close(scores.grad.cpu(), want.grad_scores, rtol=tolerance, atol=tolerance)
            assert all(int(words[-1]) == _JUNK for words in taken if not words.is_floating_point())


def _there_and_back(layer: DispatchLayer, problem: Problem, leaves: tuple[Tensor, Tensor], seat: Seat) -> Tensor:
    """A forward with copies of the leaves that holds on to nothing but its output."""
    x, scores = (leaf.clone() for leaf in leaves)
    ids = _here(problem.topk_expert_ids, seat)
    _keep_busy(seat)
    routed = layer.dispatch(x, scores, ids)
    del x, scores, ids
    taken = _take_up_memory(routed.rows)
    rows, handle = routed.rows * 1, routed.handle
    del routed
    taken += _take_up_memory(rows)
    out = layer.combine(rows, handle)
    del rows, handle
    _take_up_memory(out)
    return out


def _take_up_memory(like: Tensor) -> list[Tensor]:
    """Tensors that get the memory which has just been freed, on the device and on the host, full of what is wrong."""
    sizes, pinned = (1, 2, 4, 8, 16, 32, 64), like.is_cuda
    words = [torch.full((size,), _JUNK, dtype=torch.int64, pin_memory=pinned) for size in sizes]
    return [*(torch.full_like(like.detach(), float("nan")) for _ in range(3)), *words]


def _kept_on_the_host() -> AbstractContextManager[object]:
    """Lets autograd store what it saves as a copy on the host."""

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        return tensor.device, tensor.detach().to("cpu", copy=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, copy=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def chunks_in_flight(capacity: RowCapacity, seat: Seat) -> None:
    """A batch in four chunks, all dispatched and combined before anybody looks; then looked at in both orders."""
    problem = _problem(seat, capacity)
    whole = _wanted(problem, seat).out
    chunks = list(zip(*(_here(parts, seat).tensor_split(4) for parts in _inputs(problem)), strict=True))
    with seat.open(problem.config) as dispatcher, torch.no_grad():

        def one_by_one() -> list[Tensor]:
            routed = (dispatcher.dispatch(*chunk) for chunk in chunks)
            return [dispatcher.combine(each.rows, each.handle) for each in routed]

        def all_out_first() -> list[Tensor]:
            routed = [dispatcher.dispatch(*chunk) for chunk in chunks]
            return [dispatcher.combine(each.rows, each.handle) for each in reversed(routed)][::-1]

        for order, step in ((one_by_one, 1), (all_out_first, 1), (one_by_one, -1), (all_out_first, -1)):
            _keep_busy(seat)
            outs = order()
            seen = [out.cpu() for out in outs[::step]]
            assert_bit_equal(torch.cat(seen[::step]), whole, f"output in chunks, {order.__name__}, step {step}")


def beside_another_stream(capacity: RowCapacity, seat: Seat) -> None:
    """A shared expert on another stream beside dispatch and combine; nobody writes to what a call is given."""
    problem = _problem(seat, capacity)
    want = _wanted(problem, seat)
    with seat.open(problem.config) as dispatcher:
        for number in _rounds(seat):
            leaf, scores, ids = (_here(parts, seat) for parts in _inputs(problem))
            scores.requires_grad_()
            # Of one use alone: autograd adds up the gradients of a leaf on one stream, and warns of those from another.
            x = leaf.requires_grad_() * 1
            grad, stream = _here(problem.grad_out, seat), _fork(seat)
            with _on(stream):
                if number % 2:
                    _keep_busy(seat)
                shared = x * 3
            if number % 3:
                _keep_busy(seat)
            routed = dispatcher.dispatch(x, scores, ids)
            rows = routed.rows * 1
            before = rows.detach().clone()
            out = dispatcher.combine(rows, routed.handle)
            _join(stream)
            (out + shared).backward(grad)
            assert leaf.grad is not None
            assert_bit_equal(leaf.grad, want.grad_x + problem.grad_out[seat.rank] * 3, f"gradient in round {number}")
            for tensor, parts in zip((x, scores, ids, grad), (*_inputs(problem), problem.grad_out), strict=True):
                assert_bit_equal(tensor, parts[seat.rank], f"what the calls of round {number} were given")
            assert_bit_equal(rows, before, f"what combine was given in round {number}")


_CHECKS: dict[str, Callable[[RowCapacity, Seat], None]] = {
    "inputs edited in place just before a call count as edited": edited_just_before,
    "inputs may be dropped right after a call": dropped_right_after,
    "chunks in flight, looked at in any order": chunks_in_flight,
    "work on another stream beside, and inputs left alone": beside_another_stream,
}


def _scenario(name: str, check: Callable[[RowCapacity, Seat], None], capacity: RowCapacity) -> Scenario:
    needs: tuple[tuple[str, Any], ...] = (("row_capacities", capacity.kind),)
    words = name if capacity.kind == "exact" else f"{name}, without a wait of the host"
    return Scenario("ahead", words, partial(check, capacity), needs=needs)


SCENARIOS = tuple(
    _scenario(name, check, capacity)
    for name, check in _CHECKS.items()
    for capacity in (RowCapacity.exact(), RowCapacity.worst_case())
)
