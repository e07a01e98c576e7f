"""Row capacities beside the conformance suite: what is refused, when ranks differ, and who is told of an overflow."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import crossdock as cd
from crossdock.backends.all_to_all import AllToAllBackend
from crossdock.backends.base import GroupFacts
from crossdock.group.members import resolve_members
from crossdock.ledger import DeviceLedger, Entry
from crossdock.select import make_spec
from crossdock.testing import RanksFailed, Seat, assert_bit_equal, traits_of
from tests.contract.conftest import BACKENDS, On
from tests.contract.trials import make_config, refused

CALIBRATED = cd.RowCapacity.calibrated(2.0)


def offered_by(ep_size: int) -> pytest.MarkDecorator:
    """Run a test on every backend that offers all kinds."""
    backends = [
        name for name, sizes in BACKENDS.items() if ep_size in sizes and "calibrated" in traits_of(name).row_capacities
    ]
    return pytest.mark.parametrize(("backend", "ep_size"), [(name, ep_size) for name in backends], ids=backends)


def inputs(num_tokens: int = 6, expert: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens for two of four experts in turn, or all for one."""
    ids = (
        torch.arange(num_tokens * 2).view(num_tokens, 2) % 4 if expert is None else torch.full((num_tokens, 2), expert)
    )
    return torch.ones(num_tokens, 16), torch.ones(num_tokens, 2), ids


def alone(**fields: Any) -> cd.TokenDispatcher:
    return cd.TokenDispatcher(make_config(4, 2, **fields))


# -- refused -----------------------------------------------------------------------------------------------------------


