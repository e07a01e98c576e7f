"""A truncated step that is run again is the step of a run that never overflowed, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import crossdock as cd
from crossdock import recompute
from crossdock.group.members import Members
from crossdock.overflow import groups
from crossdock.overflow.agree import Agreement
from crossdock.testing import Seat, assert_bit_equal
from tests.contract.conftest import On
from tests.contract.overflow_trials import (
    CALIBRATED,
    OPTIMIZERS,
    ROOM,
    Model,
    assert_same_bits,
    guarded_config,
    ids_of,
    state_bits,
    tokens_of,
    train_with_room,
)
from tests.contract.trials import refused

BATCHES = ["even", "hot", "even", "mild"]


def retried(seat: Seat, make: str, dropout: float) -> None:
    """Random numbers are drawn behind every layer; the ranks draw their own."""
    torch.manual_seed(seat.rank)
    losses = []
    with seat.open(guarded_config()) as dispatcher:
        model = Model(dispatcher, dropout=dropout)
        optimizer = OPTIMIZERS[make](list(model.parameters()))
        guard = cd.OverflowGuard(dispatcher, optimizer, retry=True)
        for number, batch in enumerate(BATCHES):

            def step(number: int = number, batch: str = batch) -> Tensor:
                optimizer.zero_grad()
                loss = model.loss(batch, number, seat.rank)
                loss.backward()
                return loss

            losses.append(guard.step(step))
        stats = guard.stats()
        # Both layers want more in the same step, so one more run is enough.
        assert (stats.steps, stats.skipped_steps, stats.retries, stats.grown) == (4, 0, 1, 2), f"{stats}"
        assert dispatcher.stats().skipped_steps == 0
        found = state_bits(model, optimizer)
    assert all(loss is not None for loss in losses)
    assert_same_bits(found, train_with_room(seat, make, BATCHES, dropout=dropout), "the run that never overflowed")


@pytest.mark.parametrize("make", ["SGD", "AdamW foreach", "fused AdamW"])
@pytest.mark.parametrize(
    ("backend", "ep_size", "dropout"),
    [("loopback", 2, 0.0), ("all_to_all", 2, 0.3), ("all_to_all", 4, 0.3)],  # threads share a generator
    ids=["loopback-2", "all_to_all-2", "all_to_all-4"],
)
def test_a_step_that_runs_again_is_the_step_that_had_room(
    on: On, backend: str, ep_size: int, dropout: float, make: str
):
    on(backend, ep_size)(retried, make, dropout)


def test_a_step_that_runs_again_over_symmetric_memory(on: On):
    pytest.importorskip("triton", reason="triton is published for Linux only")
    on("symmetric", 2)(retried, "AdamW foreach", 0.3)


# -- GradScaler --------------------------------------------------------------------------------------------------------


def trained_through_a_scaler(
    seat: Seat, make: str, unscales: bool, infinite: str, *, guarded: bool
) -> tuple[dict[str, Tensor], list[float]]:
    """State and scales; in step 1, which overflows under the guard, gradients of some runs are made infinite."""
    with seat.open(guarded_config(row_capacity=CALIBRATED if guarded else ROOM)) as dispatcher:
        model = Model(dispatcher)
        optimizer = OPTIMIZERS[make](list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        guard, runs, scales = cd.OverflowGuard(dispatcher, optimizer, retry=True), [0] * len(BATCHES), []
        for number, batch in enumerate(BATCHES):

            def step(number: int = number, batch: str = batch) -> None:
                optimizer.zero_grad()
                scaler.scale(model.loss(batch, number, seat.rank)).backward()
                runs[number] += 1
                if number == 1 and (infinite == "all runs" or (infinite == "the truncated run" and not fits())):
                    assert model.router.grad is not None
                    model.router.grad[0, 0] = float("inf")
                if unscales:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

            def fits() -> bool:
                return not guarded or runs[1] > 1

            if guarded:
                guard.step(step, scaler=scaler)
            else:
                step()
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert runs == ([1, 2, 1, 1] if guarded else [1] * 4)
        return state_bits(model, optimizer), scales


def retried_through_a_scaler(seat: Seat, make: str, unscales: bool) -> None:
    for infinite, scales in (
        ("no run", [64.0, 128.0, 128.0, 256.0]),
        ("the truncated run", [64.0, 128.0, 128.0, 256.0]),
        ("all runs", [64.0, 32.0, 32.0, 64.0]),
    ):
        found = trained_through_a_scaler(seat, make, unscales, infinite, guarded=True)
        wanted = trained_through_a_scaler(seat, make, unscales, infinite, guarded=False)
        assert found[1] == wanted[1] == scales, f"{infinite} infinite"
        assert_same_bits(found[0], wanted[0], f"{infinite} infinite")


@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled and clipped"])
@pytest.mark.parametrize("make", ["SGD", "fused AdamW"])
def test_a_step_that_runs_again_begins_with_the_scaler_as_it_was(on: On, make: str, unscales: bool):
    on("all_to_all", 2)(retried_through_a_scaler, make, unscales)


def test_what_a_scaler_has_found_before_the_closure_is_kept():
    """In gradients of another optimizer, which are finite by now; the closure steps that one, and runs three times."""
    with cd.TokenDispatcher(guarded_config()) as dispatcher:
        weight, other = (torch.nn.Parameter(torch.ones(16)) for _ in range(2))
        optimizer, unguarded = (OPTIMIZERS["SGD"]([each]) for each in (weight, other))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        guard = cd.OverflowGuard(dispatcher, optimizer, retry=True)
        num_tokens = iter([2, 4, 6, 6])  # of every run; the first one measures

        def step() -> None:
            optimizer.zero_grad()
            length = next(num_tokens)
            routed = dispatcher.dispatch(
                weight.expand(length, 16), torch.ones(length, 2), ids_of("even")[:length], num_tokens_per_rank=8
            )
            scaler.scale(dispatcher.combine(routed.rows, routed.handle).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(unguarded)

        for gradient, scale in ((1.0, 64.0), (float("inf"), 32.0)):
            scaler.scale(torch.ones(()))  # a scaler's first call makes its scale
            other.grad = torch.full_like(other, 64.0 * gradient)
            scaler.unscale_(unguarded)
            other.grad.fill_(1.0)
            before = other.tolist()
            guard.step(step, scaler=scaler)
            scaler.update()
            assert scaler.get_scale() == scale
            assert (other.tolist() == before) == (scale == 32.0)
        assert guard.stats() == cd.GuardStats(steps=2, retries=2, grown=2)
        assert weight.grad is not None and weight.grad.tolist() == [12.0] * 16


def test_a_scaler_that_is_switched_off_changes_nothing():
    def trained(scaler: Any) -> Tensor:
        with cd.TokenDispatcher(guarded_config()) as dispatcher:
            weight = torch.nn.Parameter(torch.ones(16))
            guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight]), retry=True)
            for length in (2, 4):

                def step(length: int = length) -> None:
                    x, ids = weight.expand(length, 16), ids_of("even")[:length]
                    routed = dispatcher.dispatch(x, torch.ones(length, 2), ids, num_tokens_per_rank=4)
                    dispatcher.combine(routed.rows, routed.handle).sum().backward()

                weight.grad = None
                guard.step(step, scaler=scaler)
            assert guard.stats() == cd.GuardStats(steps=2, retries=1, grown=1)
            return weight.detach()

    weight = trained(torch.amp.GradScaler("cpu", enabled=False))
    assert_bit_equal(weight, trained(None), "without a scaler")
    assert weight.tolist() == pytest.approx([1.0 - 0.1 * 4.0 - 0.1 * (0.9 * 4.0 + 8.0)] * 16)


# -- several runs, layers and micro-batches ----------------------------------------------------------------------------


def recomputed(seat: Seat) -> None:
    """The same with layers that are recomputed in backward, and with two micro-batches in a step."""
    results = []
    for capacity in (guarded_config().row_capacity, cd.RowCapacity.worst_case()):
        with seat.open(guarded_config(row_capacity=capacity)) as dispatcher:
            model = Model(dispatcher)
            optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
            guard = cd.OverflowGuard(dispatcher, optimizer, retry=True)
            for number, batches in enumerate([("even", "even"), ("even", "hot"), ("mild", "even")]):

                def step(model: Model = model, number: int = number, batches: tuple[str, str] = batches) -> None:
                    for batch in batches:
                        out = recompute.checkpoint(
                            model, tokens_of(number, seat.rank), ids_of(batch), use_reentrant=False
                        )
                        out.square().mean().backward()

                optimizer.zero_grad()
                guard.step(step)
            results.append(state_bits(model, optimizer))
            assert guard.stats().retries == (capacity.kind == "calibrated")
    grown, roomy = results
    assert_same_bits(grown, roomy, "recomputed")


def test_steps_of_several_micro_batches_with_recomputation(on: On):
    on("all_to_all", 2)(recomputed)


def demand_that_moves_down(seat: Seat) -> int:
    """The second layer's routing depends on what the first one brought, so that it overflows in the second run only."""
    with seat.open(guarded_config()) as dispatcher:
        first, second = dispatcher.layer("first"), dispatcher.layer("second")
        weight = torch.nn.Parameter(torch.ones(16))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight]), retry=True)
        ones = torch.ones(8, 2)
        for batch in ("even", "hot"):

            def step(batch: str = batch) -> Tensor:
                x = weight.expand(8, 16)
                routed = first.dispatch(x, ones, ids_of(batch))
                out = first.combine(routed.rows, routed.handle)
                truncated = bool((out.detach() != 2 * x.detach()).any())
                routed = second.dispatch(out, ones, ids_of("even" if truncated else batch))
                out = second.combine(routed.rows, routed.handle)
                out.sum().backward()
                return out

            before = float(weight.detach()[0])
            out = guard.step(step)
        assert out is not None and out[:, 0].tolist() == [4.0 * before] * 8
        assert guard.stats().skipped_steps == 0
        return guard.stats().retries


