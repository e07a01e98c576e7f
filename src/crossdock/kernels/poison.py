"""Fill a tensor with NaN if a flag on the device is set: outputs of a call that was given up.

Flag 0 leaves `[1, 2]` as it is, flag 1 makes it `[NaN, NaN]`.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import launch


def poison_kernel(
    flag_ptr,  # [1] int64
    out_ptr,  # [num_elements] any float dtype
    num_elements,
    BLOCK: tl.constexpr,
):
    """Write NaN everywhere, or nothing."""
    if tl.load(flag_ptr) != 0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < num_elements:
            place = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + place, tl.full((BLOCK,), float("nan"), tl.float32), mask=place < num_elements)
            start += step


def launch_poison(flag: torch.Tensor, out: torch.Tensor) -> None:
    """Make `out` (contiguous, float) NaN in stream order if `flag [1]` int64 is set by then."""
    if out.numel():
        launch(poison_kernel, (16,), out.device, flag, out, out.numel(), BLOCK=1024, num_warps=4)
