"""The shared memory of one rank: its buffers, and how many bytes they take."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import torch

from ...errors import BackendUnavailable
from ...memory.workspace import BufferSpec, place_buffers
from ..base import TransportSpec
from .plan import serves_small
from .rounds import notes_spec, signals_spec


def buffers_of(spec: TransportSpec) -> list[BufferSpec]:
    """All shared buffers of one rank, sized by `num_max_tokens_per_rank`."""
    tokens, top_k = spec.num_max_tokens_per_rank, spec.top_k
    return [
        *inbox_buffers(spec),
        signals_spec(spec.ep_size),
        notes_spec(),
        BufferSpec("input", (tokens, spec.hidden_dim), spec.dtype),
        BufferSpec("ids", (spec.ep_size, tokens, top_k), torch.int32),
        BufferSpec("scores", (spec.ep_size, tokens, top_k), torch.float32),
        BufferSpec("staging", (spec.ep_size, tokens, spec.hidden_dim), spec.dtype),
        BufferSpec("slips", (spec.ep_size, tokens, top_k), torch.float32),
    ]


def inbox_buffers(spec: TransportSpec) -> list[BufferSpec]:
    """Buffers for small batches, in the order of `small.Inbox`; none where its kernels do not serve."""
    if not serves_small(spec):
        return []
    tokens, top_k, halves = spec.num_max_tokens_per_rank, spec.top_k, (2, spec.ep_size)
    return [
        BufferSpec("inbox_rows", (*halves, tokens, spec.hidden_dim), spec.dtype),
        BufferSpec("inbox_places", (*halves, tokens, top_k), torch.int32),
        BufferSpec("inbox_scores", (*halves, tokens, top_k), torch.float32),
        BufferSpec("inbox_counts", (*halves, spec.num_local_experts), torch.int32),
    ]


def workspace_bytes(spec: TransportSpec) -> int:
    """Bytes of shared memory that one rank allocates when a dispatcher of this spec is opened, and no more later."""
    return place_buffers(buffers_of(spec))[1]


def refuse_too_large(spec: TransportSpec, limit: int) -> None:
    """Refuse a workspace above `limit` bytes before any of it is allocated: on a CPU it would be, page by page, later.

    Raises:
        BackendUnavailable: with both sizes and the largest `num_max_tokens_per_rank` that fits.
    """
    num_bytes, tokens = workspace_bytes(spec), spec.num_max_tokens_per_rank
    if num_bytes <= limit:
        return
    most = bisect_right(
        range(1, tokens), limit, key=lambda fewer: workspace_bytes(replace(spec, num_max_tokens_per_rank=fewer))
    )
    raise BackendUnavailable(
        "symmetric",
        f"num_max_tokens_per_rank ({tokens}) takes {num_bytes} bytes of shared memory on every rank, and there is room"
        f" for {limit}",
        f"set num_max_tokens_per_rank to {most} or less" if most else "not even one token fits",
    )
