"""The guard around the optimizer's step: what is not applied, what is counted, and when a capacity grows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import crossdock as cd
from crossdock import ledger as ledger_module
from crossdock.host_copy import HostCopy
from crossdock.ledger import OVERFLOWS
from crossdock.testing import Seat, assert_bit_equal
from tests.contract.conftest import On
from tests.contract.host_reads import device_ledger, host_reads
from tests.contract.overflow_trials import (
    NUM_TOKENS,
    OPTIMIZERS,
    Model,
    assert_same_bits,
    guarded_config,
    ids_of,
    state_bits,
    tokens_of,
    train_with_room,
)
from tests.contract.trials import refused

SEATS = [("loopback", 2), ("all_to_all", 2), ("all_to_all", 4)]
on_seats = pytest.mark.parametrize(("backend", "ep_size"), SEATS, ids=[f"{name}-{size}" for name, size in SEATS])
BATCHES = ["even", "hot", "hot", "even", "hot"]


def train(seat: Seat, make: str, batches: list[str], skipped: list[int], **settings: Any) -> dict[str, Tensor]:
    """Train under a guard; the steps that it leaves out change nothing and are these."""
    with seat.open(guarded_config()) as dispatcher:
        model = Model(dispatcher)
        optimizer = OPTIMIZERS[make](list(model.parameters()))
        guard = cd.OverflowGuard([dispatcher], optimizer, groups=[seat.group()], **settings)
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            model.loss(batch, number, seat.rank).backward()
            before, counted = state_bits(model, optimizer), guard.num_skipped()
            guard.step()
            assert guard.num_skipped() - counted == (number in skipped), f"step {number}: {guard.stats()}"
            if number in skipped:
                assert_same_bits(state_bits(model, optimizer), before, f"step {number}")
        stats = guard.stats()
        assert (stats.steps, stats.skipped_steps, stats.grown) == (len(batches), len(skipped), 2), f"{stats}"
        assert dispatcher.stats().skipped_steps == len(skipped)
        return state_bits(model, optimizer)


def trained_alike(seat: Seat, make: str, skipped: list[int], settings: dict[str, Any]) -> None:
    found = train(seat, make, BATCHES, skipped, **settings)
    assert_same_bits(found, train_with_room(seat, make, BATCHES, skipped), "the run that had the room")


@on_seats
@pytest.mark.parametrize(
    ("make", "skipped", "settings"),
    [
        ("SGD", [1], {}),
        ("AdamW", [1], {}),
        ("AdamW foreach", [1], {}),
        ("fused AdamW", [1, 2], {}),
        ("fused AdamW", [1], {"sync": True}),
        ("AdamW foreach", [1, 2], {"snapshot": True}),
        ("SGD", [1], {"snapshot": True, "sync": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)) or "-",
)
def test_truncated_steps_are_left_out(
    on: On, backend: str, ep_size: int, make: str, skipped: list[int], settings: dict[str, Any]
):
    on(backend, ep_size)(trained_alike, make, skipped, settings)


@pytest.mark.parametrize(("make", "settings"), [("fused AdamW", {}), ("AdamW foreach", {"snapshot": True})])
def test_truncated_steps_over_symmetric_memory(on: On, make: str, settings: dict[str, Any]):
    pytest.importorskip("triton", reason="triton is published for Linux only")
    on("symmetric", 2)(trained_alike, make, [1, 2], settings)


def first_step_is_truncated(seat: Seat, make: str, settings: dict[str, Any]) -> None:
    """The calibrating dispatch was no step: the optimizer has no state when its first step is left out."""
    with seat.open(guarded_config()) as dispatcher:
        model = Model(dispatcher)
        with torch.no_grad():
            model.loss("even", 9, seat.rank)
        optimizer = OPTIMIZERS[make](list(model.parameters()))
        guard = cd.OverflowGuard(dispatcher, optimizer, **settings)
        for number, batch in enumerate(["hot", "even", "even", "hot"]):
            optimizer.zero_grad()
            model.loss(batch, number, seat.rank).backward()
            before = state_bits(model, optimizer)
            guard.step()
            if number == 0:
                assert guard.num_skipped() == 1
                assert_same_bits(state_bits(model, optimizer), before, "the first step")
        found = state_bits(model, optimizer)
    assert_same_bits(found, train_with_room(seat, make, ["hot", "even", "even", "hot"], [0]), "the run with room")


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"snapshot": True}, marks=pytest.mark.full)], ids=["plain", "snapshot"]
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizer_s_first_step_may_be_left_out(on: On, make: str, settings: dict[str, Any]):
    on("loopback", 2)(first_step_is_truncated, make, settings)


# -- groups ------------------------------------------------------------------------------------------------------------


def one_of_two_replicas(seat: Seat, over_both: bool) -> tuple[int, int, int]:
    """EP 2 x DP 2: the second step overflows in the second EP group only, on its last rank."""
    experts, replica = [0, 1] if seat.rank < 2 else [2, 3], [seat.rank % 2, seat.rank % 2 + 2]
    groups = {tuple(ranks): seat.group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])}
    own, across = groups[tuple(experts)], groups[tuple(replica)]
    with seat.open(guarded_config(), own) as dispatcher:
        model = Model(dispatcher)
        optimizer = OPTIMIZERS["fused AdamW"](list(model.parameters()))
        guard = cd.OverflowGuard(dispatcher, optimizer, groups=[own, across] if over_both else [own])
        for number, batch in enumerate(["even", "hot" if seat.rank >= 2 else "even", "even"]):
            optimizer.zero_grad()
            model.loss(batch, number, seat.rank).backward()
            before, counted = state_bits(model, optimizer), guard.num_skipped()
            guard.step()
            if guard.num_skipped() > counted:
                assert_same_bits(state_bits(model, optimizer), before, f"step {number}")
        stats = guard.stats()
        return stats.steps, stats.skipped_steps, stats.grown


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_a_flag_is_agreed_over_several_groups(on: On, backend: str):
    assert on(backend, 4)(one_of_two_replicas, True) == [(3, 1, 0), (3, 1, 0), (3, 1, 2), (3, 1, 2)]
    assert on(backend, 4)(one_of_two_replicas, False) == [(3, 0, 0), (3, 0, 0), (3, 1, 2), (3, 1, 2)]


def one_of_two_stages(seat: Seat) -> tuple[list[bool], cd.GuardStats, list[int]]:
    """Two groups of EP 2, of one layer and of three: in step 1 the first of the three overflows, on its last rank.

    Steps that were applied, what the guard has done, and what every layer was sized to in the end.
    """
    stage, ep_rank = divmod(seat.rank, 2)
    own, across = [seat.group((0, 1)), seat.group((2, 3))][stage], [seat.group((0, 2)), seat.group((1, 3))][ep_rank]
    batches = ["even"] * (1 + 2 * stage)
    applied = []
    with seat.open(guarded_config(), own) as dispatcher:
        model = Model(dispatcher, num_layers=len(batches))
        optimizer = OPTIMIZERS["fused AdamW"](list(model.parameters()))
        guard = cd.OverflowGuard(dispatcher, optimizer, groups=[own, across])
        for number in range(4):
            batches[0] = "hot" if (stage, number) == (1, 1) else "even"
            optimizer.zero_grad()
            model(tokens_of(number, seat.rank), *map(ids_of, batches)).square().mean().backward()
            before = state_bits(model, optimizer)
            guard.step()
            after = state_bits(model, optimizer)
            applied.append(all(not torch.equal(value, before[name]) for name, value in after.items() if name in before))
            if not applied[-1]:
                assert_same_bits(after, before, f"step {number}")
        return applied, guard.stats(), [layer.capacity for layer in dispatcher.stats().layers.values()]


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_stages_of_different_depths_skip_together_and_grow_alone(on: On, backend: str):
    applied, done = [True, False, True, True], cd.GuardStats(steps=4, skipped_steps=1)
    grown = dataclasses.replace(done, grown=1)
    assert on(backend, 4)(one_of_two_stages) == [(applied, done, [16])] * 2 + [(applied, grown, [32, 16, 16])] * 2


def several_dispatchers_and_optimizers(seat: Seat) -> None:
    with seat.open(guarded_config()) as first, seat.open(guarded_config()) as second:
        models = [Model(first), Model(second, num_layers=1)]
        optimizers = [
            OPTIMIZERS[make](list(model.parameters())) for make, model in zip(OPTIMIZERS, models, strict=False)
        ]
        guard = cd.OverflowGuard([first, second], optimizers)
        for number, batches in enumerate([("even", "even"), ("hot", "even"), ("even", "hot"), ("hot", "hot")]):
            for model, batch in zip(models, batches, strict=True):
                model.zero_grad()
                model.loss(batch, number, seat.rank).backward()
            before = [state_bits(*pair) for pair in zip(models, optimizers, strict=True)]
            guard.step()
            for pair, bits in zip(zip(models, optimizers, strict=True), before, strict=True):
                same = all(torch.equal(value, bits[name]) for name, value in state_bits(*pair).items() if name in bits)
                assert same == (number in (1, 2)), f"step {number}"
        assert (guard.stats().skipped_steps, guard.stats().grown) == (2, 3)


def test_several_dispatchers_and_optimizers_step_together(on: On):
    on("all_to_all", 2)(several_dispatchers_and_optimizers)


# -- GradScaler --------------------------------------------------------------------------------------------------------


def scaled(seat: Seat, make: str, settings: dict[str, Any], unscale: bool) -> None:
    """Step 1 overflows, step 3 has an infinite gradient, step 4 has both; the scale follows the infinities alone."""
    with seat.open(guarded_config()) as dispatcher:
        model = Model(dispatcher)
        optimizer = OPTIMIZERS[make](list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        guard = cd.OverflowGuard(dispatcher, optimizer, **settings)
        scales, changed = [], []
        for number, batch in enumerate(["even", "hot", "even", "even", "hot", "even"]):
            optimizer.zero_grad()
            scaler.scale(model.loss(batch, number, seat.rank)).backward()
            if number in (3, 4):
                assert model.router.grad is not None
                model.router.grad[0, 0] = float("inf")
            if number == 4:
                dispatcher._open.accounts.ledger.overflowed.fill_(1.0)  # the layers have grown by now
            if unscale:
                scaler.unscale_(optimizer)
            before = state_bits(model, optimizer)
            guard.step(scaler=scaler)
            scaler.update()
            after = state_bits(model, optimizer)
            changed.append(before.keys() != after.keys() or any(not torch.equal(before[k], after[k]) for k in after))
            scales.append(scaler.get_scale())
        assert changed == [True, False, True, False, False, True]
        assert guard.num_skipped() == 2
        assert scales == [64.0, 128.0, 128.0, 64.0, 32.0, 32.0]


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled before"])
@pytest.mark.parametrize(
    ("make", "settings"),
    [("SGD", {}), ("fused AdamW", {}), ("fused SGD", {"sync": True}), ("AdamW", {"snapshot": True})],
    ids=["SGD", "fused", "fused sync", "snapshot"],
)
def test_a_scaler_s_scale_does_not_follow_from_truncated_steps(
    on: On, make: str, settings: dict[str, Any], unscale: bool
):
    on("all_to_all", 2)(scaled, make, settings, unscale)


# -- sizes -------------------------------------------------------------------------------------------------------------


def capacities_around_the_demand(seat: Seat) -> None:
    """Half of the rows: the flag is set, nothing crashes. 1, 1.5 and 2 times: the bits of exact, and no flag."""
    outcomes = {}
    for share in (None, 0.5, 1.0, 1.5, 2.0):
        capacity = cd.RowCapacity.exact() if share is None else cd.RowCapacity.rows(int(share * NUM_TOKENS * 2))
        with seat.open(guarded_config(row_capacity=capacity)) as dispatcher:
            model = Model(dispatcher, num_layers=1)
            guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"](list(model.parameters())))
            x = torch.randn(NUM_TOKENS, 16, generator=torch.Generator().manual_seed(seat.rank)).requires_grad_()
            scores = torch.rand(NUM_TOKENS, 2, generator=torch.Generator().manual_seed(9)).requires_grad_()
            routed = dispatcher.dispatch(x, scores, ids_of("even"))
            out = dispatcher.combine(model.experts[0](routed.rows, routed.expert_offsets), routed.handle)
            out.square().sum().backward()
            assert float(dispatcher._open.accounts.ledger.overflowed) == float(share == 0.5)
            guard.step()
            assert guard.num_skipped() == int(share == 0.5)
            end = int(routed.expert_offsets[-1])
            assert x.grad is not None and scores.grad is not None
            kept = [routed.rows[:end], routed.scores[:end]]
            learned = [weight.grad for weight in model.experts.parameters() if weight.grad is not None]
            assert len(learned) == 3
            outcomes[share] = [routed.tokens_per_expert, *kept, out, x.grad, scores.grad, *learned]
            num_rows = NUM_TOKENS * 2 if share is None else int(share * NUM_TOKENS * 2)
            assert (routed.rows.shape[0], end) == (num_rows, min(num_rows, NUM_TOKENS * 2))
    for share in (1.0, 1.5, 2.0):
        for found, wanted in zip(outcomes[share], outcomes[None], strict=True):
            assert_bit_equal(found.detach(), wanted.detach(), f"{share} times the rows")
    for place, what in ((1, "rows"), (2, "scores")):
        found = outcomes[0.5][place].detach()
        assert_bit_equal(found, outcomes[None][place].detach()[: len(found)], f"the {what} that fit")
    assert all(bool(torch.isfinite(value).all()) for value in outcomes[0.5])
    assert int(outcomes[0.5][0].sum()) == NUM_TOKENS


@pytest.mark.parametrize(("backend", "ep_size"), [*SEATS, ("symmetric", 2)])
def test_half_of_the_rows_to_twice_the_rows(on: On, backend: str, ep_size: int):
    if backend == "symmetric":
        pytest.importorskip("triton", reason="triton is published for Linux only")
    on(backend, ep_size)(capacities_around_the_demand)


def sizes_over_steps(seat: Seat, batches: list[str], factor: float, **settings: Any) -> tuple[list[int], int, int, int]:
    """Rows of every step's dispatch, and what the guard has counted."""
    sizes = []
    with seat.open(guarded_config(row_capacity=cd.RowCapacity.calibrated(factor))) as dispatcher:
        weight = torch.ones(1, requires_grad=True)
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight]), **settings)  # type: ignore[list-item]
        for batch in batches:
            x = torch.ones(NUM_TOKENS, 16) * weight
            routed = dispatcher.dispatch(x, torch.ones(NUM_TOKENS, 2), ids_of(batch))
            dispatcher.combine(routed.rows, routed.handle).sum().backward()
            sizes.append(routed.rows.shape[0])
            guard.step()
        stats = guard.stats()
        return sizes, stats.skipped_steps, stats.grown, stats.shrunk


