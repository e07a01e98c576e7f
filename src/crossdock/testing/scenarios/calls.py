"""Calls that must be refused, before any communication, and what may not be changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ... import ContractViolation, CrossdockError, InvalidInput, TokenDispatcher
from ..checks import finish
from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat
from ..solving import forward, send

_Calls = Iterator[tuple[str, Callable[[], object]]]


def _inputs(problem: Problem, seat: Seat) -> tuple[Tensor, Tensor, Tensor]:
    parts = (problem.x[seat.rank], problem.topk_scores[seat.rank], problem.topk_expert_ids[seat.rank])
    x, scores, ids = (part.to(seat.device) for part in parts)
    return x, scores, ids


def refuses(error: type[CrossdockError], call: Callable[[], object], what: str) -> str:
    """Assert that a call raises an error of this type and return its message."""
    try:
        call()
    except error as refusal:
        return str(refusal)
    raise AssertionError(f"{what}: was not refused with {error.__name__}")


def _wrong_dispatches(dispatcher: TokenDispatcher, problem: Problem, seat: Seat) -> _Calls:
    x, scores, ids = _inputs(problem, seat)
    config = problem.config
    tokens, top_k = ids.shape
    far = ids.clone()
    far[1, 0] = config.num_experts
    negative = ids.clone()
    negative[0, -1] = -2
    beyond = ids.clone()
    beyond[0, 0] = 2**31
    too_many = config.num_max_tokens_per_rank + 1
    cases: dict[str, tuple[Any, ...]] = {
        "x of another width": (x[:, :-1], scores, ids),
        "x of another dtype": (x.double(), scores, ids),
        "x with three dimensions": (x[None], scores, ids),
        "scores with a slot less": (x, scores[:, 1:], ids),
        "ids with a slot more": (x, scores, torch.cat([ids, ids[:, :1]], dim=1)),
        "ids of fewer tokens": (x, scores, ids[1:]),
        "ids of dtype uint8": (x, scores, ids.to(torch.uint8)),
        "ids of dtype int16": (x, scores, ids.to(torch.int16)),
        "integer scores": (x, scores.to(torch.int32), ids),
        "more tokens than the maximum": (
            x.new_zeros(too_many, x.shape[1]),
            scores.new_zeros(too_many, top_k),
            ids.new_zeros(too_many, top_k),
        ),
        "a histogram of the wrong length": (x, scores, ids, torch.ones(3, dtype=torch.int64, device=x.device)),
    }
    if seat.device.type == "cpu":  # elsewhere ids are looked at on the device, and refused by the whole group
        cases |= {
            "a histogram that is wrong": (x, scores, ids, torch.zeros(config.num_experts, dtype=torch.int64)),
            "an id of num_experts": (x, scores, far),
            "an id of -2": (x, scores, negative),
            "an id of 2**31": (x, scores, beyond),
        }
    for what, arguments in cases.items():
        yield what, lambda arguments=arguments: dispatcher.dispatch(*arguments)  # type: ignore[misc]
    for bound in (tokens - 1, too_many, -1):
        yield (
            f"num_tokens_per_rank={bound} with {tokens} tokens",
            lambda bound=bound: dispatcher.dispatch(x, scores, ids, num_tokens_per_rank=bound),  # type: ignore[misc]
        )


def wrong_dispatches(seat: Seat) -> None:
    """Every wrong call is refused without a call being counted, and a right one works afterwards."""
    problem = seat.problem("balanced")
    with seat.open(problem.config) as dispatcher:
        for what, call in _wrong_dispatches(dispatcher, problem, seat):
            refuses(InvalidInput, call, what)
        assert dispatcher.stats().calls == 0, f"{dispatcher.stats().calls} calls were counted, all were refused"
        finish(forward(dispatcher, problem, seat.rank, seat.device))


def wrong_on_one_rank(seat: Seat) -> None:
    """A rank whose call was refused may correct it: the others wait for it and notice nothing."""
    problem = seat.problem("balanced")
    with seat.open(problem.config) as dispatcher:
        if seat.rank == seat.size - 1:
            for what, call in _wrong_dispatches(dispatcher, problem, seat):
                refuses(InvalidInput, call, what)
        finish(forward(dispatcher, problem, seat.rank, seat.device))


def wrong_combines(seat: Seat) -> None:
    """Rows that do not fit the handle, and handles of others."""
    problem = seat.problem("balanced")
    with seat.open(problem.config) as dispatcher, seat.open(problem.config) as other:
        sent = send(dispatcher, problem, seat.rank, seat.device)
        rows, handle = sent.rows.detach(), sent.routed.handle
        for what, wrong in {
            "a row too few": rows[1:] if len(rows) else rows.new_zeros(1, rows.shape[1]),
            "rows of another width": rows[:, 1:],
            "rows of another dtype": rows.double(),
        }.items():
            refuses(InvalidInput, lambda wrong=wrong: dispatcher.combine(wrong, handle), what)  # type: ignore[misc]
        message = refuses(InvalidInput, lambda: other.combine(rows, handle), "a handle of another dispatcher")
        assert "another dispatcher" in message, message
        refuses(InvalidInput, lambda: dispatcher.combine(rows, sent.routed), "a Dispatched as handle")  # type: ignore[arg-type]
        finish(sent.home(dispatcher))


def frozen_results(seat: Seat) -> None:
    """Neither what dispatch returned nor its handle can be changed; it unpacks as rows, counts and handle."""
    problem = seat.problem("balanced")
    with seat.open(problem.config) as dispatcher:
        routed = dispatcher.dispatch(*_inputs(problem, seat))
        for record in (routed, routed.handle):
            for field in dataclasses.fields(record):
                try:
                    setattr(record, field.name, None)
                except dataclasses.FrozenInstanceError:
                    continue
                raise AssertionError(f"{type(record).__name__}.{field.name} could be set")
        rows, tokens_per_expert, handle = routed
        assert rows is routed.rows and tokens_per_expert is routed.tokens_per_expert and handle is routed.handle


def closed_dispatcher(seat: Seat) -> None:
    """A closed dispatcher refuses every call, closes again without harm, and makes room for another one."""
    problem = seat.problem("balanced")
    dispatcher = seat.open(problem.config)
    routed = dispatcher.dispatch(*_inputs(problem, seat))
    dispatcher.close()
    dispatcher.close()
    for what, call in {
        "dispatch": lambda: dispatcher.dispatch(*_inputs(problem, seat)),
        "combine": lambda: dispatcher.combine(routed.rows, routed.handle),
        "check": dispatcher.check,
        "stats": dispatcher.stats,
    }.items():
        message = refuses(ContractViolation, call, f"{what} of a closed dispatcher")
        assert "closed" in message, message
    with seat.open(problem.config) as fresh:
        finish(forward(fresh, problem, seat.rank, seat.device))


SCENARIOS = (
    Scenario("calls", "wrong dispatches are refused and not counted", wrong_dispatches),
    Scenario("calls", "a call refused on one rank may be corrected", wrong_on_one_rank, min_ranks=2),
    Scenario("calls", "wrong combines and foreign handles are refused", wrong_combines),
    Scenario("calls", "results are frozen", frozen_results),
    Scenario("calls", "a closed dispatcher refuses every call", closed_dispatcher),
)
