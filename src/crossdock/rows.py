"""The movements of rows inside one rank, on any device, to the bit.

`gather_rows` spreads rows to the places that want a copy; `reduce_rows` adds the rows of each place up again, in order,
in float32, product and sum rounded one after the other. They are each other's adjoint, and every backend is built from
them. `score_gradient` is what weighting a row needs on the way back, `gather_gradient` both at once; `new_rows` is the
memory of large results.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import NamedTuple

import torch

from .permute import take_or_zero

_CHUNK_BYTES = 1 << 20  # of float32: what a chunk needs stays in a core's caches, and calls of torch are few enough
_HUGE_PAGE = 1 << 21


def new_rows(num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised `[num_rows, D]` with width, dtype and device of `like [N, D]`.

    On a CPU, large ones lie in huge pages where Linux has them. The C library maps every large tensor anew in pages of
    4 KB: the first touch of 34 MB takes 14 ms then, in huge pages 3 ms (docs/measurements.md).
    """
    num_bytes = num_rows * like.shape[1] * like.element_size()
    if sys.platform == "linux" and like.device.type == "cpu" and num_bytes >= 2 * _HUGE_PAGE:
        with suppress(OSError):  # a kernel without huge pages
            # A whole number of huge pages, else the kernel neither aligns the mapping nor rounds up its end.
            whole = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
            pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(pages, dtype=like.dtype, count=num_rows * like.shape[1]).view(num_rows, -1)
    return like.new_empty(num_rows, like.shape[1])


