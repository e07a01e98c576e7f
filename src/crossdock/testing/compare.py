"""Comparing tensors the way the contract words it: movement to the bit, reductions against a baseline.

A tolerance is never a number out of the air. What only moves rows is compared with `assert_bit_equal`; what adds in
floating point is compared with `assert_within_baseline`, whose bound is what a plain implementation in the same dtype
loses against float64.
"""

from __future__ import annotations

import torch

_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bit_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Assert that two tensors have one dtype, one shape and the same bits.

    NaNs are equal where their bits are, +0.0 and -0.0 differ. The tensors may live on different devices.

    Args:
        actual: any shape and dtype of 1, 2, 4 or 8 bytes.
        expected: what `actual` should be.
        what: the tensor's name in the message.

    Raises:
        AssertionError: with both dtypes or shapes, or the number of elements that differ and the first of them.
    """
    _assert_same_kind(actual, expected, what)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    different = _bits(actual) != _bits(expected)
    if not bool(different.any()):
        return
    first = tuple(different.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {int(different.sum())} of {different.numel()} elements differ; the first is at {list(first)}: "
        f"got {_shown(actual[first])}, expected {_shown(expected[first])}"
    )


def assert_within_baseline(
    actual: torch.Tensor,
    reference_fp64: torch.Tensor,
    baseline_same_dtype: torch.Tensor,
    *,
    factor: float = 2.0,
    what: str = "tensor",
) -> None:
    """Assert that `actual` is about as near to the truth as a plain implementation in its dtype is.

    The largest and the root-mean-square error of `actual` against `reference_fp64` may each be `factor` times those of
    `baseline_same_dtype`, plus half a unit in the last place of the largest reference value: the rounding of a result
    that no implementation in the dtype can avoid, which matters only where the baseline happens to be exact.

    Args:
        actual: any shape, floating point.
        reference_fp64: the same shape, float64, finite: the truth.
        baseline_same_dtype: `actual`'s shape and dtype: what the plain implementation gives.
        factor: how many times the baseline's error is allowed.
        what: the tensor's name in the message.

    Raises:
        AssertionError: with the error, the bound and the worst place.
        ValueError: if the reference is not finite float64.
    """
    _assert_same_kind(actual, baseline_same_dtype, f"{what} and its baseline")
    if reference_fp64.dtype is not torch.float64 or not bool(reference_fp64.isfinite().all()):
        raise ValueError(f"{what}: the reference must be finite float64, got {reference_fp64.dtype}")
    _assert_same_shape(actual, reference_fp64, f"{what} and its reference")
    if actual.numel() == 0:
        return
    reference = reference_fp64.detach().cpu()
    errors, baseline_errors = _errors(actual, reference), _errors(baseline_same_dtype, reference)
    floor = 0.5 * torch.finfo(actual.dtype).eps * float(reference.abs().max())
    for name, measure in (("largest", torch.max), ("root-mean-square", _root_mean_square)):
        error, bound = float(measure(errors)), factor * float(measure(baseline_errors)) + floor
        if not error <= bound:  # written so that a NaN fails
            worst = tuple(torch.unravel_index(errors.nan_to_num(nan=torch.inf).argmax(), errors.shape))
            raise AssertionError(
                f"{what}: {name} error {error:.3g} is over {bound:.3g} (= {factor} x the baseline's "
                f"{float(measure(baseline_errors)):.3g} + {floor:.3g}); the worst is at {[int(i) for i in worst]}: "
                f"got {float(actual[worst]):.9g}, the truth is {float(reference[worst]):.9g}"
            )


def _assert_same_kind(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.dtype is not expected.dtype:
        raise AssertionError(f"{what}: dtype is {actual.dtype}, expected {expected.dtype}")
    _assert_same_shape(actual, expected, what)


def _assert_same_shape(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape is {list(actual.shape)}, expected {list(expected.shape)}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool:
        return tensor
    return tensor.contiguous().view(_BITS_OF_SIZE[tensor.element_size()])


def _shown(element: torch.Tensor) -> str:
    """Return a value with its bits, so that NaNs and zeros that differ look different."""
    if not element.is_floating_point():
        return str(element.item())
    width = 8 * element.element_size()
    return f"{float(element):.9g} (0x{int(_bits(element)) % (1 << width):0{width // 4}x})"


def _errors(tensor: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (tensor.detach().cpu().double() - reference).abs()


def _root_mean_square(errors: torch.Tensor) -> torch.Tensor:
    return errors.square().mean().sqrt()