def test_an_uncalibrated_layer_is_not_compiled():
    with alone(row_capacity=CALIBRATED) as dispatcher:
        layer = dispatcher.layer("moe")

        def step(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
            routed = layer.dispatch(x, scores, ids)
            return layer.combine(routed.rows, routed.handle)

        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        message = refused(lambda: compiled(*inputs()), cd.ContractViolation)
        assert message == (
            "layer 'moe' is not calibrated yet: row_capacity calibrated(2.0) measures the first eager dispatch of every"
            " layer, so make one before this layer is compiled or captured"
        )
        wanted = step(*inputs())
        assert_bit_equal(compiled(*inputs()), wanted, "out")


@pytest.mark.parametrize(
    "capacity", [cd.RowCapacity.worst_case(), cd.RowCapacity.balanced(2.0), cd.RowCapacity.rows(64)], ids=str
)
def test_a_layer_is_compiled_again_once_when_token_counts_change(capacity: cd.RowCapacity):
    counter = CompileCounterWithBackend("aot_eager")
    with alone(row_capacity=capacity, equal_token_counts=True) as dispatcher:

        def step(x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            routed = dispatcher.dispatch(x, scores, ids)
            return dispatcher.combine(routed.rows * 3.0, routed.handle), routed.rows

        compiled = torch.compile(step, backend=counter, fullgraph=True)
        for num_tokens in (8, 12, 5, 9):
            out, rows = compiled(*inputs(num_tokens))
            wanted, wanted_rows = step(*inputs(num_tokens))
            assert_bit_equal(out, wanted, "out")
            assert rows.shape == wanted_rows.shape
    assert counter.frame_count <= 2


def test_over_nccl_only_exact_is_offered():
    config = make_config(4, 2, row_capacity=cd.RowCapacity.balanced(1.5))
    spec = make_spec(config, resolve_members(None, None))
    group = GroupFacts(0, 1, torch.device("cuda", 0), "nccl")
    assert AllToAllBackend().refusal(spec, group) == "row_capacity balanced(1.5) is not offered on cuda:0, only exact()"
    assert AllToAllBackend().refusal(dataclasses.replace(spec, row_capacity=cd.RowCapacity.exact()), group) is None


def test_an_expert_that_is_named_twice_where_none_may_be():
    with alone(distinct_experts=True) as dispatcher:
        x, scores, ids = inputs(3)
        ids[1] = 3
        message = refused(lambda: dispatcher.dispatch(x, scores, ids))
        assert message == (
            "topk_expert_ids[1] is [3, 3], which names an expert twice, and distinct_experts=True declares that no"
            " token does (1 such tokens)"
        )
        ids[1] = -1
        dispatcher.dispatch(x, scores, ids)


def test_a_wrong_histogram_is_ignored_without_a_host_synchronisation():
    with alone(row_capacity=cd.RowCapacity.worst_case()) as dispatcher:
        for _ in range(3):
            routed = dispatcher.dispatch(*inputs(), torch.zeros(4, dtype=torch.int64))
            dispatcher.combine(routed.rows, routed.handle)
        assert dispatcher.stats().host_syncs == 0


def test_what_only_a_device_sees_is_told_once_at_the_next_touch_point():
    with alone(row_capacity=cd.RowCapacity.worst_case()) as dispatcher:
        routed = dispatcher.dispatch(*inputs())
        ledger = DeviceLedger(1, 4, torch.device("cpu"))  # its kernels, in the interpreter
        dispatcher._open.accounts._ledger = ledger
        counts = routed.tokens_per_expert
        bad = torch.tensor([3])
        ledger.enter(Entry("", 6, 64, counts, counts, routed.expert_offsets, bad))
        message = refused(lambda: dispatcher.combine(routed.rows, routed.handle))
        assert message == "topk_expert_ids had 3 ids outside -1..3 in earlier sync-free dispatches; they acted as -1"
        dispatcher.check()
        ledger.note_repeats(torch.tensor([[1, 1], [0, 2]]))
        assert "1 tokens of earlier dispatches named an expert twice" in refused(dispatcher.check)
        dispatcher.combine(routed.rows, routed.handle)


# -- ranks -------------------------------------------------------------------------------------------------------------


def recalibrated_on_one_rank(seat: Seat) -> str:
    with seat.open(make_config(4, 2, row_capacity=CALIBRATED)) as dispatcher:
        layer = dispatcher.layer("moe")
        for _ in range(2):
            layer.dispatch(*inputs())
        if seat.rank == 0:
            layer.recalibrate()
        return refused(lambda: layer.dispatch(*inputs()), cd.ContractViolation)


@offered_by(2)
def test_ranks_that_do_not_forget_together_are_told(on: On, backend: str, ep_size: int):
    messages = on(backend, ep_size)(recalibrated_on_one_rank)
    for message in messages:
        assert "row capacity of this call is exact on ranks [0], 24 rows on ranks [1]" in message


def overflow_while_others_are_idle(seat: Seat) -> tuple[str, float]:
    """Rank 1 raises by itself; rank 0 makes no call meanwhile."""
    config = make_config(4, 2, row_capacity=cd.RowCapacity.rows(4))
    dispatcher = seat.open(config)
    dispatcher.dispatch(*inputs(expert=3))
    begun = time.monotonic()
    if seat.rank == 1:
        message = refused(dispatcher.check, cd.CapacityOverflow)
    else:
        message = ""
        while not message and time.monotonic() - begun < 10:
            try:
                dispatcher.check()
            except cd.CapacityOverflow as overflow:
                message = str(overflow)
                assert overflow.ranks == (1,)
            time.sleep(0.01)
    took_s = time.monotonic() - begun
    dispatcher.close()
    return message, took_s


@offered_by(2)
def test_a_rank_outside_of_all_calls_is_told(on: On, backend: str, ep_size: int):
    (first, first_s), (second, second_s) = on(backend, ep_size)(overflow_while_others_are_idle)
    assert first == second and first.startswith("layer '' on rank 1: a dispatch asked for 24 rows")
    assert max(first_s, second_s) < 5.0


def several_overflow(seat: Seat) -> tuple[str, float]:
    """Every rank's rows overflow, in two layers of different demand."""
    dispatcher = seat.open(make_config(4, 2, row_capacity=cd.RowCapacity.rows(4), timeout_s=30.0))
    dispatcher.layer("first").dispatch(*inputs())
    begun = time.monotonic()
    message = refused(lambda: dispatcher.layer("second").dispatch(*inputs()), cd.CapacityOverflow)
    took_s = time.monotonic() - begun
    dispatcher.close()
    return message, took_s


@offered_by(2)
def test_ranks_that_overflow_together_agree_on_one(on: On, backend: str, ep_size: int):
    (first, first_s), (second, second_s) = on(backend, ep_size)(several_overflow)
    assert first == second and "layer 'first'" in first
    assert max(first_s, second_s) < 5.0


def dropped_with_an_infinite_score(seat: Seat, reduction: str) -> None:
    """Of two slots for one expert only the first fits; what the second would have weighed does not matter."""
    config = make_config(4, 2, row_capacity=cd.RowCapacity.rows(4), on_overflow="drop", reduction=reduction)
    with seat.open(config) as dispatcher:
        x, _, ids = inputs(4)
        scores = torch.tensor([[2.0, float("inf")]] * 4)
        ids[:, 0] = 0
        ids[:, 1] = 1
        routed = dispatcher.dispatch(x, scores, ids)
        out = dispatcher.combine(routed.rows, routed.handle)
    kept = 4 if seat.rank == 0 else 0  # expert 0's rows, the first rank's first
    assert out[:, 0].tolist() == [2.0] * kept + [0.0] * (4 - kept), out[:, 0].tolist()


@offered_by(2)
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_the_score_of_a_dropped_slot_does_not_matter(
    on: On, backend: str, ep_size: int, reduction: str, request: pytest.FixtureRequest
):
    if (backend, reduction) == ("symmetric", "exact"):  # a row of zeros stands for the dropped slot there
        request.applymarker(pytest.mark.xfail(raises=RanksFailed, strict=True))
    on(backend, ep_size)(dropped_with_an_infinite_score, reduction)
