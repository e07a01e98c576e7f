"""The movements of rows inside one rank, on any device, to the bit.

`gather_rows` spreads rows to the places that want a copy; `reduce_rows` adds the rows of each place up again, in order,
in float32, product and sum rounded one after the other. They are each other's adjoint, and every backend is built from
them. `score_gradient` is what weighting a row needs on the way back, `gather_gradient` both at once. On a CPU, `new`
makes the memory of results and of what is needed on the way to them (see `row_memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .permute import take_or_zero
from .row_memory import NewRows, new_rows

__all__ = [
    "gather_gradient",
    "gather_rows",
    "new_rows",
    "poisoned",
    "reduce_rows",
    "score_gradient",
    "zero_tail",
]

# Of float32. Larger chunks leave a core's caches, smaller ones cost more calls of torch (docs/measurements.md).
_CHUNK_BYTES = 1 << 21
_FEW_GAPS = 16  # up to one among so many terms: to close them would cost more


def gather_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    divisor: int = 1,
    may_be_absent: bool = True,
    out: torch.Tensor | None = None,
    nan_if: torch.Tensor | None = None,
    new: NewRows = new_rows,
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
    rows = new(index.shape[0], table) if out is None else out
    if table.shape[0] == 0:
        return rows.zero_()
    if not may_be_absent:
        return torch.index_select(table, 0, index, out=rows)
    torch.index_select(table, 0, index.clamp(min=0), out=rows)
    absent = index < 0
    return rows.masked_fill_(absent.unsqueeze(1), 0) if bool(absent.any()) else rows


def reduce_rows(
    rows: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    nan_if: torch.Tensor | None = None,
    new: NewRows = new_rows,
) -> torch.Tensor:
    """Sum of the rows that each place names: `[N, D]` in the dtype of `rows [R, D]`; `index [N, M]` int64, -1 none.

    For m = 0..M-1, places with an index: `acc = acc + float32(row)`, or `acc + (weight * float32(row))` with float32
    weights `[N, M]` by term or `[R]` by row, from `acc = +0.0`; product and sum are each rounded to float32 and never
    fused, and the result is rounded once. `out` and `nan_if` are as in `gather_rows`.

    >>> reduce_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [-1, 0], [-1, -1]]), None).flatten().tolist()
    [3.0, 1.0, 0.0]
    """
    if rows.is_cuda:
        from .kernels.reduce import launch_reduce_rows

        sums = launch_reduce_rows(rows, index, weights, nan_if)
        return sums if out is None else out.copy_(sums)
    out = new(index.shape[0], rows) if out is None else out
    if rows.shape[0] == 0:
        return out.zero_()
    if weights is not None and weights.dim() == 1:
        weights = take_or_zero(weights, index)
    chunk = _rows_of_chunk(rows)
    lists = _lists(index, weights, chunk)
    for number, (scratch, (sums,)) in enumerate(_chunks(rows, new, out)):
        start = number * chunk
        acc = _sum_chunk(rows, lists, start, lists.num_with[number], scratch)
        if lists.of_place is None:
            sums.copy_(acc)
        else:
            rounded = acc if sums.dtype == torch.float32 else scratch.rows.copy_(acc)
            torch.index_select(rounded, 0, lists.of_place[start : start + chunk], out=sums)
    return out


class _Lists(NamedTuple):
    """Every place's list with its gaps closed, in each chunk the longest first: those with an m-th term are a prefix.

    Where gaps are few they stay open, and lists stand as the places do.

    Attributes:
        rows: `[M, N]` int64; 0 behind the end of a list and in gaps.
        weights: `[M, N, 1]` float32, or None.
        num_with: by chunk, how many of its lists have an m-th term, M numbers.
        of_place: `[N]` int64, counted from the beginning of the chunk; None where lists stand as the places do.
        gaps: `[M, N]` bool where gaps stay open; None where there is none.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    num_with: list[list[int]]
    of_place: torch.Tensor | None
    gaps: torch.Tensor | None


