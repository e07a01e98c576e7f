"""Gradients that are weighed on their way get the bits of those that are moved first and scaled afterwards."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

from crossdock.kernels.blocks import Tile
from crossdock.kernels.launch import launch
from crossdock.kernels.move import Moves, launch_move_rows
from crossdock.kernels.push import Staging
from crossdock.kernels.signal import READ, STAGING, Board, varying
from crossdock.kernels.weigh import Weighed, find_sources_kernel, launch_weigh_rows
from crossdock.rows import score_gradient
from crossdock.testing import assert_bit_equal
from tests.kernels.symmetric_ranks import CALL, boards, table_of, together
from tests.kernels.test_symmetric_rows import CHUNK_LEN, MAX_TOKENS, Routes, all_dtypes, all_shapes, tile_of

TAIL = 3  # rows behind the last group's end


class _Case(NamedTuple):
    """One rank's part: rows of one group without padding, and a tail."""

    grads: torch.Tensor
    rows: torch.Tensor
    scores: torch.Tensor


def _cases(routes: Routes, hidden_dim: int, dtype: torch.dtype, *, strided: bool) -> list[_Case]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for home, num_rows in zip(routes.homes, routes.num_rows, strict=True):
        grads = torch.randn(len(home), 2 * hidden_dim, generator=generator).to(dtype)
        grads = grads[:, hidden_dim:] if strided else grads[:, :hidden_dim].contiguous()
        rows = torch.randn(num_rows + TAIL, hidden_dim, generator=generator).to(dtype)
        scores = torch.rand(num_rows + TAIL, generator=generator)
        rows[num_rows:], scores[num_rows:] = float("nan"), float("nan")
        found.append(_Case(grads, rows, scores))
    return found


def _staging_of(cases: list[_Case], fill: float) -> list[torch.Tensor]:
    return [case.rows.new_full((len(cases), MAX_TOKENS, case.rows.shape[1]), fill) for case in cases]


