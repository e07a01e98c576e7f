"""A fixed row capacity and what lies behind its rows: not counted, not learned from, not written, not made up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import crossdock as cd
from crossdock.backends.base import Call, Link, TransportSpec
from crossdock.group.fingerprint import CallFacts
from crossdock.group.members import Members
from crossdock.nn import GroupedExperts
from crossdock.testing import Problem, Seat, assert_bit_equal
from crossdock.testing.solving import solve
from tests.contract.conftest import On, every_backend
from tests.contract.trials import integers, make_config, problem, random_ids

HIDDEN_DIM = 16


def weights_learned(seat: Seat, ids: Tensor, num_experts: int, capacity: cd.RowCapacity) -> tuple[Tensor, list[Tensor]]:
    """Counts, and gradients of this rank's experts; all that lies behind the rows is NaN."""
    config = make_config(num_experts, 1, row_capacity=capacity, num_max_tokens_per_rank=len(ids))
    with seat.open(config) as dispatcher:
        experts = GroupedExperts(dispatcher.num_local_experts, HIDDEN_DIM, 8, seed=3)
        x = torch.randn(len(ids), HIDDEN_DIM, generator=torch.Generator().manual_seed(seat.rank))
        routed = dispatcher.dispatch(x, torch.ones(len(ids), 1), ids)
        rows = routed.rows.masked_fill(~routed.row_valid.unsqueeze(1), float("nan"))
        dispatcher.combine(experts(rows, routed.expert_offsets), routed.handle).square().sum().backward()
    return routed.tokens_per_expert, [weight.grad for weight in experts.parameters() if weight.grad is not None]


def tail_stays_out(seat: Seat, ids: Tensor, num_experts: int, num_rows: int) -> list[int]:
    exact, wanted = weights_learned(seat, ids, num_experts, cd.RowCapacity.exact())
    counts, gradients = weights_learned(seat, ids, num_experts, cd.RowCapacity.rows(num_rows))
    assert_bit_equal(counts, exact, "tokens_per_expert")
    assert len(gradients) == 3
    for number, (gradient, want) in enumerate(zip(gradients, wanted, strict=True)):
        assert bool(gradient.isfinite().all())
        assert_bit_equal(gradient, want, f"gradient of weight {number}")
    return [int(count) for count in counts]


@every_backend(2)
def test_a_single_local_expert_keeps_out_of_the_spare_rows(on: On, backend: str, ep_size: int):
    ids = (torch.arange(130) % 2).view(130, 1)
    assert on(backend, ep_size)(tail_stays_out, ids, 2, 256) == [[130], [130]]


@every_backend(2)
def test_spare_rows_are_not_booked_on_the_last_expert(on: On, backend: str, ep_size: int):
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]).view(8, 1)
    assert on(backend, ep_size)(tail_stays_out, ids, 4, 64) == [[6, 10], [0, 0]]


def cut_short(seat: Seat, trial: Problem) -> dict[str, Tensor]:
    """All results of a forward and backward that lacked rows; of rows, those that carry a token."""
    with seat.open(trial.config) as dispatcher:
        if seat.backend == "symmetric":
            assert dispatcher._open.transport.plan.small == 0  # type: ignore[attr-defined]
        outcome = solve(dispatcher, trial, seat.rank, seat.device)
        assert dispatcher.stats().layers[""].overflows == 1
    by_row = {name: getattr(outcome, name)[outcome.row_valid] for name in ("rows", "scores", "grad_rows")}
    others = ("tokens_per_expert", "expert_offsets", "row_valid", "out", "grad_x", "grad_scores")
    return by_row | {name: getattr(outcome, name) for name in others}