def _lists(index: torch.Tensor, weights: torch.Tensor | None, chunk: int) -> _Lists:
    """From `index [N, M]` with -1 in the gaps, and `weights [N, M]`, in chunks of so many places.

    >>> lists = _lists(torch.tensor([[-1, 7], [5, 6], [-1, -1], [4, 4]]), None, chunk=2)
    >>> lists.num_with, lists.of_place.tolist(), lists.rows.tolist()
    ([[2, 1], [1, 1]], [1, 0, 1, 0], [[5, 7, 4, 0], [6, 0, 4, 0]])
    """
    present = index >= 0
    num_gaps = index.numel() - int(present.sum())
    if num_gaps * _FEW_GAPS <= index.numel():
        return _open_lists(index, weights, ~present if num_gaps else None, chunk)
    return _closed_lists(index, weights, present, chunk)


def _open_lists(index: torch.Tensor, weights: torch.Tensor | None, gaps: torch.Tensor | None, chunk: int) -> _Lists:
    num_places, most = index.shape

    def by_term(values: torch.Tensor) -> torch.Tensor:
        return (values if gaps is None else values.masked_fill(gaps, 0)).t().contiguous()

    return _Lists(
        rows=by_term(index),
        weights=None if weights is None else by_term(weights).unsqueeze(2),
        num_with=[[min(chunk, num_places - start)] * most for start in range(0, num_places, chunk)],
        of_place=None,
        gaps=None if gaps is None else gaps.t(),
    )


