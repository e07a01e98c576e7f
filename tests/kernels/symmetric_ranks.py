"""Several ranks' shared memory inside one test: ordinary tensors, and tables of their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def table_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses `[ep_size]` int64."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def random_ids(
    generator: torch.Generator, num_tokens: Sequence[int], top_k: int, num_experts: int
) -> list[torch.Tensor]:
    """Ids `[T, K]` int64 by rank, -1 and repeats among them."""
    return [torch.randint(-1, num_experts, (tokens, top_k), generator=generator) for tokens in num_tokens]


def on_shelf(parts: Sequence[torch.Tensor], max_tokens: int) -> list[torch.Tensor]:
    """Each part at the head of something with `max_tokens` rows; what stands behind it is never right."""
    shelves = []
    for part in parts:
        rest = part.new_full((max_tokens - part.shape[0], *part.shape[1:]), 3)
        shelves.append(torch.cat([part, rest]))
    return shelves


def homes(ids: torch.Tensor, num_local: int) -> torch.Tensor:
    """Rank of every slot's expert, int32, -1 for none."""
    return torch.where(ids < 0, -1, ids // num_local).to(torch.int32)