@pytest.mark.parametrize(
    ("settings", "strided"),
    [
        ({"row_capacity": cd.RowCapacity.rows(12), "reduction": "fast"}, False),
        ({"row_capacity": cd.RowCapacity.rows(12), "reduction": "exact", "expert_alignment": 4}, False),
        ({"row_capacity": cd.RowCapacity.worst_case(0.25), "reduction": "exact", "dtype": torch.bfloat16}, True),
    ],
    ids=["rows, fast", "rows, exact", "a fraction, exact"],
)
def test_the_kernels_of_large_batches_drop_what_all_to_all_drops(on: On, settings: dict[str, Any], strided: bool):
    """Every sum is exact, those of the scores' gradients too, so that their order does not matter."""
    config = make_config(8, 3, HIDDEN_DIM, num_max_tokens_per_rank=600, on_overflow="drop", **settings)
    trial = integers(problem(config, random_ids((9, 7), 3, 8))).replace(strided=strided)
    found, wanted = (on(backend, 2)(cut_short, trial) for backend in ("symmetric", "all_to_all"))
    for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for name, tensor in mine.items():
            assert_bit_equal(tensor, theirs[name], f"{name} on rank {rank}")


def facts_of_a_call(seat: Seat) -> list[int]:
    with seat.open(make_config(4, 2, row_capacity=cd.RowCapacity.worst_case())) as dispatcher:
        ids = torch.tensor([[0, 1], [2, 3], [0, 2]])
        routed = dispatcher.dispatch(torch.ones(3, HIDDEN_DIM), torch.ones(3, 2), ids)
        for record in (routed, routed.handle):
            for field in dataclasses.fields(record):
                value = getattr(record, field.name)
                assert value is not None and value != [] and value != (), f"{field.name} is {value!r}"
        assert isinstance(routed.tokens_per_expert, Tensor) and isinstance(routed.expert_offsets, Tensor)
        assert not isinstance(routed.handle.num_rows, Tensor) and routed.handle.num_rows == routed.rows.shape[0]
        return [*routed.tokens_per_expert.tolist(), *routed.expert_offsets.tolist()]


@every_backend(2)
def test_what_is_told_of_a_dispatch_is_there_or_not_offered(on: On, backend: str, ep_size: int):
    assert on(backend, ep_size)(facts_of_a_call) == [[4, 2, 4, 6], [4, 2, 4, 6]]


@pytest.mark.parametrize("alignment", [1, 8])
def test_nothing_lands_behind_the_last_row_of_a_capacity(alignment: int, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")
    from crossdock.backends.symmetric import transport

    spec = TransportSpec(
        num_experts=2,
        top_k=1,
        hidden_dim=HIDDEN_DIM,
        dtype=torch.float32,
        num_max_tokens_per_rank=600,  # too many for the kernels of small batches
        expert_alignment=alignment,
        reduction="fast",
        num_sms=None,
        timeout_s=10.0,
        rank=0,
        ep_size=1,
        row_capacity=cd.RowCapacity.rows(16),
    )
    slab = torch.full((40, HIDDEN_DIM), 7.0)
    monkeypatch.setattr(transport, "new_rows", lambda num_rows, like: slab[:num_rows])
    link = Link(members=Members(0, (0,), torch.device("cpu"), "none"), store_prefix="", on_expiry=lambda _: None)
    opened = transport.SymmetricTransport(spec, link, torch.device("cpu"))
    facts = CallFacts(0, "dispatch", "")
    call = Call(facts, tuple(facts.words()), lambda _: None)
    ids = torch.tensor([0] * 12 + [1] * 12).view(24, 1)
    received = opened.dispatch(torch.ones(24, HIDDEN_DIM), torch.ones(24, 1), ids, 16, call)
    opened.close()
    assert received.demand.wanted.tolist() == [12, 12]
    assert received.tokens_per_expert.tolist() == ([12, 4] if alignment == 1 else [12, 0])
    assert received.expert_offsets.tolist() == [12 if alignment == 1 else 16, 16]
    assert bool((slab[16:] == 7.0).all()), "something was written behind the capacity"
    assert bool((slab[:12] == 1.0).all())