def test_half_of_what_was_measured_grows_to_all_of_it(on: On):
    assert on("all_to_all", 2)(sizes_over_steps, ["even"] * 3, 0.5) == [([16, 8, 16], 1, 1, 0)] * 2


def test_the_headroom_is_kept_when_a_capacity_grows(on: On):
    assert on("all_to_all", 2)(sizes_over_steps, ["even", "hot", "hot"], 1.5)[0] == ([16, 24, 48], 1, 1, 0)


def shrinking(seat: Seat, below: float) -> tuple[list[int], int, int, int]:
    batches = ["hot", "mild", "even", "even", "mild", "even", "even", "hot"]
    return sizes_over_steps(seat, batches, 1.0, shrink_after=3, shrink_below=below)


def test_capacities_shrink_where_that_is_asked_for(on: On):
    # By rank: the last rank is asked for 32, 20, 16, 16, 20, 16, 16, 32 rows.
    found = on("all_to_all", 2)(shrinking, 0.7)
    assert found == [([0, 32, 32, 32, 20, 20, 20, 20], 1, 1, 1), ([32, 32, 32, 32, 20, 20, 20, 20], 1, 1, 1)]
    found = on("all_to_all", 2)(shrinking, 0.4)
    assert found[1] == ([32] * 8, 0, 0, 0)


