"""The kernels that move rows and scalars through shared memory give the bits of the plain movements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

from crossdock.kernels.blocks import Tile
from crossdock.kernels.combine import Routes as Ways
from crossdock.kernels.combine import launch_combine, launch_combine_slot
from crossdock.kernels.move import Moves, launch_move_rows
from crossdock.kernels.push import Staging
from crossdock.kernels.scalars import Scalars, Slips, launch_swap_scalars
from crossdock.kernels.signal import CHUNKS, NUM_CHUNKS, READ, ROUND, STAGING, Board
from crossdock.rows import reduce_rows
from crossdock.testing import assert_bit_equal
from tests.kernels.symmetric_ranks import CALL, boards, homes, random_ids, table_of, together, word_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MAX_TOKENS, CHUNK_LEN = 20, 16
SHAPES = [((7, 0, 20), 3, 40), ((1, 2), 1, 8), ((0, 0), 2, 16), ((5,), 8, 1032)]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
all_shapes = pytest.mark.parametrize(("num_tokens", "top_k", "hidden_dim"), SHAPES)


def tile_of(hidden_dim: int, programs: int = 1) -> Tile:
    cols = 16 if hidden_dim < 256 else 512
    return Tile(4, cols, programs, -(-hidden_dim // cols))


class Routes(NamedTuple):
    """Where every slot goes, from both ends, rows of a rank in any order.

    Attributes:
        homes: by source rank, `[T, K]` int32.
        row_of_slot: by rank of the expert, `[ep_size, S, K]` int32; -2 for some that are dropped.
        num_rows: by rank of the expert.
    """

    homes: list[torch.Tensor]
    row_of_slot: list[torch.Tensor]
    num_rows: list[int]

    @classmethod
    def of(cls, num_tokens: Sequence[int], top_k: int, seed: int = 0, bound: int | None = None) -> Routes:
        generator, ep_size = torch.Generator().manual_seed(seed), len(num_tokens)
        home = [homes(ids, 2) for ids in random_ids(generator, num_tokens, top_k, 2 * ep_size)]
        places, counts = [], []
        for rank in range(ep_size):
            row_of_slot = torch.full((ep_size, max(num_tokens) if bound is None else bound, top_k), -1).int()
            for source, part in enumerate(home):
                row_of_slot[source, : len(part)][part == rank] = -2
            kept = (row_of_slot == -2) & (torch.rand(row_of_slot.shape, generator=generator) < 0.8)
            counts.append(int(kept.sum()))
            row_of_slot[kept] = torch.randperm(counts[-1], generator=generator).to(torch.int32)
            places.append(row_of_slot)
        return cls(home, places, counts)


# -- moving out -------------------------------------------------------------------------------------------------------


def _moved(routes: Routes, x: list[torch.Tensor], tile: Tile) -> tuple[list[Board], list[torch.Tensor], list[int]]:
    """Rows `x` of all ranks, moved along the routes, not a number where nothing goes; and how many were sent."""
    ranks, ep_size, hidden_dim = boards(len(x)), len(x), x[0].shape[1]
    stagings = [part.new_full((ep_size, MAX_TOKENS, hidden_dim), 9) for part in x]
    sent = [torch.tensor([30]) for _ in x]

    def act(board: Board) -> torch.Tensor:
        rank = board.rank
        staging = Staging(stagings[rank], table_of(stagings), CHUNK_LEN)
        moves = Moves(x[rank], routes.homes[rank], staging, tile, tile, padded=False)
        out = x[rank].new_full((routes.num_rows[rank], hidden_dim), float("nan"))
        where = (routes.row_of_slot[rank], torch.zeros(2, 1, dtype=torch.int64))
        launch_move_rows(board, CALL, moves, *where, out, torch.tensor([7]), sent[rank])
        return out

    return ranks, together(ranks, act), [int(number) for number in sent]


@all_dtypes
@pytest.mark.parametrize("strided", [False, True])
@all_shapes
def test_moving(num_tokens, top_k, hidden_dim, strided, dtype):
    routes = Routes.of(num_tokens, top_k)
    generator = torch.Generator().manual_seed(2)
    x = [torch.randn(tokens, 2 * hidden_dim, generator=generator).to(dtype) for tokens in num_tokens]
    x = [part[:, hidden_dim:] if strided else part[:, :hidden_dim].contiguous() for part in x]
    ranks, moved, sent = _moved(routes, x, tile_of(hidden_dim))
    for board, out in zip(ranks, moved, strict=True):
        expected = torch.full_like(out, float("nan"))
        row_of_slot = routes.row_of_slot[board.rank]
        for source, token, slot in (row_of_slot >= 0).nonzero().tolist():
            expected[row_of_slot[source, token, slot]] = x[source][token]
        assert_bit_equal(out, expected, "rows")
        assert board.signals[READ].tolist() == [1 << 31] * len(ranks)  # all have read
        assert board.state.tolist()[: STAGING + 1] == [1, 1] and not board.state[16:].any()
    assert sent == [37] * len(ranks)


def test_worked_examples_of_moving():
    """Of `spread.py`, and of `push.py`: what is in the staging buffer of which rank."""
    homes_of = [torch.tensor(slots, dtype=torch.int32) for slots in ([[0], [1]], [[0], [0]])]
    places = [
        torch.tensor(slots, dtype=torch.int32) for slots in ([[[0], [-1]], [[2], [1]]], [[[-1], [0]], [[-1], [-1]]])
    ]
    x = [torch.tensor([[1.0], [4.0]]).repeat(1, 8), torch.tensor([[2.0], [3.0]]).repeat(1, 8)]
    _, (first, second), _ = _moved(Routes(homes_of, places, [3, 1]), x, tile_of(8))
    assert first[:, 0].tolist() == [1.0, 3.0, 2.0] and second[:, 0].tolist() == [4.0]

    homes_of = [torch.full((2, 2), -1), torch.tensor([[0, 2], [1, 0]]), torch.full((2, 2), -1)]
    nothing = [torch.full((3, 2, 2), -1, dtype=torch.int32)] * 3
    ranks, stagings = boards(3), [torch.zeros(3, 2, 8) for _ in range(3)]
    x = [torch.tensor([[1.0], [2.0]]).repeat(1, 8) for _ in ranks]

    def act(board: Board) -> None:
        staging = Staging(stagings[board.rank], table_of(stagings), CHUNK_LEN)
        moves = Moves(x[board.rank], homes_of[board.rank].int(), staging, tile_of(8), tile_of(8), padded=False)
        count = torch.zeros(1, dtype=torch.int64)
        launch_move_rows(board, CALL, moves, nothing[0], count.new_zeros(2, 1), x[0].new_empty(0, 8), count, count)

    together(ranks, act)
    assert [staging[:, :, 0].tolist() for staging in stagings] == [
        [[0, 0], [1, 2], [0, 0]], [[0, 0], [0, 0], [0, 0]], [[0, 0], [1, 0], [0, 0]],
    ]  # fmt: skip


def test_padding_becomes_zero_when_rows_are_moved():
    (board,), out, count = boards(1), torch.full((4, 8), 7.0), torch.zeros(1, dtype=torch.int64)
    x, home = torch.tensor([[1.0], [2.0]]).repeat(1, 8), torch.zeros(2, 1, dtype=torch.int32)
    row_of_slot = torch.tensor([[[1], [0]]], dtype=torch.int32)
    moves = Moves(x, home, Staging(torch.zeros(1, 2, 8), count, CHUNK_LEN), tile_of(8), tile_of(8), padded=True)
    launch_move_rows(board, CALL, moves, row_of_slot, torch.tensor([[2, 4], [4, 4]]), out, count, count)
    assert out[:, 0].tolist() == [2.0, 1.0, 0.0, 0.0]


# -- combining --------------------------------------------------------------------------------------------------------


class Weighed(NamedTuple):
    """Rows at their experts, with weights by row and, at their tokens' rank, by slot."""

    rows: list[torch.Tensor]
    of_rows: list[torch.Tensor]
    of_slots: list[torch.Tensor]

    @classmethod
    def of(cls, routes: Routes, hidden_dim: int, dtype: torch.dtype) -> Weighed:
        generator = torch.Generator().manual_seed(9)
        rows = [torch.randn(num, hidden_dim, generator=generator).to(dtype) for num in routes.num_rows]
        of_slots = [torch.rand(home.shape, generator=generator) for home in routes.homes]
        of_rows = [torch.zeros(num) for num in routes.num_rows]
        for weights, row_of_slot in zip(of_rows, routes.row_of_slot, strict=True):
            for source, token, slot in (row_of_slot >= 0).nonzero().tolist():
                weights[row_of_slot[source, token, slot]] = of_slots[source][token, slot]
        return cls(rows, of_rows, of_slots)


