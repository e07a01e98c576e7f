"""How many rows a dispatch returns: the formulas, and what they promise of drawn routings."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import crossdock as cd
from crossdock.permute import count_by_expert, kept_within, map_slots, map_slots_within, padded_ends
from crossdock.row_capacity import Calibration, resolve_num_rows, tokens_of_call, what_to_change
from tests.contract.trials import make_config

ALIGNMENTS = st.sampled_from([1, 2, 3, 4, 16, 128])


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Group size, experts on each rank, slots, tokens."""
    ep_size, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return ep_size, num_local, draw(st.integers(1, min(4, ep_size * num_local))), draw(st.integers(0, 6))


def config_of(shape: tuple[int, int, int, int], capacity: cd.RowCapacity, **fields: Any) -> cd.DispatcherConfig:
    ep_size, num_local, top_k, _ = shape
    return make_config(ep_size * num_local, top_k, row_capacity=capacity, **fields)


def demand(ids: Tensor, shape: tuple[int, int, int, int], alignment: int) -> list[int]:
    """Rows with padding that each rank is asked for, when every rank brings these ids."""
    ep_size, num_local, _, _ = shape
    counts = count_by_expert(ids, ep_size * num_local).view(ep_size, num_local) * ep_size
    return [int(padded_ends(of_rank, alignment)[-1]) for of_rank in counts]


def all_to(expert: int, shape: tuple[int, int, int, int], *, distinct: bool) -> Tensor:
    """Every slot of every token to one rank's experts: to one of them, or to as many as there are."""
    _, num_local, top_k, tokens = shape
    row = [expert] * top_k
    if distinct:
        row = [expert + slot if slot < num_local else -1 for slot in range(top_k)]
    return torch.tensor([row] * tokens, dtype=torch.int64).view(tokens, top_k)


@given(shapes(), ALIGNMENTS, st.booleans(), st.data())
def test_the_worst_case_never_overflows(
    shape: tuple[int, int, int, int], alignment: int, distinct: bool, data: st.DataObject
):
    ep_size, num_local, top_k, tokens = shape
    num_rows = resolve_num_rows(
        config_of(shape, cd.RowCapacity.worst_case(), expert_alignment=alignment, distinct_experts=distinct),
        ep_size,
        tokens,
    )
    hot = all_to((ep_size - 1) * num_local, shape, distinct=distinct)
    id_ = st.integers(-1, ep_size * num_local - 1)
    row = st.lists(id_, min_size=top_k, max_size=top_k)
    if distinct:
        row = row.map(lambda ids: [i if i not in ids[:k] else -1 for k, i in enumerate(ids)])
    drawn = torch.tensor(data.draw(st.lists(row, min_size=tokens, max_size=tokens)), dtype=torch.int64)
    for ids in (hot, drawn.view(tokens, top_k)):
        assert max(demand(ids, shape, alignment)) <= num_rows


@given(shapes(), st.floats(0.01, 1.0))
def test_a_hot_rank_overflows_below_the_worst_case(shape: tuple[int, int, int, int], fraction: float):
    ep_size, _, top_k, tokens = shape
    num_rows = resolve_num_rows(config_of(shape, cd.RowCapacity.worst_case(fraction)), ep_size, tokens)
    needed = max(demand(all_to(0, shape, distinct=False), shape, 1))
    assert needed == tokens * ep_size * top_k
    assert num_rows - 4 < needed * math.ceil(fraction * 1e6) / 1e6 <= num_rows