def a_layer_that_drops(seat: Seat) -> tuple[list[int], int, cd.GuardStats]:
    """Rows of every step's dispatch, the last one behind `recalibrate`; overflows; and what the guard has done."""
    sizes = []
    with seat.open(guarded_config(on_overflow="drop")) as dispatcher:
        weight = torch.nn.Parameter(torch.ones(1))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight]))
        for number, batch in enumerate(["even", "hot", "hot", "hot"]):
            if number == 3:
                dispatcher.recalibrate()
            routed = dispatcher.dispatch(torch.ones(NUM_TOKENS, 16) * weight, torch.ones(NUM_TOKENS, 2), ids_of(batch))
            dispatcher.combine(routed.rows, routed.handle).sum().backward()
            sizes.append(routed.rows.shape[0])
            guard.step()
        return sizes, dispatcher.stats().layers[""].overflows, guard.stats()


def test_a_layer_that_drops_grows_only_when_it_is_measured_again(on: On):
    done = cd.GuardStats(steps=4)
    assert on("all_to_all", 2)(a_layer_that_drops) == [([16, 16, 16, 0], 0, done), ([16, 16, 16, 32], 2, done)]


def agreed_capacities(seat: Seat) -> list[int]:
    """Measured with 16 and 12 tokens, used with 16 and 1."""
    config = guarded_config(row_capacity=cd.RowCapacity.calibrated(1.25), equal_token_counts=False)
    sizes = []
    with seat.open(config) as dispatcher:
        for num_tokens in ([16, 12], [16, 1], [0, 0]):
            mine = num_tokens[seat.rank]
            ids = torch.zeros(mine, 2, dtype=torch.int64)
            ids[:, 1] = -1
            routed = dispatcher.dispatch(torch.ones(mine, 16), torch.ones(mine, 2), ids, num_tokens_per_rank=16)
            out = dispatcher.combine(routed.rows, routed.handle)
            assert out[:, 0].tolist() == [1.0] * mine
            sizes.append(routed.rows.shape[0])
    return sizes