def _expected_fast(routes: Routes, rows: list[torch.Tensor], weights: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Each rank's share by `reduce_rows`, rounded, and those added up by it."""
    sums = []
    for target, home in enumerate(routes.homes):
        shares = []
        for rank in range(len(rows)):
            index = routes.row_of_slot[rank][target, : len(home)].long().clamp(min=-1)
            shares.append(reduce_rows(rows[rank], index, None if weights is None else weights[rank]))
        token = torch.arange(len(home)).unsqueeze(1)
        has = torch.stack([(home == rank).any(1) for rank in range(len(rows))], dim=1)
        index = torch.where(has, torch.arange(len(rows)) * len(home) + token, -1)
        sums.append(reduce_rows(torch.cat(shares), index, None))
    return sums


def _expected_exact(routes: Routes, rows: list[torch.Tensor], weights: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """All slots at once by `reduce_rows`, over the rows of all ranks."""
    first = [sum(routes.num_rows[:rank]) for rank in range(len(rows))]
    sums = []
    for target, home in enumerate(routes.homes):
        index = torch.full(home.shape, -1)
        for rank, row_of_slot in enumerate(routes.row_of_slot):
            row = row_of_slot[target, : len(home)].long()
            index = torch.where(row >= 0, row + first[rank], index)
        sums.append(reduce_rows(torch.cat(rows), index, None if weights is None else weights[target]))
    return sums


class _Shared:
    """Staging of all ranks, which is never right where nobody has pushed anything."""

    def __init__(self, routes: Routes, rows: list[torch.Tensor], max_tokens: int = MAX_TOKENS) -> None:
        ep_size, hidden_dim = len(rows), rows[0].shape[1]
        self.stagings = [part.new_full((ep_size, max_tokens, hidden_dim), 9) for part in rows]
        self.sent = [torch.zeros(1, dtype=torch.int64) for _ in rows]
        self._routes, self._table = routes, table_of(self.stagings)

    def of(self, board: Board) -> tuple[Staging, Ways]:
        routes, rank = self._routes, board.rank
        staging = Staging(self.stagings[rank], self._table, CHUNK_LEN)
        return staging, Ways(routes.row_of_slot[rank], routes.homes[rank], self.sent[rank])


def combined_fast(
    ranks: list[Board], shared: _Shared, rows: list[torch.Tensor], weights: list[torch.Tensor] | None, tile: Tile
) -> list[torch.Tensor]:
    def act(board: Board) -> torch.Tensor:
        (staging, ways), own = shared.of(board), rows[board.rank]
        out = own.new_full((len(ways.home_of_slot), own.shape[1]), 5)
        by_row = None if weights is None else weights[board.rank]
        launch_combine(board, CALL, staging, ways, own, by_row, out, tile, tile)
        return out

    return together(ranks, act)


def combined_exact(
    ranks: list[Board], shared: _Shared, rows: list[torch.Tensor], weights: list[torch.Tensor] | None, tile: Tile
) -> list[torch.Tensor]:
    def act(board: Board) -> torch.Tensor:
        (staging, ways), own = shared.of(board), rows[board.rank]
        out = own.new_full((len(ways.home_of_slot), own.shape[1]), 5)
        sums, by_slot = torch.full(out.shape, 6.0), None if weights is None else weights[board.rank]
        for slot in range(ways.home_of_slot.shape[1]):
            launch_combine_slot(board, CALL, staging, ways, own, by_slot, slot, sums, out, tile, tile)
        return out

    return together(ranks, act)


@pytest.mark.parametrize(
    ("dtype", "weighted"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.float16, True, marks=pytest.mark.full),
        pytest.param(torch.float32, True, marks=pytest.mark.full),
    ],
    ids=str,
)
@all_shapes
def test_combining(num_tokens, top_k, hidden_dim, weighted, dtype):
    routes, ep_size = Routes.of(num_tokens, top_k), len(num_tokens)
    weighed = Weighed.of(routes, hidden_dim, dtype)
    for combine, expect, weights, num_rounds in (
        (combined_fast, _expected_fast, weighed.of_rows, 1),
        (combined_exact, _expected_exact, weighed.of_slots, top_k),
    ):
        ranks, shared, used = boards(ep_size), _Shared(routes, weighed.rows), weights if weighted else None
        actual = combine(ranks, shared, weighed.rows, used, tile_of(hidden_dim, 4))
        for out, expected in zip(actual, expect(routes, weighed.rows, used), strict=True):
            assert_bit_equal(out, expected, combine.__name__)
        for board in ranks:
            assert (int(board.state[ROUND]), int(board.state[STAGING])) == (num_rounds, num_rounds)
            assert board.signals[READ].tolist() == [num_rounds << 31] * ep_size
        # A share that is pushed is one for each token of another rank that a slot (of this round) has led here.
        for rank, sent in enumerate(shared.sent):
            away = [routes.row_of_slot[rank][other] != -1 for other in range(ep_size) if other != rank]
            by_round = (lambda here: here.any(1)) if combine is combined_fast else (lambda here: here)
            assert int(sent) == sum(int(by_round(here).sum()) for here in away)


@settings(max_examples=settings().max_examples // 3)  # each launches dozens of kernels, all interpreted
@given(
    ep_size=st.integers(1, 4), top_k=st.sampled_from([1, 2, 5]), num_tokens=st.sampled_from([0, 1, 20]),
    dtype=st.sampled_from(DTYPES), weighted=st.booleans(), fast=st.booleans(), seed=st.integers(0, 2**16),
    data=st.data(),
)  # fmt: skip
def test_combining_as_drawn(ep_size, top_k, num_tokens, dtype, weighted, fast, seed, data):
    tokens = data.draw(st.permutations([num_tokens, 3, 0, 11]))[:ep_size]
    routes = Routes.of(tokens, top_k, seed, bound=MAX_TOKENS)
    weighed = Weighed.of(routes, 24, dtype)
    combine, expect = (combined_fast, _expected_fast) if fast else (combined_exact, _expected_exact)
    weights = (weighed.of_rows if fast else weighed.of_slots) if weighted else None
    actual = combine(boards(ep_size), _Shared(routes, weighed.rows), weighed.rows, weights, tile_of(24))
    for out, expected in zip(actual, expect(routes, weighed.rows, weights), strict=True):
        assert_bit_equal(out, expected, combine.__name__)


def test_worked_example_of_giving():
    rows, by_row = torch.tensor([[1.0], [2.0]]).repeat(1, 8), torch.tensor([10.0, 100.0])
    here = torch.zeros(1, 2, dtype=torch.int32)
    routes = Routes([here], [torch.tensor([[[1, 0]]], dtype=torch.int32)], [2])
    for combine, weights, laid_out, result in (
        (combined_fast, None, 3.0, 3.0),
        (combined_fast, [by_row], 210.0, 210.0),
        (combined_exact, None, 1.0, 3.0),  # what slot 1 alone has given last
        (combined_exact, [torch.tensor([[100.0, 10.0]])], 1.0, 210.0),
    ):
        shared = _Shared(routes, [rows], 1)
        (out,) = combine(boards(1), shared, [rows], weights, tile_of(8))
        assert shared.stagings[0][0, 0].tolist() == [laid_out] * 8 and out.tolist() == [[result] * 8]


def test_worked_example_of_giving_what_was_dropped():
    dropped = torch.tensor([[[-2, -1], [-1, -1]]], dtype=torch.int32)
    home = torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32)
    routes, rows = Routes([home], [dropped], [0]), [torch.ones(0, 8)]
    for combine in (combined_fast, combined_exact):
        shared = _Shared(routes, rows, 2)
        (out,) = combine(boards(1), shared, rows, None, tile_of(8))
        assert shared.stagings[0][0, :, 0].tolist() == [0.0, 9.0] and out[:, 0].tolist() == [0.0, 0.0]


def test_worked_example_of_adding_at_home():
    """Two ranks of one token on rank 0, of whose slots rank 1 has the first and rank 0 the third."""
    home, nothing = torch.tensor([[1, -1, 0]], dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)
    places = [
        torch.tensor(slots, dtype=torch.int32) for slots in ([[[-1, -1, 0]], [[-1] * 3]], [[[0, -1, -1]], [[-1] * 3]])
    ]
    routes, rows = Routes([home, nothing], places, [1, 1]), [torch.full((1, 8), 2.0), torch.full((1, 8), 3.0)]
    out, empty = combined_fast(boards(2), _Shared(routes, rows, 1), rows, None, tile_of(8))
    assert out.tolist() == [[5.0] * 8] and empty.shape == (0, 8)
    weights = [torch.tensor([[10.0, 0.0, 100.0]]), torch.zeros(0, 3)]
    out, empty = combined_exact(boards(2), _Shared(routes, rows, 1), rows, weights, tile_of(8))
    assert out.tolist() == [[230.0] * 8]


# -- scalars ----------------------------------------------------------------------------------------------------------


def _new_slips(routes: Routes, max_tokens: int) -> list[Slips]:
    """Slips of all ranks, which are never right where nobody has pushed anything."""
    ep_size, top_k = len(routes.homes), routes.homes[0].shape[1]
    own = [torch.full((ep_size, max_tokens, top_k), 9.5) for _ in range(ep_size)]
    return [Slips(slips, table_of(own)) for slips in own]


def _values(routes: Routes) -> list[torch.Tensor]:
    return [torch.randn(num, generator=torch.Generator().manual_seed(num)) for num in routes.num_rows]


def _expected_scalars(routes: Routes, values: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for target, home in enumerate(routes.homes):
        scalars = torch.zeros(home.shape)
        for row_of_slot, value in zip(routes.row_of_slot, values, strict=True):
            row = row_of_slot[target, : len(home)].long()
            scalars = torch.where(row >= 0, torch.cat([value, torch.zeros(1)])[row.clamp(min=-1)], scalars)
        found.append(scalars)
    return found


def _swapped(routes: Routes, values: list[torch.Tensor], slips: list[Slips]) -> tuple[list[Board], list[torch.Tensor]]:
    ranks = boards(len(values))

    def act(board: Board) -> torch.Tensor:
        rank = board.rank
        there, here = routes.row_of_slot[rank], routes.homes[rank]
        return launch_swap_scalars(board, CALL, slips[rank], values[rank], there, here, 64)

    return ranks, together(ranks, act)


@all_shapes
def test_scalars(num_tokens, top_k, hidden_dim):
    routes = Routes.of(num_tokens, top_k, seed=3)
    values = _values(routes)
    ranks, taken = _swapped(routes, values, _new_slips(routes, MAX_TOKENS))
    for actual, expected in zip(taken, _expected_scalars(routes, values), strict=True):
        assert_bit_equal(actual, expected, "scalars")
    for board in ranks:
        assert (int(board.state[ROUND]), int(board.state[STAGING])) == (1, 1)
        assert board.signals[READ].tolist() == [1 << 31] * len(ranks)


def test_worked_example_of_scalars():
    row_of_slot = [torch.tensor([[[0]], [[1]]], dtype=torch.int32), torch.full((2, 1, 1), -1, dtype=torch.int32)]
    here = torch.tensor([[0]], dtype=torch.int32)
    for home, expected in ((here, 9.0), (torch.full_like(here, -1), 0.0)):
        routes = Routes([here, home], row_of_slot, [2, 0])
        slips = _new_slips(routes, 1)
        _, (own, taken) = _swapped(routes, [torch.tensor([7.0, 9.0]), torch.zeros(0)], slips)
        assert [each.own.flatten().tolist() for each in slips] == [[7.0, 9.5], [9.0, 9.5]]  # rank 1 pushes nothing
        assert own.tolist() == [[7.0]] and taken.tolist() == [[expected]]
    dropped = [torch.tensor([[[0]], [[-2]]], dtype=torch.int32), row_of_slot[1]]
    routes = Routes([here, here], dropped, [1, 0])
    _, (own, taken) = _swapped(routes, [torch.tensor([7.0]), torch.zeros(0)], _new_slips(routes, 1))
    assert own.tolist() == [[7.0]] and taken.tolist() == [[0.0]]


# -- scalars that ride with rows --------------------------------------------------------------------------------------


def _combined_with_scalars(
    ranks: list[Board], shared: _Shared, rows: list[torch.Tensor], values: list[torch.Tensor], slips: list[Slips]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def act(board: Board) -> tuple[torch.Tensor, torch.Tensor]:
        (staging, ways), own = shared.of(board), rows[board.rank]
        tile, out = tile_of(own.shape[1], 4), own.new_full((len(ways.home_of_slot), own.shape[1]), 5)
        scalars = Scalars(values[board.rank], torch.full(ways.home_of_slot.shape, 6.0), slips[board.rank])
        launch_combine(board, CALL, staging, ways, own, None, out, tile, tile, scalars)
        return out, scalars.out

    return together(ranks, act)


@all_shapes
def test_combining_with_scalars(num_tokens, top_k, hidden_dim):
    routes, ep_size = Routes.of(num_tokens, top_k, seed=3), len(num_tokens)
    rows, values = Weighed.of(routes, hidden_dim, torch.bfloat16).rows, _values(routes)
    ranks, slips, shared = boards(ep_size), _new_slips(routes, MAX_TOKENS), _Shared(routes, rows)
    both = _combined_with_scalars(ranks, shared, rows, values, slips)
    for (out, _), expected in zip(both, _expected_fast(routes, rows, None), strict=True):
        assert_bit_equal(out, expected, "rows")
    for (_, scalars), expected in zip(both, _expected_scalars(routes, values), strict=True):
        assert_bit_equal(scalars, expected, "scalars")
    for board in ranks:
        assert (int(board.state[ROUND]), int(board.state[STAGING])) == (1, 1)
        assert board.signals[READ].tolist() == [1 << 31] * ep_size


def test_worked_example_of_scalars_that_ride_with_rows():
    """Two ranks of one token on rank 0, of whose slots rank 1 has the first and rank 0 the third."""
    home, nothing = torch.tensor([[1, -1, 0]], dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)
    for slot, scalar in ((0, 8.0), (-2, 0.0)):
        places = [
            torch.tensor(slots, dtype=torch.int32)
            for slots in ([[[-1, -1, 0]], [[-1] * 3]], [[[slot, -1, -1]], [[-1] * 3]])
        ]
        routes, rows = Routes([home, nothing], places, [1, 1]), [torch.full((1, 8), 2.0), torch.full((1, 8), 3.0)]
        slips, values = _new_slips(routes, 1), [torch.tensor([7.0]), torch.tensor([8.0])]
        (out, scalars), (_, empty) = _combined_with_scalars(boards(2), _Shared(routes, rows, 1), rows, values, slips)
        assert slips[0].own[:, 0].tolist() == [[9.5, 9.5, 7.0], [scalar, 9.5, 9.5]]  # by the rank that has pushed
        assert (slips[1].own == 9.5).all() and empty.shape == (0, 3)
        assert out.tolist() == [[5.0 if scalar else 2.0] * 8] and scalars.tolist() == [[scalar, 0.0, 7.0]]


# -- far away ---------------------------------------------------------------------------------------------------------


def test_rows_beyond_the_reach_of_32_bits():
    """More elements than int32 can count; the memory is only touched where rows are."""
    last, hidden_dim, dtype = 299_999, 8192, torch.bfloat16
    wide = torch.empty(last + 1, hidden_dim, dtype=dtype)
    tile, count = Tile(4, 8192, 1), torch.zeros(1, dtype=torch.int64)
    # What rank 1 has pushed for token 0 lies in the near, and goes far behind in `wide`.
    (board, _), padding = boards(2), torch.tensor([[last - 1], [last]])
    board.signals[CHUNKS + NUM_CHUNKS :] = word_of(1)  # the other's part is not played
    near = torch.full((2, 1, hidden_dim), 2, dtype=dtype)
    x, home = torch.ones(1, hidden_dim, dtype=dtype), torch.zeros(1, 1, dtype=torch.int32)
    row_of_slot = torch.tensor([[[0]], [[last]]], dtype=torch.int32)
    wide[last - 1] = 5
    moves = Moves(x, home, Staging(near, table_of([near, near]), CHUNK_LEN), tile, tile, padded=True)
    launch_move_rows(board, CALL, moves, row_of_slot, padding, wide, count, count)
    assert (wide[0] == 1).all() and (wide[last] == 2).all() and (wide[last - 1] == 0).all()

    for exact in (False, True):
        # Rows lie far behind in `rows`, and are pushed far behind; and what has come lies far behind.
        (first, second), out = boards(2), torch.zeros(1, hidden_dim, dtype=dtype)
        for board in (first, second):
            board.signals[CHUNKS + NUM_CHUNKS :] = word_of(1)
        gives = Ways(torch.tensor([[[-1]], [[last]]], dtype=torch.int32), home, count)
        takes = Ways(torch.full((2, 1, 1), -1, dtype=torch.int32), torch.ones_like(home), count)
        far = wide.view(2, -1, hidden_dim)  # part 1 begins in the middle; a rank of which no other buffer is used
        far[1, 0] = 3
        near = torch.zeros(1, 1, hidden_dim, dtype=dtype)
        for board, ways, own, table in ((first, gives, near, [near, near]), (second, takes, far, [far, far])):
            staging = Staging(own, table_of(table), CHUNK_LEN)
            if exact:
                launch_combine_slot(board, CALL, staging, ways, wide, None, 0, out.float(), out, tile, tile)
            else:
                launch_combine(board, CALL, staging, ways, wide, None, out, tile, tile)
        assert (near == 2).all() and (out == 3).all()
