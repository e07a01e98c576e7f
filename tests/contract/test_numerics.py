"""What is added, in which order, with which rounding: repeatable, the same everywhere, within the stated bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from crossdock import reference
from crossdock.testing import Problem, Seat, assert_bit_equal
from crossdock.testing.oracle import expected
from crossdock.testing.solving import solve
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, problem, random_ids


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def repeated(seat: Seat, trial: Problem, repeats: int) -> None:
    with seat.open(trial.config) as dispatcher:
        first = solve(dispatcher, trial, seat.rank, seat.device)
        for _ in range(repeats):
            again = solve(dispatcher, trial, seat.rank, seat.device)
            for name in ("rows", "out", "grad_x", "grad_scores", "grad_rows"):
                assert_bit_equal(getattr(again, name), getattr(first, name), name)


def repeated_deterministically(seat: Seat, trial: Problem, repeats: int) -> None:
    with deterministic(True):
        repeated(seat, trial, repeats)


@pytest.mark.parametrize("repeats", [5, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize(("backend", "ep_size"), [("local", 1), ("all_to_all", 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("run", [repeated, repeated_deterministically])
def test_every_run_has_the_same_bits(
    on: On, backend: str, ep_size: int, dtype: torch.dtype, run: Callable[..., None], repeats: int
):
    config = make_config(16, 8, 256, dtype=dtype, num_max_tokens_per_rank=512)
    on(backend, ep_size)(run, problem(config, random_ids((512,) * ep_size, 8, 16)), repeats)


def solved(seat: Seat, trial: Problem) -> dict[str, Tensor]:
    with seat.open(trial.config) as dispatcher:
        outcome = solve(dispatcher, trial, seat.rank, seat.device)
    return {name: getattr(outcome, name) for name in ("out", "grad_x", "grad_scores")}


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize(
    ("backend", "ep_size", "num_tokens", "hidden_dim"),
    [("all_to_all", 2, 257, 512), ("all_to_all", 4, 257, 512), ("symmetric", 2, 33, 64)],
)
def test_backends_agree_to_the_bit(
    on: On, backend: str, ep_size: int, num_tokens: int, hidden_dim: int, reduction: str
):
    config = make_config(32, 8, hidden_dim, dtype=torch.bfloat16, num_max_tokens_per_rank=257, reduction=reduction)
    ids = random_ids((num_tokens,) * ep_size, 8, 32)
    for part in ids:
        part[torch.rand(part.shape, generator=torch.Generator().manual_seed(3)) < 0.05] = -1
    trial = problem(config, ids)
    found, wanted = (on(name, ep_size)(solved, trial) for name in (backend, "loopback"))
    for mine, theirs in zip(found, wanted, strict=True):
        assert_agree(mine, theirs, backend)
    if reduction == "exact":
        (whole,) = on("local", 1)(solved, trial.concatenated())
        assert_agree({name: torch.cat([part[name] for part in found]) for name in whole}, whole, backend)


def assert_agree(mine: dict[str, Tensor], theirs: dict[str, Tensor], backend: str) -> None:
    """To the bit, but for dots, which `symmetric` adds up in an order of its own."""
    for name, tensor in mine.items():
        if (name, backend) == ("grad_scores", "symmetric"):
            largest = float(theirs[name].abs().max())
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6 * largest)
        else:
            assert_bit_equal(tensor, theirs[name], name)


def linear_in_float64(trial: Problem, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, its size of terms, dx and score gradients for experts `f_e(v) = (e + 1) v`, by the formula."""
    x, grad = trial.x[rank].double(), trial.grad_out[rank].double()
    ids = trial.topk_expert_ids[rank]
    factor = torch.where(ids < 0, 0, ids + 1).double()
    weight = torch.nan_to_num(trial.topk_scores[rank].double()) * factor
    dots = (x * grad).sum(1, keepdim=True)
    return (
        weight.sum(1, keepdim=True) * x,
        weight.abs().sum(1, keepdim=True) * x.abs(),
        weight.sum(1, keepdim=True) * grad,
        factor * dots,
    )


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_the_reference_is_the_formula(ep_size: int, dtype: torch.dtype, reduction: str):
    """What all else is compared with, against the sums themselves, in float64.

    Bounds, with u half the dtype's spacing at 1 and S the sum of the terms' sizes. A row and every rounding on a wire
    or at the end lose u of it: `exact` rounds the expert's row and the output, `fast` every rank's part too. Sums and
    products in float32 lose at most (2 K) 2**-24 S. A gradient row is rounded once more, by the expert.
    """
    config = make_config(8, 4, 64, dtype=dtype, reduction=reduction)
    ids = random_ids((16,) * ep_size, 4, 8)
    for part in ids:
        part[::5, 1] = -1
    trial = problem(config, ids)
    u = torch.finfo(dtype).eps / 2
    roundings = 3 if reduction == "fast" else 2
    for rank, answer in enumerate(expected(trial, torch.device("cpu"))):
        out, size, grad_x, grad_scores = linear_in_float64(trial, rank)
        bound = (roundings * u + 8 * 2**-24) * size * (1 + 4 * u)
        tiny = torch.finfo(dtype).smallest_normal
        assert ((answer.outcome.out.double() - out).abs() <= bound + tiny).all()
        grad_size = size / trial.x[rank].double().abs() * trial.grad_out[rank].double().abs()
        grad_bound = ((roundings + 1) * u + 8 * 2**-24) * grad_size * (1 + 4 * u)
        assert ((answer.outcome.grad_x.double() - grad_x).abs() <= grad_bound + tiny).all()
        assert answer.grad_scores_fp64 is not None
        row_error = u * (trial.x[rank].double() * trial.grad_out[rank].double()).abs().sum(1, keepdim=True)
        factor = torch.where(ids[rank] < 0, 0, ids[rank] + 1)
        assert ((answer.grad_scores_fp64 - grad_scores).abs() <= factor * row_error + 1e-9).all()


def test_the_reference_orders_and_pads_rows():
    x = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    scores = [torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([[0.5, 0.6]])]
    ids = [torch.tensor([[0, 1], [-1, 0]]), torch.tensor([[0, 0]])]
    first, second = reference.dispatch(x, scores, ids, num_experts=4, expert_alignment=4)
    assert first.rows.flatten().tolist() == [1, 2, 3, 3, 1, 0, 0, 0]
    assert torch.equal(first.scores, torch.tensor([0.1, 0.4, 0.5, 0.6, 0.2, 0, 0, 0]))
    assert first.origin[:5] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (0, 0, 1)]
    assert (first.tokens_per_expert, first.expert_offsets) == ([4, 1], [4, 8])
    assert (second.tokens_per_expert, second.expert_offsets) == ([0, 0], [0, 0])


@every_backend(1, 2)
def test_experts_in_autocast_do_not_change_what_travels(on: On, backend: str, ep_size: int):
    trial = problem(make_config(4, 2), random_ids((5,) * ep_size, 2, 4))
    plain, cast = on(backend, ep_size)(solved, trial), on(backend, ep_size)(solved_in_autocast, trial)
    for mine, theirs in zip(cast, plain, strict=True):
        for name, tensor in mine.items():
            assert_bit_equal(tensor, theirs[name], name)


def solved_in_autocast(seat: Seat, trial: Problem) -> dict[str, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return solved(seat, trial)
