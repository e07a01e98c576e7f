"""The kernels that move rows and scalars through shared memory give the bits of the plain movements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

from crossdock.kernels.add_home import launch_add_ranks, launch_add_slot
from crossdock.kernels.pre_add import launch_pre_add
from crossdock.kernels.pull import launch_pull_rows, launch_zero_padding
from crossdock.kernels.scalars import launch_fetch_scalars, launch_lay_out_scalars
from crossdock.rows import reduce_rows
from crossdock.testing import assert_bit_equal
from tests.kernels.symmetric_ranks import homes, on_shelf, random_ids, table_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MAX_TOKENS = 20
NOWHERE = torch.zeros(1, dtype=torch.int64)  # a count of sent rows that nobody looks at
SHAPES = [((7, 0, 20), 3, 40), ((1, 2), 1, 8), ((0, 0), 2, 16), ((5,), 8, 1032)]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
all_shapes = pytest.mark.parametrize(("num_tokens", "top_k", "hidden_dim"), SHAPES)


def _rows(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _places(num_tokens: tuple[int, ...], top_k: int, *, absent: int = 3) -> tuple[torch.Tensor, int]:
    """`row_of_slot [EP, S, K]` with some slots elsewhere, every row once; and how many rows."""
    generator = torch.Generator().manual_seed(top_k)
    num_places = max(num_tokens)
    row_of_slot = torch.full((len(num_tokens), num_places, top_k), -1, dtype=torch.int32)
    here = torch.zeros(row_of_slot.shape, dtype=torch.bool)
    for rank, tokens in enumerate(num_tokens):
        here[rank, :tokens] = torch.randint(0, absent, (tokens, top_k), generator=generator) > 0
    num_rows = int(here.sum())
    row_of_slot[here] = torch.randperm(num_rows, generator=generator).to(torch.int32)
    return row_of_slot, num_rows


@all_dtypes
@all_shapes
def test_pulling(num_tokens, top_k, hidden_dim, dtype):
    row_of_slot, num_rows = _places(num_tokens, top_k)
    published = [_rows((tokens, hidden_dim), dtype) for tokens in num_tokens]
    shelves = on_shelf(published, MAX_TOKENS)
    expected = torch.full((num_rows, hidden_dim), float("nan"), dtype=dtype)
    for rank, token, slot in (row_of_slot >= 0).nonzero().tolist():
        expected[row_of_slot[rank, token, slot]] = published[rank][token]
    for rank in range(len(num_tokens)):
        out = torch.full_like(expected, float("nan"))
        launch_pull_rows(table_of(shelves), row_of_slot, rank, out)
        assert_bit_equal(out, expected, "pulled rows")


def test_worked_example_of_pulling():
    row_of_slot = torch.tensor([[[0], [-1]], [[2], [1]]], dtype=torch.int32)
    shelves = [torch.full((2, 8), 1.0), torch.tensor([[2.0], [3.0]]).repeat(1, 8)]
    out = torch.full((4, 8), 7.0)
    launch_pull_rows(table_of(shelves), row_of_slot, 0, out)
    assert out[:, 0].tolist() == [1.0, 3.0, 2.0, 7.0]
    launch_zero_padding(torch.tensor([[2, 4], [4, 4]]), 4, out)
    assert out[:, 0].tolist() == [1.0, 3.0, 0.0, 0.0]


@all_dtypes
@pytest.mark.parametrize("weighted", [True, False])
@all_shapes
def test_pre_adding(num_tokens, top_k, hidden_dim, weighted, dtype):
    row_of_slot, num_rows = _places(num_tokens, top_k)
    rows, weights = _rows((num_rows, hidden_dim), dtype), torch.rand(num_rows) if weighted else None
    ep_size, num_places = row_of_slot.shape[:2]
    for slots in (range(top_k), range(top_k - 1, top_k)):
        partials = torch.full((ep_size, MAX_TOKENS, hidden_dim), 9, dtype=dtype)
        sent = torch.zeros(1, dtype=torch.int64)
        launch_pre_add(rows, row_of_slot, weights, slots, partials, 0, sent, None)
        index = row_of_slot[:, :, slots.start : slots.stop].long()
        expected = partials.new_full(partials.shape, 9)
        sums = reduce_rows(rows, index.reshape(-1, len(slots)), weights).view(ep_size, num_places, hidden_dim)
        here = (index >= 0).any(2)
        assert int(sent) == int(here[1:].sum())
        expected[:, :num_places][here] = sums[here]
        assert_bit_equal(partials, expected, "partial sums")


def test_worked_example_of_pre_adding():
    row_of_slot, rows = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[1.0], [2.0]]).repeat(1, 8)
    by_row = torch.tensor([10.0, 100.0])
    for slots, weights, expected in ((range(2), None, 3.0), (range(1, 2), None, 1.0), (range(2), by_row, 210.0)):
        partials = torch.full((1, 1, 8), 9.0)
        launch_pre_add(rows, row_of_slot, weights, slots, partials, 0, NOWHERE, None)
        assert partials[0, 0].tolist() == [expected] * 8
    partials = torch.full((1, 2, 8), 9.0)
    launch_pre_add(
        rows, torch.tensor([[[-2, -1], [-1, -1]]], dtype=torch.int32), None, range(2), partials, 0, NOWHERE, None
    )
    assert partials[0, :, 0].tolist() == [0.0, 9.0]


def test_a_round_that_opens_a_call_carries_its_header():
    headers, state, words = torch.zeros(2, 3).long(), torch.tensor([4, 0, 0, 0]), torch.tensor([7, 8, 9])
    nothing = torch.full((2, 0, 1), -1, dtype=torch.int32)
    launch_pre_add(torch.ones(0, 8), nothing, None, range(1), torch.zeros(2, 4, 8), 0, NOWHERE, (words, headers, state))
    assert headers.tolist() == [[0, 0, 0], [7, 8, 9]]
    state[0] = 5
    launch_lay_out_scalars(torch.ones(0), nothing, torch.zeros(2, 4, 1), (-words, headers, state))
    assert headers.tolist() == [[-7, -8, -9], [7, 8, 9]]


@given(
    ep_size=st.integers(1, 4), top_k=st.sampled_from([1, 2, 5, 8]), num_tokens=st.sampled_from([0, 1, 20]),
    dtype=st.sampled_from(DTYPES), weighted=st.booleans(), seed=st.integers(0, 2**16), data=st.data(),
)  # fmt: skip
def test_adding_at_home(ep_size, top_k, num_tokens, dtype, weighted, seed, data):
    rank = data.draw(st.integers(0, ep_size - 1))
    generator, hidden_dim = torch.Generator().manual_seed(seed), 24
    (ids,) = random_ids(generator, [num_tokens], top_k, 2 * ep_size)
    home = homes(ids, 2)
    shape = (ep_size, ep_size, MAX_TOKENS, hidden_dim)
    slots = torch.randn(top_k, *shape, generator=generator).to(dtype)  # [slot, from_rank, to_rank, token]
    out = torch.empty(num_tokens, hidden_dim, dtype=dtype)

    launch_add_ranks(table_of(list(slots[0])), home, rank, MAX_TOKENS, out)
    flat = slots[0, :, rank].reshape(-1, hidden_dim)
    token = torch.arange(num_tokens).unsqueeze(1)
    has = torch.stack([(home == other).any(1) for other in range(ep_size)], dim=1)
    index = torch.where(has, torch.arange(ep_size) * MAX_TOKENS + token, -1)
    assert_bit_equal(out, reduce_rows(flat, index, None), "sums over ranks")

    weights = torch.rand(num_tokens, top_k, generator=generator) if weighted else None
    sums = torch.empty(num_tokens, hidden_dim)
    for slot in range(top_k):
        launch_add_slot(table_of(list(slots[slot])), home, weights, slot, rank, MAX_TOKENS, sums, out)
    flat = slots[:, :, rank].reshape(-1, hidden_dim)
    index = torch.where(home < 0, -1, (torch.arange(top_k) * ep_size + home) * MAX_TOKENS + token)
    assert_bit_equal(out, reduce_rows(flat, index, weights), "sums over slots")


def test_worked_example_of_adding_at_home():
    home = torch.tensor([[1, -1, 0]], dtype=torch.int32)
    shelves = [torch.full((2, 1, 8), 2.0), torch.full((2, 1, 8), 3.0)]
    out, sums = torch.empty(1, 8), torch.empty(1, 8)
    launch_add_ranks(table_of(shelves), home, 0, 1, out)
    assert out[0, 0] == 5.0
    weights = torch.tensor([[10.0, 0.0, 100.0]])
    for slot, expected in ((0, 30.0), (1, 30.0)):
        launch_add_slot(table_of(shelves), home, weights, slot, 0, 1, sums, out)
        assert sums[0, 0] == expected
    launch_add_slot(table_of(shelves), home, weights, 2, 0, 1, sums, out)
    assert out[0].tolist() == [230.0] * 8


@all_shapes
def test_scalars(num_tokens, top_k, hidden_dim):
    ep_size, num_local = len(num_tokens), 2
    ids = random_ids(torch.Generator().manual_seed(3), num_tokens, top_k, num_local * ep_size)
    shelves, expected = [], [torch.zeros(part.shape) for part in ids]
    for rank in range(ep_size):
        row_of_slot, num_rows = torch.full((ep_size, max(num_tokens), top_k), -1, dtype=torch.int32), 0
        values = torch.randn(int(sum((homes(part, num_local) == rank).sum() for part in ids)))
        for source, part in enumerate(ids):
            for token, slot in (homes(part, num_local) == rank).nonzero().tolist():
                row_of_slot[source, token, slot] = num_rows
                expected[source][token, slot] = values[num_rows]
                num_rows += 1
        scalars = torch.full((ep_size, MAX_TOKENS, top_k), 9.0)
        launch_lay_out_scalars(values, row_of_slot, scalars, None)
        shelves.append(scalars)
    for rank, part in enumerate(ids):
        fetched = launch_fetch_scalars(table_of(shelves), homes(part, num_local), rank, MAX_TOKENS)
        assert_bit_equal(fetched, expected[rank], "scalars")


def test_worked_example_of_scalars():
    scalars = torch.full((2, 1, 1), 9.5)
    launch_lay_out_scalars(torch.tensor([7.0, 9.0]), torch.tensor([[[0]], [[1]]], dtype=torch.int32), scalars, None)
    assert scalars.flatten().tolist() == [7.0, 9.0]
    table = table_of([scalars, torch.zeros(2, 1, 1)])
    assert launch_fetch_scalars(table, torch.tensor([[0]], dtype=torch.int32), 1, 1).tolist() == [[9.0]]
    assert launch_fetch_scalars(table, torch.tensor([[-1]], dtype=torch.int32), 1, 1).tolist() == [[0.0]]
    launch_lay_out_scalars(torch.tensor([7.0]), torch.tensor([[[-2]], [[-1]]], dtype=torch.int32), scalars, None)
    assert scalars.flatten().tolist() == [0.0, 9.0]


def test_rows_beyond_the_reach_of_32_bits():
    """More elements than int32 can count; the memory is only touched where rows are."""
    last, hidden_dim, dtype = 299_999, 8192, torch.bfloat16
    wide = torch.empty(last + 1, hidden_dim, dtype=dtype)
    shelves = on_shelf([torch.ones(1, hidden_dim, dtype=dtype), torch.full((1, hidden_dim), 2, dtype=dtype)], 1)
    row_of_slot = torch.tensor([[[0]], [[last]]], dtype=torch.int32)
    launch_pull_rows(table_of(shelves), row_of_slot, 0, wide)
    assert (wide[0] == 1).all() and (wide[last] == 2).all()
    partials = torch.zeros(2, 1, hidden_dim, dtype=dtype)
    launch_pre_add(wide, row_of_slot, None, range(1), partials, 0, NOWHERE, None)
    assert (partials[0] == 1).all() and (partials[1] == 2).all()
    out, home = torch.empty(1, hidden_dim, dtype=dtype), torch.tensor([[0]], dtype=torch.int32)
    launch_add_ranks(table_of([wide]), home, 1, last, out)  # the second rank's first token of 2 x `last`
    assert (out == 2).all()
    out.zero_()
    launch_add_slot(table_of([wide]), home, None, 0, 1, last, out.float(), out)
    assert (out == 2).all()
    launch_zero_padding(torch.tensor([[last], [last + 1]]), 2, wide)
    assert (wide[last] == 0).all() and (wide[0] == 1).all()
