"""Properties over drawn routings: counts, layouts, sums, and the comparison of fingerprints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import crossdock as cd
from crossdock.group.fingerprint import NUM_WORDS, CallFacts, compare
from crossdock.permute import count_by_expert, first_true, map_slots, padded_ends, take_or_zero
from crossdock.rows import gather_rows, reduce_rows
from crossdock.testing import ThreadRunner, assert_bit_equal, check_problem
from tests.contract.trials import make_config, problem

ALIGNMENTS = st.sampled_from([1, 2, 8, 16])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@st.composite
def ids(draw: st.DrawFn, num_experts: int, top_k: int, max_tokens: int = 9) -> Tensor:
    tokens = draw(st.integers(0, max_tokens))
    slot = st.integers(-1, num_experts - 1)
    flat = draw(st.lists(slot, min_size=tokens * top_k, max_size=tokens * top_k))
    return torch.tensor(flat, dtype=torch.int64).view(tokens, top_k)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    num_experts, top_k = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return draw(ids(num_experts, top_k)), num_experts


@given(routings(), ALIGNMENTS)
def test_counts_and_padded_ends(routing: tuple[Tensor, int], alignment: int):
    expert_ids, num_experts = routing
    counts = count_by_expert(expert_ids, num_experts)
    assert counts.tolist() == [int((expert_ids == expert).sum()) for expert in range(num_experts)]
    ends = padded_ends(counts, alignment).tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for count, size in zip(counts.tolist(), sizes, strict=True):
        assert size % alignment == 0
        assert count <= size < count + alignment


@given(routings(), ALIGNMENTS)
def test_slots_and_rows_map_to_each_other_in_order(routing: tuple[Tensor, int], alignment: int):
    expert_ids, num_experts = routing
    counts = count_by_expert(expert_ids, num_experts)
    ends = padded_ends(counts, alignment)
    placed = map_slots(expert_ids, counts, alignment, int(counts.sum()), int(ends[-1]))
    rows, flat = placed.row_of_slot.flatten().tolist(), expert_ids.flatten().tolist()
    assert [row < 0 for row in rows] == [expert < 0 for expert in flat]
    slots = placed.slot_of_row.tolist()
    assert len(slots) == int(ends[-1])
    assert all(slots[row] == slot for slot, row in enumerate(rows) if row >= 0)
    assert sum(slot >= 0 for slot in slots) == int(counts.sum())
    for expert, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        group = slots[start:end]
        real = group[: int(counts[expert])]
        assert real == sorted(real) and all(flat[slot] == expert for slot in real)
        assert set(group[len(real) :]) <= {-1}


@given(st.lists(st.booleans(), max_size=40))
def test_first_true(mask: list[bool]):
    wanted = [position for position, is_true in enumerate(mask) if is_true]
    assert first_true(torch.tensor(mask, dtype=torch.bool), len(wanted)).tolist() == wanted


@st.composite
def sums(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, an index with gaps, and weights or None."""
    num_rows, places, slots = draw(st.integers(1, 8)), draw(st.integers(0, 8)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = (torch.randn(num_rows, draw(st.integers(1, 20)), generator=generator) * 8).to(draw(DTYPES))
    index = torch.randint(-1, num_rows, (places, slots), generator=generator)
    weights = torch.randn(places, slots, generator=generator) if draw(st.booleans()) else None
    return rows, index, weights


@given(sums())
def test_reduce_rows_is_the_loop_it_says_it_is(drawn: tuple[Tensor, Tensor, Tensor | None]):
    rows, index, weights = drawn
    wanted = torch.empty(index.shape[0], rows.shape[1], dtype=rows.dtype)
    for place, chosen in enumerate(index.tolist()):
        acc = torch.zeros(rows.shape[1])
        for m, row in enumerate(chosen):
            if row >= 0:
                acc = acc + (rows[row].float() if weights is None else weights[place, m] * rows[row].float())
        wanted[place] = acc.to(rows.dtype)
    assert_bit_equal(reduce_rows(rows, index, weights), wanted, "sums")


@given(sums())
def test_gathering_is_the_adjoint_of_adding_up(drawn: tuple[Tensor, Tensor, Tensor | None]):
    rows, index, _ = drawn
    flat = index.flatten()
    gathered = gather_rows(rows, flat)
    for position, row in enumerate(flat.tolist()):
        assert_bit_equal(gathered[position], rows[row] if row >= 0 else torch.zeros_like(rows[0]), "row")
    assert_bit_equal(take_or_zero(rows[:, 0], index), gathered[:, 0].view(index.shape), "scalars")


@st.composite
def group_problems(draw: st.DrawFn) -> tuple[cd.DispatcherConfig, list[Tensor]]:
    ep_size, per_rank, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_experts = ep_size * per_rank
    top_k = min(top_k, num_experts)
    config = make_config(
        num_experts,
        top_k,
        draw(st.integers(1, 9)),
        dtype=draw(DTYPES),
        expert_alignment=draw(ALIGNMENTS),
        reduction=draw(st.sampled_from(["fast", "exact"])),
    )
    return config, [draw(ids(num_experts, top_k)) for _ in range(ep_size)]


@given(group_problems(), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_any_routing_forward_and_backward(
    drawn: tuple[cd.DispatcherConfig, list[Tensor]], seed: int, apply_scores: bool, strided: bool
):
    config, expert_ids = drawn
    trial = problem(config, expert_ids, seed=seed, apply_scores=apply_scores, strided=strided)
    ThreadRunner(len(expert_ids))(check_problem, trial)


CALLS = st.builds(
    CallFacts,
    number=st.integers(0, 3),
    operation=st.sampled_from(["dispatch", "combine"]),
    layer=st.sampled_from(["", "blocks.0", "a name that is longer than forty-eight bytes, by a few letters: 1"]),
    num_tokens_per_rank=st.sampled_from([-1, 8, 9]),
    grad_mode=st.booleans(),
)


@given(st.lists(CALLS, min_size=1, max_size=4))
def test_fingerprints_differ_exactly_where_calls_do(calls: list[CallFacts]):
    words = [call.words() for call in calls]
    assert all(len(each) == NUM_WORDS for each in words)
    if all(call == calls[0] for call in calls):
        compare(words)
        return
    with pytest.raises(cd.ContractViolation) as refusal:
        compare(words)
    agreeing = [rank for rank in range(len(calls)) if rank not in refusal.value.ranks]
    assert len({calls[rank] for rank in agreeing}) == 1
    largest = max(calls.count(call) for call in calls)
    assert len(agreeing) == largest
