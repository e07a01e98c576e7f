"""The kernels that move rows within a rank give the bits of the plain movements."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")


from crossdock.kernels.gather import launch_gather_rows
from crossdock.kernels.launch import launch
from crossdock.kernels.poison import launch_poison
from crossdock.kernels.reduce import launch_reduce_rows
from crossdock.kernels.rounding import round_to
from crossdock.kernels.score import launch_score_gradient
from crossdock.rows import gather_gradient, gather_rows, reduce_rows, score_gradient
from crossdock.testing import assert_bit_equal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(7, 50), (1, 8), (5, 1030), (0, 16)]


def _rows(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather(shape, dtype):
    table = _rows(shape, dtype)
    index = torch.randint(-1, shape[0], (13,)) if shape[0] else torch.full((13,), -1)
    assert_bit_equal(launch_gather_rows(table, index), gather_rows(table, index), "gathered rows")
    strided = torch.cat([table, table], dim=1)[:, : shape[1]]
    assert_bit_equal(launch_gather_rows(strided, index), gather_rows(table, index), "rows of a strided table")


@pytest.mark.parametrize("weights", ["none", "by row", "by term"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reduce(shape, dtype, weights):
    rows = _rows(shape, dtype)
    index = torch.randint(-1, shape[0], (9, 3)) if shape[0] else torch.full((9, 3), -1)
    factors = {"none": None, "by row": torch.rand(shape[0]), "by term": torch.rand(9, 3)}[weights]
    actual, expected = launch_reduce_rows(rows, index, factors), reduce_rows(rows, index, factors)
    assert_bit_equal(actual, expected, "reduced rows")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_a_call_that_was_given_up_are_nan(dtype):
    table, index = _rows((7, 50), dtype), torch.tensor([3, -1, 13])
    for value, given_up in ((0, False), (1, True)):
        flag = torch.tensor([value])
        gathered = launch_gather_rows(table, index, divisor=2, flag=flag)
        reduced = launch_reduce_rows(table, index.view(1, 3).clamp(max=6), None, flag)
        assert gathered.isnan().all() == reduced.isnan().all() == given_up
    assert_bit_equal(launch_gather_rows(table, index, divisor=2), gather_rows(table, index, divisor=2), "by slot")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_score_gradient(dtype):
    rows, grad, scores = _rows((7, 50), dtype), _rows((7, 50), dtype).flip(0), torch.rand(7)
    scaled = grad.clone()
    dots = launch_score_gradient(rows, scaled, scores)
    plainly_scaled = grad.clone()
    plain_dots = score_gradient(rows, plainly_scaled, scores)
    assert_bit_equal(scaled, plainly_scaled, "scaled gradient")
    exact = (rows.double() * grad.double()).sum(1)
    largest = (rows.double() * grad.double()).abs().sum(1)
    for dot in (dots, plain_dots):
        assert ((dot.double() - exact).abs() <= 50 * torch.finfo(torch.float32).eps * largest).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9, 1030), (1, 8), (0, 16)], ids=str)
def test_spreading_and_scaling_in_one_pass(shape, dtype):
    """More rows than a chunk has, some of them absent."""
    table, num_rows = _rows(shape, dtype), 600
    index = torch.arange(num_rows) * 7 % (4 * shape[0] + 1) - 1 if shape[0] else torch.full((num_rows,), -1)
    rows, scores = _rows((num_rows, shape[1]), dtype), torch.rand(num_rows)
    scaled = gather_rows(table, index, divisor=4)
    dots = score_gradient(rows, scaled, scores)
    one_pass = gather_gradient(table, index, rows=rows, row_scores=scores, divisor=4)
    assert_bit_equal(one_pass[0], scaled, "scaled gradient")
    assert_bit_equal(one_pass[1], dots, "dots")


def test_a_rows_dot_does_not_depend_on_the_others():
    rows, grad, scores = _rows((64, 300), torch.float32), _rows((64, 300), torch.float32).flip(0), torch.rand(64)
    whole = score_gradient(rows, grad.clone(), scores)
    alone = [score_gradient(rows[i : i + 1], grad[i : i + 1].clone(), scores[i : i + 1]) for i in range(64)]
    assert_bit_equal(torch.cat(alone), whole, "dots")


def _round_kernel(value_ptr, out_ptr):
    import triton.language as tl

    place = tl.arange(0, 8)
    tl.store(out_ptr + place, round_to(tl.load(value_ptr + place), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_to_nearest_even(dtype):
    import triton.language as tl

    _round_kernel.__globals__["tl"] = tl
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x00000001, 0x7F7FFFFF, 0xFF800000, 0x80000000, 0x7FC00000]
    value = torch.tensor([bit - (1 << 32) if bit >= 1 << 31 else bit for bit in bits], dtype=torch.int32)
    value = value.view(torch.float32)
    out = torch.empty(8, dtype=dtype)
    launch(_round_kernel, (1,), value.device, value, out, helpers=(round_to,))
    expected = value.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert_bit_equal(out[:7], expected[:7], "rounded values")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison(dtype):
    out = torch.ones(3, 1000, dtype=dtype)
    launch_poison(torch.zeros(1, dtype=torch.int64), out)
    assert_bit_equal(out, torch.ones(3, 1000, dtype=dtype), "outputs of a call that went well")
    launch_poison(torch.ones(1, dtype=torch.int64), out)
    assert out.isnan().all()