@given(shapes(), st.floats(0.01, 8.0), ALIGNMENTS)
def test_the_sizes_of_all_kinds(shape: tuple[int, int, int, int], factor: float, alignment: int):
    ep_size, num_local, top_k, tokens = shape
    padding, multiple = num_local * (alignment - 1), max(4, alignment)
    measured = Calibration(num_rows=7, num_tokens_per_rank=3)
    bases = {
        cd.RowCapacity.worst_case(min(factor, 1.0)): tokens * ep_size * top_k * min(factor, 1.0),
        cd.RowCapacity.balanced(factor): tokens * top_k * factor,
        cd.RowCapacity.calibrated(factor): 7 * tokens / 3 * factor,
    }
    for capacity, base in bases.items():
        num_rows = resolve_num_rows(config_of(shape, capacity, expert_alignment=alignment), ep_size, tokens, measured)
        assert num_rows % multiple == 0
        assert base + padding - 1e-6 <= num_rows < base + padding + multiple + 1 + base * 1e-4 + tokens
    rows = cd.RowCapacity.rows(3 * alignment)
    assert resolve_num_rows(config_of(shape, rows, expert_alignment=alignment), ep_size, tokens) == 3 * alignment


@pytest.mark.parametrize("factor", [1.1, 1, numpy.float64(1.1)])
def test_factors_are_decimals(factor: float):
    config = make_config(8, 2, row_capacity=cd.RowCapacity.balanced(factor))
    assert resolve_num_rows(config, 2, 20) == 44 if factor != 1 else 40


def test_a_calibrated_layer_grows_with_the_call():
    config = make_config(8, 2, row_capacity=cd.RowCapacity.calibrated(1.5))
    measured = Calibration(num_rows=100, num_tokens_per_rank=64)
    assert [resolve_num_rows(config, 2, tokens, measured) for tokens in (64, 32, 128, 0)] == [152, 76, 300, 0]


def test_the_bound_of_a_call():
    config, equal = make_config(8, 2), make_config(8, 2, equal_token_counts=True)
    assert [tokens_of_call(config, 5, bound) for bound in (-1, 7, 0)] == [64, 7, 0]
    assert [tokens_of_call(equal, 5, bound) for bound in (-1, 7)] == [5, 7]


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        (cd.RowCapacity.worst_case(0.25), "raise its fraction to at least 0.5 (at 1.0 it never overflows)"),
        (cd.RowCapacity.worst_case(0.75), "raise its fraction to at least 1 (at 1.0 it never overflows)"),
        (cd.RowCapacity.balanced(1.0), "raise its factor to at least 2"),
        (cd.RowCapacity.calibrated(1.5), "raise its factor to at least 3"),
        (cd.RowCapacity.rows(64), "set row_capacity to rows(n) with n at least 128"),
    ],
    ids=str,
)
def test_what_to_change(capacity: cd.RowCapacity, words: str):
    assert what_to_change(make_config(8, 2, row_capacity=capacity), 128, 64) == words


@given(shapes(), ALIGNMENTS, st.integers(0, 40), st.data())
def test_rows_within_a_capacity_are_the_first_of_all(
    shape: tuple[int, int, int, int], alignment: int, num_rows: int, data: st.DataObject
):
    _, num_experts, top_k, tokens = shape
    flat = data.draw(st.lists(st.integers(-1, num_experts - 1), min_size=tokens * top_k, max_size=tokens * top_k))
    ids = torch.tensor(flat, dtype=torch.int64).view(tokens, top_k)
    counts = count_by_expert(ids, num_experts)
    ends = padded_ends(counts, alignment)
    everything = map_slots(ids, counts, alignment, int(counts.sum()), int(ends[-1]))
    within = map_slots_within(ids, counts, alignment, num_rows)
    assert (
        within.row_of_slot.tolist()
        == torch.where(everything.row_of_slot < num_rows, everything.row_of_slot, -1).tolist()
    )
    tail = [-1] * max(num_rows - int(ends[-1]), 0)
    assert within.slot_of_row.tolist() == [*everything.slot_of_row.tolist()[:num_rows], *tail]
    kept, clipped = kept_within(counts, ends, num_rows)
    starts = [0, *clipped.tolist()]
    for expert, (start, count) in enumerate(zip(starts, kept.tolist(), strict=False)):
        slots = within.slot_of_row.tolist()[start : start + count]
        assert len(slots) == count and all(flat[slot] == expert for slot in slots)
    assert int(kept.sum()) == int((within.row_of_slot >= 0).sum())
    assert max(clipped.tolist()) <= num_rows
