"""Row capacities without a host synchronisation: calibration, overflow, zeroed tails, and what the ledger tells."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from ... import CapacityOverflow, ContractViolation, OverflowGuard, RowCapacity, TokenDispatcher
from ..compare import assert_bit_equal
from ..problems import Problem
from ..scenario import Scenario
from ..seats import Seat
from ..solving import Outcome, forward, send, solve

_NUM_STEPS = 12
_TOLD_WITHIN_S = 5.0
_COMPARED = ("rows", "scores", "out", "grad_rows", "grad_x", "grad_scores")


def _problem(seat: Seat, routing: str = "0 to K valid ids", experts: str = "linear", **fields: Any) -> Problem:
    problem = seat.problem(routing, experts=experts)
    return problem.replace(config=dataclasses.replace(problem.config, **fields))


def _drawn(problem: Problem, step: int) -> Problem:
    """The same configuration and sizes with other ids, rows, scores and gradients."""
    generator, config = torch.Generator().manual_seed(step), problem.config

    def ids(num_tokens: int) -> Tensor:
        if not config.distinct_experts:
            return torch.randint(-1, config.num_experts, (num_tokens, config.top_k), generator=generator)
        named = torch.rand(num_tokens, config.num_experts, generator=generator).argsort(1)[:, : config.top_k]
        return named.masked_fill(torch.rand(named.shape, generator=generator) < 0.2, -1)

    return problem.redrawn([ids(num_tokens) for num_tokens in problem.num_tokens], step)


def _assert_same(got: Outcome, want: Outcome, what: str) -> None:
    end = want.rows.shape[0]
    assert_bit_equal(got.tokens_per_expert, want.tokens_per_expert, f"tokens_per_expert, {what}")
    assert_bit_equal(got.expert_offsets, want.expert_offsets, f"expert_offsets, {what}")
    for name in _COMPARED:
        mine, theirs = getattr(got, name), getattr(want, name)
        of_rows = name in ("rows", "scores", "grad_rows")
        assert_bit_equal(mine[:end] if of_rows else mine, theirs, f"{name}, {what}")
    for mine, theirs in zip(got.grad_weights, want.grad_weights, strict=True):
        assert_bit_equal(mine, theirs, f"gradient of a weight, {what}")


def calibrated_training(seat: Seat) -> None:
    """Twelve steps of changing routing, calibrated against exact: the same bits, forward and backward."""
    exact = _problem(seat, experts="swiglu")
    calibrated = _problem(seat, experts="swiglu", row_capacity=RowCapacity.calibrated(3.0))
    with seat.open(exact.config) as reference, seat.open(calibrated.config) as dispatcher:
        layer, sizes = dispatcher.layer("calibrated"), []
        for step in range(_NUM_STEPS):
            want = solve(reference, _drawn(exact, step), seat.rank, seat.device)
            got = solve(layer, _drawn(calibrated, step), seat.rank, seat.device)
            _assert_same(got, want, f"step {step}")
            sizes.append(got.rows.shape[0])
        assert len(set(sizes[1:])) == 1, f"a calibrated layer's dispatches had {sizes} rows"
        account = dispatcher.stats().layers["calibrated"]
        assert account.calls == _NUM_STEPS and account.overflows == 0, f"{account}"


def calibration_of_layers(seat: Seat) -> None:
    """Each layer measures its own first dispatch, scales it to the call, and forgets it when it is told to."""
    problem = _problem(seat, "uneven token counts", row_capacity=RowCapacity.calibrated(2.0))
    most = max(problem.num_tokens)

    def num_rows(layer: str, bound: int) -> int:
        parts = (problem.x[seat.rank], problem.topk_scores[seat.rank], problem.topk_expert_ids[seat.rank])
        x, scores, ids = (part.to(seat.device) for part in parts)
        routed = dispatcher.layer(layer).dispatch(x, scores, ids, num_tokens_per_rank=bound)
        return routed.rows.shape[0]

    with seat.open(problem.config) as dispatcher:
        first, other = num_rows("first", most), num_rows("other", most)
        assert first == other, f"two layers with the same tokens have {first} and {other} rows"
        second = num_rows("first", most)
        assert second % 4 == 0 and second >= 2 * first, f"{first} rows, doubled, became {second}"
        larger = num_rows("first", problem.config.num_max_tokens_per_rank)
        assert larger > second, f"a call for more tokens a rank has {larger} rows, a smaller one {second}"
        dispatcher.layer("first").recalibrate()
        assert num_rows("first", most) == first, "a layer that was told to forget did not measure again"
        assert num_rows("other", most) == second, "another layer has forgotten too"
        dispatcher.recalibrate()
        assert num_rows("other", most) == first, "a dispatcher that was told to forget did not measure again"


def overflow_is_raised_everywhere(seat: Seat) -> None:
    """One rank's rows do not fit: all ranks raise the same error, again and again, and a new dispatcher works."""
    problem = _problem(seat, "one hot expert", row_capacity=RowCapacity.rows(4))
    dispatcher = seat.open(problem.config)

    def step() -> None:
        forward(dispatcher, problem, seat.rank, seat.device)
        # A GPU's rank may be through before the host of the one at fault has seen what its device found.
        deadline = time.monotonic() + (_TOLD_WITHIN_S if seat.device.type == "cuda" else 0.0)
        while time.monotonic() < deadline:
            torch.cuda.synchronize(seat.device)
            dispatcher.check()
            time.sleep(0.01)
        dispatcher.check()

    message, at_fault = _overflow_of(step), seat.size - 1
    demand = 8 * seat.size
    for part in (f"layer '' on rank {at_fault}", f"asked for {demand} rows", "room for 4", "rows(n)", "may have been"):
        assert part in message, f"{part!r} is not in {message!r}"
    for again in (dispatcher.check, step):
        assert _overflow_of(again) == message, "a later call raises something else"
    dispatcher.close()
    roomy = _problem(seat, "one hot expert", row_capacity=RowCapacity.rows(demand))
    with seat.open(roomy.config) as fresh:
        forward(fresh, roomy, seat.rank, seat.device).backward()