def test_a_capacity_is_agreed_on_by_the_group_and_outlives_its_combines(on: On):
    assert on("all_to_all", 2)(agreed_capacities) == [[28, 36, 36], [0, 36, 36]]


def overflow_of_the_case(seat: Seat, on_overflow: str) -> tuple[float, int, int, str]:
    """256 rows for a capacity of 192 on rank 0, none on rank 1: flag, kept rows, overflows, and what was raised."""
    config = cd.DispatcherConfig(
        num_experts=4,
        top_k=2,
        hidden_dim=32,
        dtype=torch.float32,
        num_max_tokens_per_rank=64,
        row_capacity=cd.RowCapacity.calibrated(1.5),
        on_overflow=on_overflow,  # type: ignore[arg-type]
        timeout_s=20.0,
    )
    message = ""
    with seat.open(config) as dispatcher:
        ledger, x, scores = dispatcher._open.accounts.ledger, torch.ones(64, 32), torch.ones(64, 2)
        weight = torch.nn.Parameter(torch.ones(1))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight])) if on_overflow == "skip_step" else None
        for _ in range(2):
            even = dispatcher.dispatch(x, scores, torch.arange(128).view(64, 2) % 4)
            dispatcher.combine(even.rows, even.handle)
        assert float(ledger.overflowed) == 0.0
        routed = dispatcher.dispatch(x, scores, torch.tensor([[0, 1]]).repeat(64, 1))
        flag = float(ledger.overflowed)
        if on_overflow == "raise":
            message = refused(lambda: dispatcher.combine(routed.rows, routed.handle), cd.CapacityOverflow)
        else:
            dispatcher.combine(routed.rows, routed.handle)
        assert guard is None or guard.num_skipped() == 0  # no step has ended
        kept, overflows = int(routed.tokens_per_expert.sum()), int(ledger.words()[0, OVERFLOWS])
        if guard is not None:
            guard.step()
        dispatcher._open.close()
    return flag, kept, overflows, message


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_an_overflow_is_flagged_where_it_happens_and_told_everywhere(on: On, backend: str):
    assert on(backend, 2)(overflow_of_the_case, "drop") == [(0.0, 192, 1, ""), (0.0, 0, 0, "")]
    assert on(backend, 2)(overflow_of_the_case, "skip_step") == [(1.0, 192, 1, ""), (0.0, 0, 0, "")]
    first, second = on(backend, 2)(overflow_of_the_case, "raise")
    assert (first[:3], second[:3]) == ((1.0, 192, 1), (0.0, 0, 0))
    assert first[3] == second[3] and "a dispatch asked for 256 rows, and row_capacity calibrated(1.5)" in first[3]