def test_a_layer_behind_may_overflow_in_the_next_run(on: On):
    assert on("all_to_all", 2)(demand_that_moves_down) == [2, 2]


def too_much_for_any_patience(seat: Seat) -> str:
    """Every run asks for more than the one before, which only the patience ends."""
    with seat.open(guarded_config()) as dispatcher:
        weight = torch.nn.Parameter(torch.ones(16))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight]), retry=True, patience=2)
        runs: list[int] = []

        def step() -> None:
            ids = torch.full((8, 2), -1)
            runs.append(1)
            ids[: len(runs)] = 3
            routed = dispatcher.dispatch(weight.expand(8, 16), torch.ones(8, 2), ids)
            dispatcher.combine(routed.rows, routed.handle).sum().backward()

        def train() -> None:
            guard.step(step)
            guard.step(step)

        message = refused(train, cd.CapacityOverflow)
        assert len(runs) == 4
        return message


def test_patience_ends_retries_on_all_ranks(on: On):
    found: list[Any] = on("all_to_all", 2)(too_much_for_any_patience)
    assert found[0] == found[1] and found[0].startswith("3 steps in a row were truncated and not applied: layer ''")


def a_closure_raises_on_one_rank(seat: Seat, own: bool, over_nccl: bool) -> list[str]:
    """In the second run of step 1 rank 1's closure raises; there that is caught, and the next step is begun."""
    group = seat.group() if own else seat.group([0]) or seat.group([1])
    made = mock.patch.object(groups, "Numbered", _over_gloo_as_over_nccl) if over_nccl else nullcontext()
    with seat.open(guarded_config(), group) as dispatcher, made:
        weight, runs = torch.nn.Parameter(torch.ones(16)), iter(range(5))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight]), [seat.group()], retry=True)

        def step() -> None:
            run = next(runs)
            if run == 2 and seat.rank == 1:
                raise LookupError("no more data")
            ids = torch.full((8, 2), 3)
            ids[1 + 7 * min(run, 1) :] = -1
            routed = dispatcher.dispatch(weight.expand(8, 16), torch.ones(8, 2), ids)
            dispatcher.combine(routed.rows, routed.handle).sum().backward()

        guard.step(step)
        before = weight.tolist()
        if seat.rank == 1:
            with pytest.raises(LookupError):
                guard.step(step)
        told = [refused(lambda: guard.step(step), cd.ContractViolation) for _ in range(2)]
        assert weight.tolist() == before, "the step in which the ranks were not together"
        assert next(runs) == 4 - (seat.rank == 0), "what cannot be applied is not run"
        return told


def _over_gloo_as_over_nccl(members: Members, timeout_s: float) -> Agreement:
    return groups._OverNccl(members, dist.group.WORLD)


APART = (
    "ranks [1] came to another step of an overflow guard than the others (global ranks [0, 1]): step 1, run 2, on ranks"
    " [0]; step 2 on ranks [1]; a closure that raises"
)


@pytest.mark.parametrize(
    ("backend", "own", "over_nccl"),
    [("loopback", True, False), ("all_to_all", True, False), ("all_to_all", False, False), ("all_to_all", True, True)],
)
def test_a_new_step_is_not_taken_for_the_second_run_of_another(on: On, backend: str, own: bool, over_nccl: bool):
    words = "ranks of this guard's groups came to different steps" if over_nccl else APART
    for told in on(backend, 2)(a_closure_raises_on_one_rank, own, over_nccl):
        assert len(set(told)) == 1 and told[0].startswith(words), told
