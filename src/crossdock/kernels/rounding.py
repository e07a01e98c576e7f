"""Rounding a float32 tile once to the dtype of the rows, with the same bits compiled and interpreted."""

from __future__ import annotations

import triton.language as tl


def round_to(value, dtype: tl.constexpr):
    """`value` (float32 tile) in `dtype`, to nearest, ties to even.

    bfloat16 is rounded on the bits, because the interpreter's own cast cuts them off: 0x3F808000 (a tie) becomes
    0x3F80, 0x3F818000 becomes 0x3F82; NaN stays NaN.
    """
    if dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(value == value, rounded, 0x7FC0)
        return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)