def patience_ends(seat: Seat, settings: dict[str, Any]) -> str:
    with seat.open(guarded_config(row_capacity=cd.RowCapacity.rows(4))) as dispatcher:
        model = Model(dispatcher)
        optimizer = OPTIMIZERS["fused AdamW"](list(model.parameters()))
        guard = cd.OverflowGuard(dispatcher, optimizer, patience=2, **settings)
        before = state_bits(model, optimizer)

        def steps() -> None:
            for number in range(6):
                model.zero_grad()
                model.loss("even", number, seat.rank).backward()
                guard.step()

        message = refused(steps, cd.CapacityOverflow)
        assert_same_bits(state_bits(model, optimizer), before, "nothing fits")
        assert guard.num_skipped() == guard.stats().steps == 3  # one of which has raised
        return message


@pytest.mark.parametrize("settings", [{}, {"sync": True}], ids=["late", "at once"])
def test_a_capacity_that_does_not_grow_ends_in_an_error_on_all_ranks(on: On, settings: dict[str, Any]):
    assert set(on("all_to_all", 2)(patience_ends, settings)) == {
        "3 steps in a row were truncated and not applied: layer 'moe 0' drops rows, and row_capacity rows(4) does not"
        " grow: raise it"
    }


# -- policies ----------------------------------------------------------------------------------------------------------


def policies_of_layers(seat: Seat) -> None:
    """One dispatcher: a layer that drops, and one that skips the step."""
    with seat.open(guarded_config(row_capacity=cd.RowCapacity.rows(4), on_overflow="drop")) as dispatcher:
        model = Model(dispatcher, num_layers=1)
        optimizer = OPTIMIZERS["SGD"](list(model.parameters()))
        guard = cd.OverflowGuard(dispatcher, optimizer)
        for number, policy in enumerate([None, "skip_step", "drop"]):
            dispatcher.layer("moe 0", on_overflow=policy)  # type: ignore[arg-type]
            model.zero_grad()
            model.loss("even", number, seat.rank).backward()
            guard.step()
            assert guard.num_skipped() == (number > 0), f"step {number}"
        assert dispatcher.stats().layers["moe 0"].overflows == 3
        unknown: Any = "stop"
        message = refused(lambda: dispatcher.layer("moe 0", on_overflow=unknown), cd.ConfigError)
        assert message == "on_overflow must be one of 'raise', 'skip_step', 'drop', got 'stop'"


def test_a_layer_may_have_a_policy_of_its_own(on: On):
    on("loopback", 2)(policies_of_layers)


