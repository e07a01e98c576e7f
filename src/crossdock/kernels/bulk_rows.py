"""Bulk copies for Hopper GPUs: what `pull.py` does for whole rows, by few blocks.

The kernel stands in `bulk_source.py`. It gives the same bits as the portable one; which is faster depends on the
blocks that a call may take (see docs/measurements.md). `why_not` tells where it cannot serve.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from .bulk_source import PRIMITIVES, PULL_ROWS
from .cuda_source import CannotRun, Kernel, Source, load

_CAPABILITY = (9, 0)
_ALIGNMENT = 16  # bytes, of all that is copied
_STAGE_ALIGNMENT = 128
_SHARED_BYTES = 200 * 1024
_MAX_STAGES = 64
_CHUNK_BYTES = 16 * 1024  # of a row at most: enough stages to hide the link's latency, few enough copies
_BARRIER_BYTES = 16  # a stage's two
_MAX_TOP_K, _MAX_RANKS = 32, 32


class Tuning(NamedTuple):
    """What a kernel is compiled for beside the problem.

    Attributes:
        store_warps: warps that store pulled rows.
        pending: stages a warp leaves to be read by the copy engine before it waits for the oldest.
    """

    store_warps: int = 1
    pending: int = 1


class Ring(ctypes.Structure):
    """The ring of stages, as the kernels take it."""

    _fields_ = [
        ("num_stages", ctypes.c_int),
        ("stage_bytes", ctypes.c_int),
        ("row_bytes", ctypes.c_int),
        ("chunk_bytes", ctypes.c_int),
        ("num_chunks", ctypes.c_int),
    ]


class PullArguments(ctypes.Structure):
    """What `pull_rows` takes."""

    _fields_ = [
        ("rows_table", ctypes.c_void_p),
        ("row_of_slot", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("given_up", ctypes.c_void_p),
        ("num_places", ctypes.c_int),
        ("ep_size", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("ring", Ring),
    ]


def why_not(device: torch.device, dtype: torch.dtype, hidden_dim: int, top_k: int, ep_size: int) -> str | None:
    """Why bulk copies cannot serve rows `[hidden_dim]` of `dtype`, in one sentence; None where they can.

    Where nothing else stands in the way it compiles and loads the kernel, which takes about a second, once.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return f"bulk copies need an NVIDIA GPU; this is {device.type}"
    capability, row_bytes = torch.cuda.get_device_capability(device), hidden_dim * dtype.itemsize
    if capability < _CAPABILITY:
        return f"bulk copies need compute capability 9.0; this GPU has {capability[0]}.{capability[1]}"
    if row_bytes % _ALIGNMENT:
        return f"bulk copies need rows of a multiple of {_ALIGNMENT} bytes; these have {row_bytes}"
    if top_k > _MAX_TOP_K or ep_size > _MAX_RANKS:
        return (
            f"bulk copies serve up to {_MAX_RANKS} ranks and {_MAX_TOP_K} slots a token; here are {ep_size} and {top_k}"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        _pull_rows(index, top_k, Tuning())
    except CannotRun as error:
        return str(error)
    return None


def launch_bulk_pull_rows(
    rows_table: torch.Tensor,
    row_of_slot: torch.Tensor,
    rank: int,
    out: torch.Tensor,
    given_up: torch.Tensor,
    num_blocks: int,
    tuning: Tuning = Tuning(),  # noqa: B008  # frozen
) -> None:
    """Fill `out [R, D]` with what `row_of_slot [ep_size, S, K]` int32 wants of the published rows.

    `rows_table [ep_size]` int64 holds the addresses of `[max_tokens, D]`, multiples of 16; `rank` is this one.
    Nothing is written where `given_up [1]` int64 is not 0. All tensors are contiguous and on the current device.
    """
    ep_size, num_places, top_k = row_of_slot.shape
    if out.numel() == 0 or num_places == 0:
        return
    ring = pull_ring(out.shape[1] * out.element_size(), top_k, tuning)
    argument = PullArguments(
        rows_table.data_ptr(),
        row_of_slot.data_ptr(),
        out.data_ptr(),
        given_up.data_ptr(),
        num_places,
        ep_size,
        rank,
        ring,
    )
    blocks = min(num_blocks, ep_size * num_places)
    kernel = _pull_rows(rows_table.get_device(), top_k, tuning)
    kernel.launch(blocks, 32 + 32 * tuning.store_warps, _SHARED_BYTES, argument)


@cache
def pull_ring(row_bytes: int, top_k: int, tuning: Tuning) -> Ring:
    """The ring of `pull_rows`; its messages are a row for every slot, and the chunk.

    >>> ring = pull_ring(14336, 8, Tuning())
    >>> ring.num_stages, ring.chunk_bytes, ring.num_chunks
    (14, 14336, 1)
    >>> ring = pull_ring(57344, 8, Tuning())
    >>> ring.num_stages, ring.chunk_bytes, ring.num_chunks
    (14, 14336, 4)
    """
    message_bytes = _up(4 * (top_k + 1), 16)
    # What waits to be read, and one more for each warp, must fit.
    return _ring(row_bytes, message_bytes, tuning.store_warps * (tuning.pending + 2))


def _ring(row_bytes: int, message_bytes: int, min_stages: int) -> Ring:
    num_chunks = 0
    while True:
        num_chunks += 1
        chunk_bytes = _up(-(-row_bytes // num_chunks), _ALIGNMENT)
        stage_bytes = _up(chunk_bytes, _STAGE_ALIGNMENT)
        num_stages = min(_MAX_STAGES, _SHARED_BYTES // (stage_bytes + _BARRIER_BYTES + message_bytes))
        if chunk_bytes <= _CHUNK_BYTES and num_stages >= min_stages:
            # With chunks rounded up, fewer may do.
            return Ring(num_stages, stage_bytes, row_bytes, chunk_bytes, -(-row_bytes // chunk_bytes))


def pull_source(top_k: int, tuning: Tuning) -> Source:
    """The kernel `pull_rows` for tokens with so many slots."""
    defines = (("TOP_K", top_k), ("STORE_WARPS", tuning.store_warps), ("PENDING", tuning.pending))
    return Source(PRIMITIVES + PULL_ROWS, "pull_rows", defines)


@cache
def _pull_rows(index: int, top_k: int, tuning: Tuning) -> Kernel:
    return load(pull_source(top_k, tuning), index, _SHARED_BYTES)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