def gather_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    divisor: int = 1,
    may_be_absent: bool = True,
    out: torch.Tensor | None = None,
    nan_if: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of `table [N, D]` by `index [R]` (int64) over `divisor`: `[R, D]`, in `out` (contiguous) if given.

    Index -1 gives a row of zeros; `may_be_absent=False` promises that there is none. On a GPU, rows become NaN if
    `nan_if [1]` (int64 on the device) is set.

    >>> gather_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([3, -1, 1]), divisor=2).flatten().tolist()
    [2.0, 0.0, 1.0]
    """
    if table.is_cuda:
        if not may_be_absent and divisor == 1 and nan_if is None:
            return torch.index_select(table, 0, index, out=out)
        from .kernels.gather import launch_gather_rows

        return launch_gather_rows(table, index, divisor=divisor, out=out, flag=nan_if)
    if divisor != 1:
        index = torch.div(index, divisor, rounding_mode="floor")  # -1 stays -1
    rows = new_rows(index.shape[0], table) if out is None else out
    if table.shape[0] == 0:
        return rows.zero_()
    if not may_be_absent:
        return torch.index_select(table, 0, index, out=rows)
    torch.index_select(table, 0, index.clamp(min=0), out=rows)
    absent = index < 0
    return rows.masked_fill_(absent.unsqueeze(1), 0) if bool(absent.any()) else rows


def reduce_rows(
    rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None, *, nan_if: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum of the rows that each place names: `[N, D]` in the dtype of `rows [R, D]`; `index [N, M]` int64, -1 none.

    For m = 0..M-1, places with an index: `acc = acc + float32(row)`, or `acc + (weight * float32(row))` with float32
    weights `[N, M]` by term or `[R]` by row, from `acc = +0.0`; product and sum are each rounded to float32 and never
    fused, and the result is rounded once. `nan_if` is as in `gather_rows`.

    >>> reduce_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [-1, 0], [-1, -1]]), None).flatten().tolist()
    [3.0, 1.0, 0.0]
    """
    if rows.is_cuda:
        from .kernels.reduce import launch_reduce_rows

        return launch_reduce_rows(rows, index, weights, nan_if)
    if weights is not None and weights.dim() == 1:
        weights = take_or_zero(weights, index)
    out = new_rows(index.shape[0], rows)
    places = _Places.of(index, weights)
    step = max(1, _CHUNK_BYTES // (4 * max(rows.shape[1], 1)))
    scratch = _Scratch.of(min(step, index.shape[0]), rows)
    for start in range(0, index.shape[0], step):
        part = slice(start, start + step)
        sums = _sum_chunk(rows, places, part, scratch)
        if places.order is None:
            out[part] = sums
        else:
            out.index_copy_(0, places.order[part], sums.to(rows.dtype))
    return out


class _Places(NamedTuple):
    """Every place's list with its gaps closed, the longest first: the m-th rows of all that have one are a prefix.

    Attributes:
        lists: `[M, N]` int64 rows.
        weights: `[M, N, 1]` float32, or None.
        num_with: how many lists have an m-th row, M numbers.
        order: `[N]` int64: the place of each list; None if the lists stand as the places do.
    """

    lists: torch.Tensor
    weights: torch.Tensor | None
    num_with: list[int]
    order: torch.Tensor | None

    @classmethod
    def of(cls, index: torch.Tensor, weights: torch.Tensor | None) -> _Places:
        """From `index [N, M]` with -1 in the gaps, and `weights [N, M]`.

        >>> places = _Places.of(torch.tensor([[-1, 7], [5, 6], [-1, -1]]), None)
        >>> places.order.tolist(), places.num_with, places.lists[0, :2].tolist(), places.lists[1, :1].tolist()
        ([1, 0, 2], [2, 1], [5, 7], [6])
        """
        present = index >= 0
        num_places, most = index.shape
        if bool(present.all()):
            return cls(_by_pass(index), None if weights is None else _by_pass(weights), [num_places] * most, None)
        count = present.sum(1)
        order = torch.argsort(count, descending=True, stable=True)
        nth = torch.where(present, torch.cumsum(present, 1) - 1, most)  # gaps go to a column that nobody reads

        def close(values: torch.Tensor) -> torch.Tensor:
            closed = values.new_empty(num_places, most + 1).scatter_(1, nth, values)
            return _by_pass(closed.index_select(0, order))

        num_with = num_places - torch.bincount(count, minlength=most + 1).cumsum(0)
        return cls(close(index), None if weights is None else close(weights), num_with[:most].tolist(), order)


def _by_pass(values: torch.Tensor) -> torch.Tensor:
    values = values.t().contiguous()
    return values.unsqueeze(2) if values.is_floating_point() else values


class _Scratch(NamedTuple):
    """What one chunk needs, made once: rows as they are, products and sums in float32, `[step, D]` each."""

    rows: torch.Tensor
    products: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def of(cls, step: int, like: torch.Tensor) -> _Scratch:
        rows = like.new_empty(step, like.shape[1])
        products = rows if like.dtype == torch.float32 else torch.empty_like(rows, dtype=torch.float32)
        return cls(rows, products, torch.empty_like(rows, dtype=torch.float32))


def _sum_chunk(rows: torch.Tensor, places: _Places, part: slice, scratch: _Scratch) -> torch.Tensor:
    """Sums of some of the lists, in float32; they lie in the scratch."""
    sums = scratch.sums[: places.lists[0, part].shape[0]].zero_()
    for m, num_with in enumerate(places.num_with):
        num = min(num_with - part.start, sums.shape[0])
        if num <= 0:
            break
        these = slice(part.start, part.start + num)
        product = torch.index_select(rows, 0, places.lists[m, these], out=scratch.rows[:num])
        if product.dtype != torch.float32:  # convert first: torch's mixed product converts too, into new memory
            product = scratch.products[:num].copy_(product)
        if places.weights is not None:
            product.mul_(places.weights[m, these])
        sums[:num].add_(product)
    return sums


def score_gradient(rows: torch.Tensor, grad_rows: torch.Tensor, row_scores: torch.Tensor) -> torch.Tensor:
    """The float32 dot of every row `[R, D]` with its gradient row: `[R]`; one row's does not depend on the others.

    Scales `grad_rows` in place to `round(float32(grad) * score)`, with `row_scores [R]` float32.
    """
    if rows.is_cuda:
        from .kernels.score import launch_score_gradient

        return launch_score_gradient(rows, grad_rows, row_scores)
    out = torch.empty_like(row_scores)
    step = max(1, _CHUNK_BYTES // (4 * max(rows.shape[1], 1)))
    scratch = rows.new_empty(min(step, rows.shape[0]), rows.shape[1], dtype=torch.float32)
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        grad = grad_rows[part].float()
        _scale(grad, rows[part], row_scores[part], scratch[: grad.shape[0]], grad_rows[part], out[part])
    return out


def _scale(
    grad: torch.Tensor,
    rows: torch.Tensor,
    row_scores: torch.Tensor,
    scratch: torch.Tensor,
    scaled: torch.Tensor,
    dots: torch.Tensor,
) -> None:
    """One chunk of `score_gradient`, from gradient rows in float32."""
    torch.sum(torch.mul(grad, rows, out=scratch), dim=1, out=dots)
    torch.mul(grad, row_scores.unsqueeze(1), out=scaled)


def gather_gradient(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    rows: torch.Tensor,
    row_scores: torch.Tensor,
    divisor: int = 1,
    may_be_absent: bool = True,
    nan_if: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_rows` of gradients and then `score_gradient`: the scaled rows and the dots, to the same bits.

    On a CPU in one pass, chunk by chunk: the unscaled rows never reach memory.
    """
    if table.is_cuda or table.shape[0] == 0:
        spread = gather_rows(table, index, divisor=divisor, may_be_absent=may_be_absent, nan_if=nan_if)
        return spread, score_gradient(rows, spread, row_scores)
    scaled, dots = new_rows(index.shape[0], table), torch.empty_like(row_scores)
    step = max(1, _CHUNK_BYTES // (4 * max(table.shape[1], 1)))
    scratch = _Scratch.of(min(step, index.shape[0]), table)
    for start in range(0, index.shape[0], step):
        part = slice(start, start + step)
        num = index[part].shape[0]
        grad = gather_rows(
            table, index[part], divisor=divisor, may_be_absent=may_be_absent, out=scratch.rows[:num], nan_if=nan_if
        )
        if grad.dtype != torch.float32:
            grad = scratch.products[:num].copy_(grad)
        _scale(grad, rows[part], row_scores[part], scratch.sums[:num], scaled[part], dots[part])
    return scaled, dots


def zero_tail(rows: torch.Tensor, end: torch.Tensor, scores: torch.Tensor | None = None) -> None:
    """Zero `rows [R, D]`, and `scores [R]` if given, from row `end [1]` (int64, on their device) on; in place."""
    if rows.is_cuda:
        from .kernels.tail import launch_zero_tail

        launch_zero_tail(end, rows, scores)
        return
    rows[int(end) :].zero_()
    if scores is not None:
        scores[int(end) :].zero_()


def poisoned(values: torch.Tensor, nan_if: torch.Tensor) -> torch.Tensor:
    """`values` (contiguous float, on a GPU), all NaN if `nan_if` is set; in place."""
    from .kernels.poison import launch_poison

    launch_poison(nan_if, values)
    return values
