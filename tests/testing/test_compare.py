"""The comparisons fail where they should, and say where."""

from __future__ import annotations

import re

import pytest
import torch

from crossdock.testing import assert_bit_equal, assert_within_baseline

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_pass(dtype: torch.dtype):
    tensor = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype)
    assert_bit_equal(tensor, tensor.clone())
    assert_bit_equal(tensor.t(), tensor.t().contiguous())
    assert_bit_equal(tensor[:0], tensor[:0])
    assert_bit_equal(tensor[0, 0], tensor[0, 0].clone())


def test_count_and_first_place_are_told():
    expected = torch.zeros(2, 3)
    actual = expected.clone()
    actual[0, 2], actual[1, 1] = 1.0, 2.0
    words = "rows: 2 of 6 elements differ; the first is at [0, 2]: got 1 (0x3f800000), expected 0 (0x00000000)"
    with pytest.raises(AssertionError, match=re.escape(words)):
        assert_bit_equal(actual, expected, "rows")


def test_signed_zeros_differ():
    with pytest.raises(AssertionError, match=r"got -0 \(0x8000\), expected 0 \(0x0000\)"):
        assert_bit_equal(torch.tensor([-0.0], dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16))


def test_nans_are_compared_by_their_bits():
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert_bit_equal(nans, nans.clone())
    with pytest.raises(
        AssertionError, match=r"1 of 2 .* at \[1\]: got nan \(0x7fc00001\), expected nan \(0x7fc00000\)"
    ):
        assert_bit_equal(nans, nans[[0, 0]])


def test_integers_are_shown_as_such():
    with pytest.raises(AssertionError, match=r"at \[0\]: got 3, expected -1"):
        assert_bit_equal(torch.tensor([3]), torch.tensor([-1]))


def test_kind_is_compared_first():
    with pytest.raises(AssertionError, match=r"x: dtype is torch.float32, expected torch.float64"):
        assert_bit_equal(torch.zeros(1), torch.zeros(1).double(), "x")
    with pytest.raises(AssertionError, match=r"x: shape is \[1\], expected \[2\]"):
        assert_bit_equal(torch.zeros(1), torch.zeros(2), "x")


def sums(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums over 64 numbers: the truth, and with every step in `dtype`."""
    terms = torch.randn(64, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = torch.zeros(100, dtype=dtype)
    for term in terms:
        total = total + term
    return terms.double().sum(0), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_good_as_the_baseline_passes(dtype: torch.dtype):
    truth, baseline = sums(dtype)
    assert_within_baseline(baseline, truth, baseline)
    assert_within_baseline(truth.to(dtype), truth, baseline)
    assert_within_baseline(baseline[:0], truth[:0], baseline[:0])


def test_one_bad_element_fails():
    truth, baseline = sums(torch.bfloat16)
    bad = baseline.clone()
    bad[17] += 4.0
    with pytest.raises(AssertionError, match=r"out: largest error .* the worst is at \[17\]: got .*, the truth is"):
        assert_within_baseline(bad, truth, baseline, what="out")


def test_many_slightly_bad_elements_fail():
    truth, baseline = sums(torch.bfloat16)
    largest = (baseline.double() - truth).abs().max()
    with pytest.raises(AssertionError, match="root-mean-square error"):
        assert_within_baseline((truth + largest * 1.5).to(torch.bfloat16), truth, baseline)


def test_nan_fails():
    truth, baseline = sums(torch.float32)
    bad = baseline.clone()
    bad[3] = torch.nan
    with pytest.raises(AssertionError, match=r"at \[3\]: got nan"):
        assert_within_baseline(bad, truth, baseline)


def test_an_exact_baseline_leaves_the_rounding_of_the_result():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    exact = truth.to(torch.float32)
    one_bit_off = torch.nextafter(exact, torch.tensor(0.0))
    assert_within_baseline(one_bit_off, truth, exact)
    with pytest.raises(AssertionError, match="largest error"):
        assert_within_baseline(exact * (1 + 1e-6), truth, exact)


def test_the_reference_must_be_finite_float64():
    with pytest.raises(ValueError, match="must be finite float64, got torch.float32"):
        assert_within_baseline(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="must be finite float64"):
        assert_within_baseline(torch.zeros(1), torch.full((1,), torch.inf).double(), torch.zeros(1))