def _closed_lists(index: torch.Tensor, weights: torch.Tensor | None, present: torch.Tensor, chunk: int) -> _Lists:
    (num_places, most), num_chunks = index.shape, -(-index.shape[0] // chunk)
    place, nth = torch.arange(num_places), torch.cumsum(present, 1) - 1
    key = place // chunk * (most + 1) + (most - 1 - nth[:, -1])  # the chunk, then how many terms are missing
    by_length = torch.argsort(key, stable=True)
    of_place = torch.empty_like(by_length).scatter_(0, by_length, place)
    # The first terms of all lists, then the second; gaps go behind the last, where nobody reads.
    to = torch.where(present, nth, most).mul_(num_places).add_(of_place.unsqueeze(1)).reshape(-1)

    def by_term(values: torch.Tensor) -> torch.Tensor:
        closed = values.new_zeros((most + 1) * num_places).scatter_(0, to, values.reshape(-1))
        return closed[: most * num_places].view(most, num_places)

    missing_at_most = torch.bincount(key, minlength=num_chunks * (most + 1)).view(num_chunks, -1).cumsum(1)
    return _Lists(
        rows=by_term(index),
        weights=None if weights is None else by_term(weights).unsqueeze(2),
        num_with=missing_at_most[:, :most].flip(1).tolist(),
        of_place=of_place % chunk,
        gaps=None,
    )


def _sum_chunk(rows: torch.Tensor, lists: _Lists, start: int, num_with: list[int], scratch: _Scratch) -> torch.Tensor:
    """Sums in float32 of the lists of one chunk, which begins at list `start`; they lie in the scratch."""
    acc = scratch.second.zero_()
    for m, num in enumerate(num_with):
        if num == 0:
            break
        these, used = slice(start, start + num), scratch.cut(num)
        term = torch.index_select(rows, 0, lists.rows[m, these], out=used.rows)
        if lists.gaps is not None:
            term.index_fill_(0, lists.gaps[m, these].nonzero().squeeze(1), 0)
        term = _in_float32(term, used.first)
        if lists.weights is not None:
            term.mul_(lists.weights[m, these])
        used.second.add_(term)
    return acc


class _Scratch(NamedTuple):
    """What one chunk needs, made once: rows as they are, and two of them in float32, `[chunk, D]` each.

    Where the rows are float32, `rows` and `first` are the same.
    """

    rows: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    def cut(self, num: int) -> _Scratch:
        if num == self.rows.shape[0]:
            return self
        return _Scratch(self.rows[:num], self.first[:num], self.second[:num])


def _rows_of_chunk(like: torch.Tensor) -> int:
    return max(1, _CHUNK_BYTES // (4 * max(like.shape[1], 1)))


def _chunks(
    like: torch.Tensor, new: NewRows, *tensors: torch.Tensor
) -> Iterator[tuple[_Scratch, tuple[torch.Tensor, ...]]]:
    """Tensors of equally many rows in parts, with memory to work on each; the width is that of `like`.

    It is the same memory for all: a conversion into new memory could cost a page fault for every 4 KB.
    """
    chunk = _rows_of_chunk(like)
    first, second = new(2 * min(chunk, tensors[0].shape[0]), like, torch.float32).tensor_split(2)
    rows = first if like.dtype == torch.float32 else new(first.shape[0], like)
    whole = _Scratch(rows, first, second)
    for parts in zip(*(tensor.split(chunk) for tensor in tensors), strict=True):
        if parts[0].shape[0]:  # no rows are split into one part without any
            yield whole.cut(parts[0].shape[0]), parts


def _in_float32(rows: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Rows themselves if they are float32, else converted in the scratch."""
    return rows if rows.dtype == torch.float32 else scratch.copy_(rows)


def score_gradient(
    rows: torch.Tensor, grad_rows: torch.Tensor, row_scores: torch.Tensor, max_programs: int | None = None
) -> torch.Tensor:
    """The float32 dot of every row `[R, D]` with its gradient row: `[R]`; one row's does not depend on the others.

    Scales `grad_rows` in place to `round(float32(grad) * score)`, with `row_scores [R]` float32. On a GPU at most
    `max_programs` blocks do it.
    """
    if rows.is_cuda:
        from .kernels.score import launch_score_gradient

        return launch_score_gradient(rows, grad_rows, row_scores, max_programs)
    dots = torch.empty_like(row_scores)
    for scratch, (grad, these, scores, dot) in _chunks(rows, new_rows, grad_rows, rows, row_scores, dots):
        _scale(grad, these, scores, scratch, grad, dot)
    return dots


def _scale(
    grad: torch.Tensor,
    rows: torch.Tensor,
    row_scores: torch.Tensor,
    scratch: _Scratch,
    scaled: torch.Tensor,
    dots: torch.Tensor,
) -> None:
    """One chunk of `score_gradient`; `grad` may lie in `scratch.rows`."""
    grad = _in_float32(grad, scratch.first)
    torch.sum(torch.mul(grad, _in_float32(rows, scratch.second), out=scratch.second), dim=1, out=dots)
    if scaled.dtype == torch.float32:
        torch.mul(grad, row_scores.unsqueeze(1), out=scaled)
    else:
        scaled.copy_(grad.mul_(row_scores.unsqueeze(1)))


def gather_gradient(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    rows: torch.Tensor,
    row_scores: torch.Tensor,
    divisor: int = 1,
    may_be_absent: bool = True,
    nan_if: torch.Tensor | None = None,
    new: NewRows = new_rows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_rows` of gradients and then `score_gradient`: the scaled rows and the dots, to the same bits.

    On a CPU in one pass, chunk by chunk: the unscaled rows never reach memory.
    """
    if table.is_cuda or table.shape[0] == 0:
        spread = gather_rows(table, index, divisor=divisor, may_be_absent=may_be_absent, nan_if=nan_if)
        return spread, score_gradient(rows, spread, row_scores)
    if divisor != 1:
        index = torch.div(index, divisor, rounding_mode="floor")
    scaled, dots = new(index.shape[0], table), torch.empty_like(row_scores)
    for scratch, (place, these, scores, to, dot) in _chunks(table, new, index, rows, row_scores, scaled, dots):
        grad = gather_rows(table, place, may_be_absent=may_be_absent, out=scratch.rows)
        _scale(grad, these, scores, scratch, to, dot)
    return scaled, dots


def zero_tail(
    rows: torch.Tensor, end: torch.Tensor, scores: torch.Tensor | None = None, max_programs: int | None = None
) -> None:
    """Zero `rows [R, D]`, and `scores [R]` if given, from row `end [1]` (int64, on their device) on; in place.

    On a GPU at most `max_programs` blocks do it.
    """
    if rows.is_cuda:
        from .kernels.tail import launch_zero_tail

        launch_zero_tail(end, rows, scores, max_programs)
        return
    rows[int(end) :].zero_()
    if scores is not None:
        scores[int(end) :].zero_()


def poisoned(values: torch.Tensor, nan_if: torch.Tensor) -> torch.Tensor:
    """`values` (contiguous float, on a GPU), all NaN if `nan_if` is set; in place."""
    from .kernels.poison import launch_poison

    launch_poison(nan_if, values)
    return values
