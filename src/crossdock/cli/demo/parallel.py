"""What the demo's ranks do together beside the dispatcher: sums in rank order, texts, and the sharded sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

_TEXT_BYTES = 600


def device_of_rank(group: Any = None) -> torch.device:
    """Where this rank's tensors of a group live: its GPU under NCCL, else the CPU."""
    on_gpu = "nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def gathered(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Every rank's tensor, by rank; all of one shape."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group)
    return parts


def summed_in_rank_order(tensor: Tensor, group: Any = None) -> Tensor:
    """The sum over ranks 0, 1, 2, ... in that order: the same bits on every rank, and however often it is run."""
    first, *others = gathered(tensor, group)
    for part in others:
        first += part
    return first


def gathered_texts(text: str, group: Any = None) -> list[str]:
    """Every rank's text, by rank, cut at 600 bytes; sent as bytes, never as a pickle."""
    content = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device_of_rank(group))
    parts = gathered(mine, group)
    return [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in parts]


@dataclass(frozen=True)
class SequenceSharding:
    """How a tensor-parallel group shares a sequence: each rank holds `ceil(length / size)` tokens, the last one fewer.

    Size 1 is the whole sequence on one rank.

    Attributes:
        length: tokens of the whole sequence.
        rank: this rank within the group.
        size: ranks of the group.
        group: their process group; None for size 1.
    """

    length: int
    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def width(self) -> int:
        """Tokens of the longest shard."""
        return -(-self.length // self.size)

    @property
    def shard(self) -> slice:
        """The tokens of this rank."""
        return slice(self.rank * self.width, min((self.rank + 1) * self.width, self.length))

    def whole(self, x: Tensor) -> Tensor:
        """The whole sequence `[B, length, D]` from this rank's shard `[B, s, D]`."""
        if self.size == 1:
            return x
        padded = torch.nn.functional.pad(x, (0, 0, 0, self.width - x.shape[1]))
        shards = self._exchange(padded.expand(self.size, *padded.shape))
        return shards.transpose(0, 1).flatten(1, 2)[:, : self.length]

    def shard_of_sum(self, partial: Tensor) -> Tensor:
        """The shard `[B, s, D]` of this rank, of the sum in rank order of all ranks' `[B, length, D]`."""
        if self.size == 1:
            return partial
        padded = torch.nn.functional.pad(partial, (0, 0, 0, self.size * self.width - self.length))
        total, *others = self._exchange(padded.unflatten(1, (self.size, self.width)).transpose(0, 1)).unbind()
        for part in others:
            total = total + part
        return total[:, : self.shard.stop - self.shard.start]

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part p goes to rank p; returns what came, by rank. Its own adjoint, so both directions are one call."""
        flat = parts.reshape(self.size, -1).contiguous()
        came = all_to_all_single_autograd(flat, None, None, self.group)
        return came.reshape(parts.shape)