def _overflow_of(call: Any) -> str:
    try:
        call()
    except CapacityOverflow as overflow:
        return str(overflow)
    raise AssertionError("no CapacityOverflow was raised")


def overflow_is_told_at_the_end(seat: Seat) -> None:
    """A dispatch that nothing follows: `close` is the last place to tell of its overflow, and frees everything."""
    problem = _problem(seat, "one hot expert", row_capacity=RowCapacity.rows(4))
    dispatcher = seat.open(problem.config)
    send(dispatcher, problem, seat.rank, seat.device)
    if seat.device.type == "cuda":
        torch.cuda.synchronize(seat.device)
    if seat.rank == seat.size - 1:
        assert "room for 4" in _overflow_of(dispatcher.close)
    else:
        dispatcher.close()
    dispatcher.close()
    try:
        dispatcher.check()
    except (ContractViolation, CapacityOverflow):
        return
    raise AssertionError("a closed dispatcher was not refused")


def dropped_rows_are_counted(seat: Seat) -> None:
    """`on_overflow="drop"`: every step runs, and `stats` tells by layer what was wanted and what was kept."""
    for mode in ("drop", "skip_step"):
        problem = _problem(seat, "one hot expert", row_capacity=RowCapacity.rows(4), on_overflow=mode)
        with seat.open(problem.config) as dispatcher:
            guard = (
                OverflowGuard(dispatcher, torch.optim.SGD([torch.zeros(1, device=seat.device)]))
                if mode == "skip_step"
                else None
            )
            for _ in range(3):
                forward(dispatcher.layer("hot"), problem, seat.rank, seat.device).backward()
            stats, wanted = dispatcher.stats(), 8 * seat.size if seat.rank == seat.size - 1 else 0
            account = stats.layers["hot"]
            assert (account.calls, account.tokens) == (3, 3 * 8), f"{account}"
            assert (account.rows, account.rows_wanted) == (3 * min(wanted, 4), 3 * wanted), f"{account}"
            assert account.wanted_by_expert == (0, 3 * wanted), f"{account}"
            assert account.overflows == (3 if wanted else 0), f"{account}"
            assert account.fill == wanted / 4 and account.imbalance == (2.0 if wanted else 1.0), f"{account}"
            assert (stats.rows, stats.tokens) == (account.rows, account.tokens), f"{stats}"
            flag = float(dispatcher._open.accounts.ledger.overflowed)
            assert flag == float(wanted > 0 and guard is not None), f"the overflow flag is {flag}"
            if guard is not None:
                guard.step()


def zeroed_tails(seat: Seat) -> None:
    """`zero_tail=True`: rows, scores and gradient rows behind the last offset are zero."""
    for alignment in (1, 16):
        capacity = RowCapacity.worst_case()
        problem = _problem(seat, row_capacity=capacity, zero_tail=True, expert_alignment=alignment)
        with seat.open(problem.config) as dispatcher:
            outcome = _solved_after_garbage(dispatcher, problem, seat)
        end = int(outcome.expert_offsets[-1])
        assert end < outcome.rows.shape[0], "there is no tail to look at"
        for name in ("rows", "scores"):
            tail = getattr(outcome, name)[end:]
            assert_bit_equal(tail, torch.zeros_like(tail), f"tail of {name}")


def _solved_after_garbage(dispatcher: TokenDispatcher, problem: Problem, seat: Seat) -> Outcome:
    sent = send(dispatcher, problem, seat.rank, seat.device)
    rows = torch.full_like(sent.routed.rows, float("nan"))
    end = int(sent.routed.expert_offsets[-1])
    rows[:end] = sent.routed.rows[:end].detach()
    rows.requires_grad_()
    out = dispatcher.combine(rows, sent.routed.handle)
    out.backward(problem.grad_out[seat.rank].to(seat.device))
    assert rows.grad is not None
    assert_bit_equal(rows.grad[end:], torch.zeros_like(rows.grad[end:]), "tail of the gradient rows")
    return sent.home(dispatcher).backward()


_CALIBRATED = (("row_capacities", "calibrated"),)
_ROWS = (("row_capacities", "rows"),)
_WORST = (("row_capacities", "worst_case"),)

SCENARIOS = (
    Scenario("capacity", "12 calibrated steps have the bits of exact", calibrated_training, needs=_CALIBRATED),
    Scenario("capacity", "calibration belongs to a layer", calibration_of_layers, needs=_CALIBRATED),
    Scenario("capacity", "an overflow is raised on every rank", overflow_is_raised_everywhere, needs=_ROWS),
    Scenario("capacity", "close tells of an overflow", overflow_is_told_at_the_end, needs=_ROWS),
    Scenario("capacity", "dropped rows are counted", dropped_rows_are_counted, needs=_ROWS),
    Scenario("capacity", "tails are zeroed", zeroed_tails, needs=_WORST),
)