def raising_with_a_guard(seat: Seat) -> str:
    """The rank that drops rows raises in the guard's step; the other leaves the step out, and is told a call later."""
    dispatcher = seat.open(guarded_config(row_capacity=cd.RowCapacity.rows(4), on_overflow="raise"))
    weight = torch.nn.Parameter(torch.ones(16))
    guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight]))
    routed = dispatcher.dispatch(weight.expand(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of("hot"))
    weight.grad = torch.ones(16)

    def end() -> None:
        guard.step()
        while True:
            dispatcher.check()

    message = refused(end, cd.CapacityOverflow)
    assert weight.tolist() == [1.0] * 16 and routed.rows.shape[0] == 4
    dispatcher.close()
    return message


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_under_raise_the_step_is_not_applied(on: On, backend: str):
    first, second = on(backend, 2)(raising_with_a_guard)
    assert first == second
    assert "asked for 32 rows" in first and first.endswith("the guard applies no step that lacks rows")


# -- without a guard ---------------------------------------------------------------------------------------------------

UNWATCHED = (
    "layer 'moe' on rank {} has dropped {} of {} rows, and no OverflowGuard watches its dispatcher: without one"
    " on_overflow='skip_step' skips no step, it only counts. Make an OverflowGuard(dispatcher, optimizer) and call its"
    " step() in the place of optimizer.step(), or set on_overflow='drop' if dropping is meant"
)

IDLE = (
    "layer 'moe' on rank {} has dropped {} of {} rows, and the OverflowGuard that watches its dispatcher was never"
    " stepped: steps that lack rows may have been applied. Call its step() in the place of optimizer.step()"
)


def warned_of(seat: Seat, touch: str, watched: bool, fields: dict[str, Any], policy: Any) -> list[list[str]]:
    """What is warned of by the touch point behind the first drop, and by all later ones."""
    told: list[list[str]] = []
    with seat.open(guarded_config(row_capacity=cd.RowCapacity.rows(12), **fields)) as dispatcher:
        layer, weight = dispatcher.layer("moe", on_overflow=policy), torch.nn.Parameter(torch.ones(16))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight])) if watched else None
        x, scores = weight.detach().expand(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2)
        routed = layer.dispatch(x, scores, ids_of("hot"))
        touches: dict[str, Callable[[], object]] = {
            "check": dispatcher.check,
            "stats": dispatcher.stats,
            "combine": lambda: layer.combine(routed.rows, routed.handle),
            "dispatch": lambda: layer.dispatch(x, scores, ids_of("hot")),
        }
        for name in (touch, *touches):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                touches[name]()
            told.append([str(warning.message) for warning in caught])
        if guard is not None:
            assert guard.num_skipped() == 0
            guard.step()
    return [told[0], [message for later in told[1:] for message in later]]


@pytest.mark.parametrize("touch", ["check", "stats", "combine", "dispatch"])
def test_the_first_drop_that_nobody_watches_is_warned_of_once(on: On, touch: str):
    message = UNWATCHED.format(1, 20, 32)
    assert on("all_to_all", 2)(warned_of, touch, False, {}, None) == [[[], []], [[message], []]]


@pytest.mark.parametrize(
    ("watched", "fields", "policy", "is_told"),
    [
        (True, {}, None, False),
        (False, {"on_overflow": "drop"}, None, False),
        (False, {}, "drop", False),
        (False, {"on_overflow": "drop"}, "skip_step", True),
    ],
    ids=["watched", "drop", "a layer that drops", "a layer that skips"],
)
def test_dropping_on_purpose_and_guarded_drops_are_not_warned_of(
    on: On, watched: bool, fields: dict[str, Any], policy: Any, is_told: bool
):
    told = on("all_to_all", 2)(warned_of, "check", watched, fields, policy)
    assert told == [[[], []], [[UNWATCHED.format(1, 20, 32)] * is_told, []]]


def test_a_guard_that_was_never_stepped_is_told_of_at_the_end():
    """Whoever goes on calling `optimizer.step()` has applied the steps that lack rows."""
    optimizer = OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(1))])
    for num_steps, trains, message in ((0, True, IDLE.format(0, 8, 32)), (1, True, None), (0, False, None)):
        dispatcher = cd.TokenDispatcher(guarded_config(row_capacity=cd.RowCapacity.rows(12)))
        guard = cd.OverflowGuard(dispatcher, optimizer)
        for _ in range(2):
            with torch.set_grad_enabled(trains):
                dispatcher.layer("moe").dispatch(torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of("hot"))
        dispatcher.check()  # it may yet be stepped
        for _ in range(num_steps):
            guard.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dispatcher.close()
        assert [str(warning.message) for warning in caught] == ([] if message is None else [message])


def test_a_guard_that_is_gone_watches_no_more():
    with cd.TokenDispatcher(guarded_config(row_capacity=cd.RowCapacity.rows(12))) as dispatcher:
        x, scores = torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2)
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(1))]))
        dispatcher.layer("moe").dispatch(x, scores, ids_of("hot"))
        guard.step()
        del guard
        dispatcher.check()  # the guard has taken what came before
        dispatcher.layer("moe").dispatch(x, scores, ids_of("hot"))
        with pytest.warns(UserWarning) as told:
            dispatcher.check()
        assert [str(warning.message) for warning in told] == [UNWATCHED.format(0, 8, 32)]


