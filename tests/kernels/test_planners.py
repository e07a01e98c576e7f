"""The layout kernels, in Triton's interpreter, give what plain tensor arithmetic gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.backends.base import TransportSpec
from crossdock.backends.wire_layout import COUNTS, Counts, KernelPlanner, PlainPlanner

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")
CPU = torch.device("cpu")


def _spec(rank: int, ep_size: int, num_local: int, top_k: int, alignment: int) -> TransportSpec:
    return TransportSpec(
        num_experts=num_local * ep_size,
        top_k=top_k,
        hidden_dim=8,
        dtype=torch.float32,
        num_max_tokens_per_rank=4096,
        expert_alignment=alignment,
        reduction="fast",
        num_sms=None,
        timeout_s=1.0,
        rank=rank,
        ep_size=ep_size,
    )


def _counts(left: torch.Tensor, slots: torch.Tensor, arrived: list[int], spec: TransportSpec) -> Counts:
    """What the headers would say of `slots` that arrive from every rank."""
    came = torch.zeros_like(left)
    local = slots[:, : spec.top_k].long() - spec.rank * spec.num_local_experts
    by_table = [rank for rank in range(spec.ep_size) if rank != spec.rank] + [spec.rank]
    start = 0
    for rank in by_table:
        part = local[start : start + arrived[rank]].flatten()
        here = part[(part >= 0) & (part < spec.num_local_experts)]
        came[rank, COUNTS:] = torch.bincount(here, minlength=spec.num_local_experts)
        came[rank, COUNTS - 2] = arrived[rank]
        start += arrived[rank]
    return Counts.read(left, came, spec.expert_alignment)


@settings(max_examples=25, deadline=None)
@given(
    ep_size=st.integers(1, 4),
    num_local=st.sampled_from([1, 3, 5, 40]),
    top_k=st.sampled_from([1, 2, 3, 7, 8]),
    num_tokens=st.sampled_from([0, 1, 5, 33, 70]),
    alignment=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_kernels_plan_what_arithmetic_plans(ep_size, num_local, top_k, num_tokens, alignment, seed, data):
    rank = data.draw(st.integers(0, ep_size - 1))
    arrived = data.draw(st.lists(st.integers(0, 40), min_size=ep_size, max_size=ep_size))
    spec = _spec(rank, ep_size, num_local, top_k, alignment)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, spec.num_experts + 1, (num_tokens, top_k), generator=generator)
    foreign = torch.randint(-1, spec.num_experts, (sum(arrived), top_k), generator=generator).int()
    slots = torch.cat([foreign, torch.rand(sum(arrived), top_k, generator=generator).view(torch.int32)], dim=1)

    headers = [torch.zeros(ep_size, COUNTS + num_local, dtype=torch.int64) for _ in range(2)]
    plain, kernels = PlainPlanner(spec, CPU), KernelPlanner(spec, CPU)
    plain.count(ids, headers[0])
    kernels.count(ids, headers[1])
    assert torch.equal(headers[0], headers[1])

    counts = _counts(headers[0], slots, arrived, spec)
    in_range = torch.where((ids < -1) | (ids >= spec.num_experts), -1, ids)  # others end the call before this step
    for expected, actual in zip(
        plain.place_sent(in_range, headers[0], counts), kernels.place_sent(in_range, headers[0], counts), strict=True
    ):
        assert torch.equal(expected, actual)
    for expected, actual in zip(plain.place_arrived(slots, counts), kernels.place_arrived(slots, counts), strict=True):
        assert torch.equal(expected, actual) and expected.dtype == actual.dtype


def test_worked_example_of_what_leaves():
    spec = _spec(0, 2, 2, 2, 1)
    ids = torch.tensor([[0, 2], [1, -1]])
    headers = torch.zeros(2, COUNTS + 2, dtype=torch.int64)
    planner = KernelPlanner(spec, CPU)
    planner.count(ids, headers)
    assert headers[:, COUNTS - 2 :].tolist() == [[2, 0, 1, 1], [1, 0, 1, 0]]
    sent = planner.place_sent(ids, headers, Counts.read(headers, headers, 1))
    assert sent.token_of_sent.tolist() == [0, 0, 1]
    assert sent.sent_of_token.tolist() == [[1, 0], [2, -1]]


def test_worked_example_of_what_arrives():
    from crossdock.kernels.place import launch_place

    slots = torch.tensor([[0, 0], [0, 0]], dtype=torch.int32)  # one token of rank 1, then one of rank 0; scores 0.0
    row_of_slot, slot_of_row, _, per_expert, ends = launch_place(slots, (0, 1), (0, 1), 1, 2)
    assert row_of_slot.tolist() == [[1], [0]]
    assert slot_of_row.tolist() == [1, 0]
    assert per_expert.tolist() == [2] and ends.tolist() == [2]


def test_worked_example_of_padded_groups():
    from crossdock.kernels.launch import launch
    from crossdock.kernels.place import pad_groups_kernel

    totals, starts, ends = torch.tensor([0, 1, 9]), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    launch(pad_groups_kernel, (1,), CPU, totals, starts, ends, ALIGNMENT=8, NUM_LOCAL=3, BLOCK=4)
    assert ends.tolist() == [0, 8, 24] and starts.tolist() == [0, 0, 8]
