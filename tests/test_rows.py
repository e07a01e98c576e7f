"""Sums over more places than fit into one chunk, of lists of every length, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from crossdock.permute import map_slots
from crossdock.rows import reduce_rows
from crossdock.testing import assert_bit_equal

NUM_PLACES, MOST, NUM_ROWS, WIDTH = 1300, 4, 200, 1030  # three chunks


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows, zeros of either sign among them, and an index in which lists of every length have gaps anywhere."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, WIDTH, generator=generator).to(dtype)
    rows[:50] = -0.0
    index = torch.randint(0, NUM_ROWS, (NUM_PLACES, MOST), generator=generator)
    return rows, index.masked_fill_(torch.rand(NUM_PLACES, MOST, generator=generator) < 0.5, -1)


def added_up(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """The loop over terms, with all places at once."""
    acc = torch.zeros(index.shape[0], rows.shape[1])
    for m in range(index.shape[1]):
        term = rows[index[:, m].clamp(min=0)].float()
        if weights is not None:
            term = (weights[index[:, m].clamp(min=0)] if weights.dim() == 1 else weights[:, m]).unsqueeze(1) * term
        acc = torch.where(index[:, m : m + 1] >= 0, acc + term, acc)
    return acc.to(rows.dtype)


@pytest.mark.parametrize(
    "weights", [None, torch.randn(NUM_ROWS), torch.randn(NUM_PLACES, MOST)], ids=["1", "row", "term"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_places_in_several_chunks(dtype: torch.dtype, weights: Tensor | None):
    rows, index = drawn(dtype)
    wanted = added_up(rows, index, weights)
    assert_bit_equal(reduce_rows(rows, index, weights), wanted, "sums")
    assert_bit_equal(reduce_rows(rows, index.t().contiguous().t(), weights), wanted, "sums by an index that is strided")
    larger = torch.full((NUM_PLACES + 2, WIDTH), 7.0, dtype=dtype)
    out = larger[1:-1]
    assert reduce_rows(rows, index, weights, out=out).data_ptr() == out.data_ptr()
    assert_bit_equal(out, wanted, "sums where they were asked for")
    assert larger[0].eq(7).all() and larger[-1].eq(7).all()


@pytest.mark.parametrize("num_gaps", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_places_with_hardly_a_gap(dtype: torch.dtype, num_gaps: int):
    """Gaps stay open then, and neither row 0 nor its weight comes in where nothing is asked for."""
    rows, index = drawn(dtype)
    index, by_row, by_term = index.clamp(min=1), torch.rand(NUM_ROWS), torch.rand(NUM_PLACES, MOST)
    index.view(-1)[: num_gaps * 700 : 700] = -1
    rows[0], by_row[0], by_term.view(-1)[: num_gaps * 700 : 700] = math.inf, math.nan, math.nan
    for weights in (None, by_row, by_term):
        wanted = added_up(rows, index, weights)
        assert wanted.isfinite().all()
        assert_bit_equal(reduce_rows(rows, index, weights), wanted, "sums")


def test_an_index_stays_as_it_was():
    rows, index = torch.ones(3, 5), torch.arange(40).remainder_(3).view(40, 1)
    index[7] = -1
    before = index.clone()
    reduce_rows(rows, index, torch.ones(40, 1))
    assert torch.equal(index, before)


@pytest.mark.parametrize("alignment", [1, 8])
def test_slots_of_experts_elsewhere_move_nothing(alignment: int):
    """A map of slots among which few name an expert of this rank is that of those few."""
    ids = torch.randint(0, 5, (40, 4), generator=torch.Generator().manual_seed(1))
    few = torch.where(torch.rand(40, 4, generator=torch.Generator().manual_seed(2)) < 0.8, -1, ids)
    counts = torch.bincount(few[few >= 0], minlength=5)
    num_rows = int(((counts + alignment - 1) // alignment * alignment).sum())
    row_of_slot, slot_of_row = map_slots(few, counts, alignment, int(counts.sum()), num_rows)
    wanted, begin = [], 0
    for expert, count in enumerate(counts.tolist()):
        slots = [slot for slot, chosen in enumerate(few.flatten().tolist()) if chosen == expert]
        wanted += slots + [-1] * (-count % alignment)
        assert row_of_slot.flatten()[slots].tolist() == list(range(begin, begin + count))
        begin = len(wanted)
    assert slot_of_row.tolist() == wanted
    assert row_of_slot[few < 0].eq(-1).all()
