"""Memory for many rows: where large results of the movements lie.

On a CPU under Linux that is huge pages. The C library maps every large tensor anew in pages of 4 KB: the first touch of
34 MB takes 14 ms then, in huge pages 3 ms, and 1 ms where the memory has been used before (docs/measurements.md).
"""

from __future__ import annotations

import mmap
import sys
import weakref
from contextlib import suppress
from typing import Protocol

import torch

_HUGE_PAGE = 1 << 21
_KEPT_BYTES = 1 << 27  # of what is free, by one `RowMemory`


class NewRows(Protocol):
    """Makes uninitialised `[num_rows, D]`: width and device of `like [N, D]`, its dtype too where none is given."""

    def __call__(self, num_rows: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor: ...


def new_rows(num_rows: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`NewRows`, in memory of their own."""
    num_bytes = _num_bytes(num_rows, like, dtype)
    pages = _map_pages(num_bytes) if num_bytes >= 2 * _HUGE_PAGE else None  # smaller ones the C library has at hand
    return _rows_in(pages, num_rows, like, dtype)


class RowMemory:
    """Memory that is used again as soon as nobody holds the rows that lay in it.

    New pages have to be zeroed, which takes as long as writing the rows.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._is_closed = False

    def new_rows(self, num_rows: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`NewRows`."""
        num_bytes = _num_bytes(num_rows, like, dtype)
        pages = self._take(num_bytes) if num_bytes >= _HUGE_PAGE // 2 else None
        if pages is None:
            return _rows_in(None, num_rows, like, dtype)
        held = memoryview(pages)  # by the tensor's storage
        weakref.finalize(held, self._give_back, pages).atexit = False
        return _rows_in(held, num_rows, like, dtype)

    def close(self) -> None:
        """Keep nothing any longer."""
        self._is_closed = True
        self._free.clear()

    def _take(self, num_bytes: int) -> mmap.mmap | None:
        fitting = [pages for pages in self._free if num_bytes <= len(pages) <= 2 * num_bytes + _HUGE_PAGE]
        if not fitting:
            return _map_pages(num_bytes)
        pages = min(fitting, key=len)
        self._free.remove(pages)
        return pages

    def _give_back(self, pages: mmap.mmap) -> None:
        """Called by whichever thread lets go of the rows."""
        if not self._is_closed and sum(map(len, self._free)) + len(pages) <= _KEPT_BYTES:
            self._free.append(pages)


def _num_bytes(num_rows: int, like: torch.Tensor, dtype: torch.dtype | None) -> int:
    """Of the rows; 0 where they cannot lie in huge pages."""
    if sys.platform != "linux" or like.device.type != "cpu":
        return 0
    return num_rows * like.shape[1] * (dtype or like.dtype).itemsize


def _map_pages(num_bytes: int) -> mmap.mmap | None:
    """Huge pages for so many bytes; None where the kernel has none."""
    with suppress(OSError):
        # A whole number of huge pages, else the kernel neither aligns the mapping nor rounds up its end.
        whole = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
        pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return pages
    return None


def _rows_in(
    pages: mmap.mmap | memoryview | None, num_rows: int, like: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    dtype, width = dtype or like.dtype, like.shape[1]
    if pages is None:
        return like.new_empty(num_rows, width, dtype=dtype)
    return torch.frombuffer(pages, dtype=dtype, count=num_rows * width).view(num_rows, width)