def _weigh(
    ranks: list[Board], routes: Routes, cases: list[_Case], tile: Tile
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    stagings = _staging_of(cases, 9)

    def act(board: Board) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        case, rank, hidden_dim = cases[board.rank], board.rank, cases[board.rank].rows.shape[1]
        moves = Moves(
            case.grads, routes.homes[rank], Staging(stagings[rank], table_of(stagings), CHUNK_LEN), tile_of(hidden_dim),
            tile, padded=False,
        )  # fmt: skip
        out = torch.full_like(case.rows, float("nan"))
        parts = case.scores.new_full((-(-hidden_dim // tile.cols), len(out)), float("nan"))
        sent, end = torch.tensor([30]), routes.num_rows[rank]
        dots = launch_weigh_rows(
            board, CALL, moves, Weighed(case.rows, case.scores, out, parts), tile, routes.row_of_slot[rank],
            torch.full((2, 1), end), torch.tensor([7]), sent,
        )  # fmt: skip
        return out, dots, sent

    return together(ranks, act)


def _move(routes: Routes, cases: list[_Case]) -> list[torch.Tensor]:
    stagings = _staging_of(cases, 9)

    def act(board: Board) -> torch.Tensor:
        case, rank, count = cases[board.rank], board.rank, torch.zeros(1, dtype=torch.int64)
        staging, tile = Staging(stagings[rank], table_of(stagings), CHUNK_LEN), tile_of(case.rows.shape[1])
        out = torch.full_like(case.rows, float("nan"))
        moves = Moves(case.grads, routes.homes[rank], staging, tile, tile, padded=False)
        launch_move_rows(board, CALL, moves, routes.row_of_slot[rank], torch.zeros(2, 1).long(), out, count, count)
        return out

    return together(boards(len(cases)), act)


@all_dtypes
@pytest.mark.parametrize("strided", [False, True])
@all_shapes
def test_weighing(num_tokens, top_k, hidden_dim, strided, dtype):
    routes = Routes.of(num_tokens, top_k)
    cases = _cases(routes, hidden_dim, dtype, strided=strided)
    ranks = boards(len(cases))
    weighed = _weigh(ranks, routes, cases, tile_of(hidden_dim))
    for board, case, grads, (out, dots, sent) in zip(ranks, cases, _move(routes, cases), weighed, strict=True):
        end = routes.num_rows[board.rank]
        expected_dots = score_gradient(case.rows[:end], grads[:end], case.scores[:end])  # scales `grads` in place
        assert_bit_equal(out[:end], grads[:end], "gradient rows")
        torch.testing.assert_close(dots[:end], expected_dots, rtol=1e-5, atol=1e-5 * hidden_dim**0.5)
        assert out[end:].isnan().all() and dots[end:].isnan().all()  # nobody has been there
        assert board.signals[READ].tolist() == [1 << 31] * len(ranks) and sent.tolist() == [37]
        assert board.state.tolist()[: STAGING + 1] == [1, 1] and not board.state[16:].any()


def test_a_dot_does_not_depend_on_other_rows():
    """Not on how many there are, nor on where its own row stands."""
    routes = Routes.of((5, 9), 3)
    (first, second) = _cases(routes, 1032, torch.float32, strided=False)
    tile, empty = Tile(4, 512, 1, 3), torch.zeros(0, 1, dtype=torch.int32)
    (_, many, _), _ = _weigh(boards(2), routes, [first, second], tile)
    for source, token, slot in (routes.row_of_slot[0] >= 0).nonzero().tolist():
        row = int(routes.row_of_slot[0][source, token, slot])
        grad = (first, second)[source].grads[token : token + 1]
        alone = Routes([torch.zeros(1, 1).int(), empty], [torch.tensor([[[0]], [[-1]]]).int(), empty], [1, 0])
        tail = (torch.zeros(TAIL, 1032), torch.zeros(TAIL))
        part = _Case(
            grad, torch.cat([first.rows[row : row + 1], tail[0]]), torch.cat([first.scores[row : row + 1], tail[1]])
        )
        (_, (dot, *_), _), _ = _weigh(
            boards(2), alone._replace(row_of_slot=[alone.row_of_slot[0], torch.full((2, 1, 1), -1).int()]),
            [part, _Case(grad[:0], *tail)], tile,
        )  # fmt: skip
        assert dot == many[row]


def test_worked_example():
    """Of `weigh.py`, and the padding that it speaks of."""
    home = [torch.tensor([[0]]).int()] * 2
    places = [torch.tensor([[[0]], [[1]]]).int(), torch.full((2, 1, 1), -1).int()]
    grad, rows = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]] * 2 + [[float("nan")] * 2] * TAIL)
    scores = torch.tensor([0.5] * 2 + [0.0] * TAIL)
    cases = [_Case(grad, rows, scores), _Case(grad, rows[2:], scores[2:])]
    stagings = [torch.zeros(2, 2, 2) for _ in cases]
    parts = [torch.full((2, 5), float("nan")), torch.full((2, 3), float("nan"))]
    paddings = [torch.tensor([[2], [4]]), torch.zeros(2, 1).long()]

    def act(board: Board) -> tuple[torch.Tensor, torch.Tensor]:
        case, rank, tile = cases[board.rank], board.rank, Tile(4, 1, 1, 2)
        moves = Moves(case.grads, home[rank], Staging(stagings[rank], table_of(stagings), CHUNK_LEN), tile, tile, True)
        out, count = torch.full_like(case.rows, float("nan")), torch.zeros(1, dtype=torch.int64)
        weighed = Weighed(case.rows, case.scores, out, parts[rank])
        return out, launch_weigh_rows(board, CALL, moves, weighed, tile, places[rank], paddings[rank], count, count)

    first, _ = ranks = boards(2)
    (out, dots), _ = together(ranks, act)
    assert out[:4].tolist() == [[1.5, 2.0], [1.5, 2.0], [0.0, 0.0], [0.0, 0.0]] and out[4].isnan().all()
    assert parts[0][:, :2].tolist() == [[3.0, 3.0], [8.0, 8.0]] and dots[:2].tolist() == [11.0, 11.0]

    source_of_row, (num_ranks, num_tokens, _) = torch.full((5,), 9, dtype=torch.int32), stagings[0].shape
    launch(
        find_sources_kernel, (1,), first.device, places[0], paddings[0], source_of_row, varying(1), num_tokens,
        NUM_LOCAL=1, TOP_K=1, EP_SIZE=num_ranks, BLOCK=8, PADDING_BLOCK=8,
    )  # fmt: skip
    assert source_of_row.tolist() == [0, 2, -1, -1, 9]