def test_on_a_device_the_first_drop_is_told_without_a_wait(monkeypatch: pytest.MonkeyPatch):
    """By a copy that is on its way while the calls go on; the clock says when another one is made."""
    with (
        cd.TokenDispatcher(guarded_config(row_capacity=cd.RowCapacity.rows(12))) as dispatcher,
        device_ledger(dispatcher),
    ):
        x, scores = torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2)
        at = SimpleNamespace(now=100.0, arrived=True)
        monkeypatch.setattr(ledger_module, "_now", lambda: at.now)
        monkeypatch.setattr(HostCopy, "has_arrived", lambda _: at.arrived)
        layer = dispatcher.layer("moe")
        for batch in ("even", "hot"):
            layer.dispatch(x, scores, ids_of(batch))
        for at.now, at.arrived in ((100.9, True), (101.5, False), (103.0, False)):
            with host_reads(dispatcher) as seen:  # too early for another copy; one is made; it has not come
                dispatcher.check()
            assert seen == []
        at.arrived = True
        with pytest.warns(UserWarning) as told:
            dispatcher.check()
        assert [str(warning.message) for warning in told] == [UNWATCHED.format(0, 8, 32)]
        dispatcher.check()


def test_on_a_device_stats_tells_at_once():
    with (
        cd.TokenDispatcher(guarded_config(row_capacity=cd.RowCapacity.rows(12))) as dispatcher,
        device_ledger(dispatcher),
    ):
        dispatcher.layer("moe").dispatch(torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of("hot"))
        with pytest.warns(UserWarning, match="dropped 4 of 16 rows"):
            dispatcher.stats()


# -- faults ------------------------------------------------------------------------------------------------------------


def fault_of_a_call(seat: Seat) -> str:
    """Rank 1 leaves; rank 0's dispatch fails, and so does the step behind it."""
    dispatcher = seat.open(guarded_config(timeout_s=2.0))
    weight = torch.nn.Parameter(torch.ones(16))
    guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([weight]))
    weight.grad = torch.ones(16)
    guard.step()
    applied = weight.tolist()
    dispatcher.dispatch(weight.expand(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of("even"))
    if seat.rank == 1:
        dispatcher.close()
        return refused(guard.step, cd.ContractViolation)
    first = refused(
        lambda: dispatcher.dispatch(weight.expand(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of("even")),
        cd.PeerTimeout,
    )
    message = refused(guard.step, cd.PeerTimeout)
    assert message == first and weight.tolist() == applied != [1.0] * 16
    dispatcher.close()
    return message


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_a_guard_raises_a_fault_and_applies_nothing(on: On, backend: str):
    first, second = on(backend, 2)(fault_of_a_call)
    assert "ranks [1] were missing" in first
    assert second == "this dispatcher is closed"


def a_rank_that_does_not_step(seat: Seat) -> None:
    with seat.open(guarded_config(timeout_s=1.0)) as dispatcher:
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(1))]))
        guard.step()
        if seat.rank != 1:
            others = list(range(seat.size))
            message = refused(guard.step, cd.PeerTimeout)
            assert message.startswith(f"ranks [1] were missing in step 1 (global ranks {others}) of an overflow guard")
            assert refused(guard.step, cd.PeerTimeout) == message


@pytest.mark.parametrize("ep_size", [2, 4])
def test_a_rank_that_does_not_step_is_named(on: On, ep_size: int):
    """Among threads; tests/faults/test_guard.py has the processes."""
    on("loopback", ep_size)(a_rank_that_does_not_step)


def given_up_on_the_device(seat: Seat) -> None:
    """What only the device knows keeps the step from being applied too, on all ranks."""
    with seat.open(guarded_config()) as dispatcher:
        weight = torch.nn.Parameter(torch.ones(16))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["fused SGD without momentum"]([weight]))
        weight.grad = torch.ones(16)
        guard.step()
        before = weight.tolist()
        transport: Any = dispatcher._open.transport
        transport.wire.given_up = torch.tensor([int(seat.rank == 1)])
        guard.step()
        assert weight.tolist() == before != [1.0] * 16
        assert guard.num_skipped() == 1


def test_a_fault_that_only_the_device_knows(on: On):
    on("loopback", 2)(given_up_on_the_device)


# -- calibration -------------------------------------------------------------------------------------------------------


def calibrated_over_a_step(seat: Seat) -> list[int]:
    with seat.open(guarded_config()) as dispatcher:
        model = Model(dispatcher, num_layers=1)

        def step() -> float:
            return sum(float(model.loss(batch, 0, seat.rank).detach()) for batch in ("even", "hot", "mild"))

        assert isinstance(dispatcher.calibrate(step), float)
        sizes = []
        for batch in ("even", "hot"):
            routed = model.layers[0].dispatch(torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of(batch))
            sizes.append(routed.rows.shape[0])
        assert dispatcher.stats().layers["moe 0"].overflows == 0
        return sizes


def test_calibrating_takes_the_most_of_a_step(on: On):
    assert on("loopback", 2)(calibrated_over_a_step) == [[32, 32], [32, 32]]


def test_under_a_pinned_count_nothing_is_calibrated_and_that_is_said():
    with cd.TokenDispatcher(guarded_config(row_capacity=cd.RowCapacity.rows(16))) as dispatcher:
        x, scores = torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2)

        def step(ids: Tensor) -> int:
            return dispatcher.dispatch(x, scores, ids).rows.shape[0]

        with pytest.warns(UserWarning, match=r"row_capacity rows\(16\) is fixed by the configuration: nothing is cal"):
            assert dispatcher.calibrate(step, ids_of("even")) == 16
        assert dispatcher.stats().host_syncs == 0


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_what_a_guard_refuses():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def made(dispatchers: Any, *arguments: Any, **settings: Any) -> str:
        return refused(lambda: cd.OverflowGuard(dispatchers, *arguments, **settings), cd.ConfigError)

    with (
        cd.TokenDispatcher(guarded_config()) as dispatcher,
        cd.TokenDispatcher(guarded_config(row_capacity=cd.RowCapacity.rows(16))) as pinned,
        cd.TokenDispatcher(guarded_config(on_overflow="raise")) as raising,
    ):
        assert made([], optimizer) == "an OverflowGuard needs at least one dispatcher, got none"
        assert made([weight], optimizer) == "an OverflowGuard takes dispatchers, got Parameter"
        assert made(dispatcher.layer("moe"), optimizer) == "an OverflowGuard takes dispatchers, got LayerView"
        assert made(dispatcher, None) == "an OverflowGuard takes torch optimizers, got NoneType"
        assert (
            made(dispatcher, optimizer, groups=3) == "group must be a torch.distributed ProcessGroup or None, got int"
        )
        assert made(dispatcher, []) == "an OverflowGuard needs at least one optimizer, got none"
        assert made(dispatcher, [weight]) == "an OverflowGuard takes torch optimizers, got Parameter"
        assert made(dispatcher, optimizer, groups=["ep"]) == (
            "group must be a torch.distributed ProcessGroup or None, got str"
        )
        assert "shrink_below must lie between 0 and 1, got 2" in made(dispatcher, optimizer, shrink_below=2)
        assert "shrink_after must be a positive integer, got 0" in made(dispatcher, optimizer, shrink_after=0)
        assert "patience must be a positive integer, got 0" in made(dispatcher, optimizer, patience=0)
        assert "retry=True needs a row capacity that grows, and rows(16) does not" in made(
            pinned, optimizer, retry=True
        )
        assert "retry=True needs on_overflow='skip_step'" in made(raising, optimizer, retry=True)
        guard = cd.OverflowGuard(dispatcher, optimizer, retry=True)
        assert made(dispatcher, optimizer).startswith("a dispatcher has one guard, and this one has one already")
        assert refused(guard.step) == (
            "retry=True needs a closure at every step: what runs forward and backward once more"
        )
        del guard
        another = cd.OverflowGuard(dispatcher, optimizer)
        assert refused(lambda: another.step(3)) == (  # type: ignore[arg-type]
            "closure must be a function without arguments, got int"
        )


@pytest.mark.parametrize("factor", [0, -1.5, float("nan"), float("inf"), True])
def test_factors_that_size_nothing(factor: float):
    assert "must be a positive, finite number" in refused(lambda: cd.RowCapacity.calibrated(factor), cd.ConfigError)
    assert "must be a positive, finite number" in refused(lambda: cd.RowCapacity.balanced(factor), cd.ConfigError)


def test_a_pinned_count_is_a_multiple_of_the_alignment():
    message = refused(lambda: guarded_config(row_capacity=cd.RowCapacity.rows(20), expert_alignment=16), cd.ConfigError)
    assert message == "row_capacity rows(20) must be a multiple of expert_alignment (16)"


class _Counting(torch.optim.SGD):
    """Keeps a number that is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1


def test_a_snapshot_that_cannot_be_put_back():
    with cd.TokenDispatcher(guarded_config()) as dispatcher:
        weight = torch.nn.Parameter(torch.ones(4))
        guard = cd.OverflowGuard(dispatcher, _Counting([weight], lr=0.1), snapshot=True)
        weight.grad = torch.ones(4)
        guard.step()
        before = weight.tolist()
        assert refused(guard.step, cd.ContractViolation) == (
            "snapshot=True cannot put back 'count' of _Counting, which is no tensor but int: leave it out"
        )
        assert weight.tolist() == before
