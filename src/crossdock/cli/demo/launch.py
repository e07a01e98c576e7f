"""Where the demo runs: on ranks it starts on this machine, or on those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from crossdock.errors import ConfigError
from crossdock.testing import RankPool

from ..torchrun import ranks_of_torchrun
from .settings import TIMEOUT_S

Result = TypeVar("Result")

_A_WEEK_S = 7 * 24 * 3600.0  # a rank that dies or hangs ends the demo long before: by its exit, or by TIMEOUT_S


class Ranks(Protocol):
    """Ranks of one world that run functions `fn(rank, *args)` whose result is the same on every rank.

    Attributes:
        size: how many.
        leads: whether this process tells the user what happens.
    """

    size: int
    leads: bool

    def run(self, fn: Callable[..., Result], *args: Any) -> Result:
        """Run `fn(rank, *args)` on every rank and return its result."""


class StartedRanks:
    """Ranks that this process starts; on GPUs where there are enough, else on the CPU with Gloo."""

    leads = True

    def __init__(self, pool: RankPool) -> None:
        self._pool, self.size = pool, pool.num_ranks

    def run(self, fn: Callable[..., Result], *args: Any) -> Result:
        """Run `fn(rank, *args)` on every rank and return rank 0's result."""
        return self._pool.run(fn, *args, timeout_s=_A_WEEK_S)[0]


class TorchrunRanks:
    """The ranks of torchrun, this process among them."""

    def __init__(self) -> None:
        self._rank, self.size = dist.get_rank(), dist.get_world_size()
        self.leads = self._rank == 0

    def run(self, fn: Callable[..., Result], *args: Any) -> Result:
        """Run `fn(rank, *args)` here, as every other rank does."""
        return fn(self._rank, *args)


@contextmanager
def started_ranks(num_ranks: int) -> Iterator[StartedRanks]:
    """Ranks of this machine for the time of a `with`; all are killed at once if it ends by an error or Ctrl-C."""
    backend = "nccl" if torch.cuda.device_count() >= num_ranks else "gloo"
    with RankPool(num_ranks, backend=backend) as pool:
        yield StartedRanks(pool)


@contextmanager
def torchrun_ranks() -> Iterator[TorchrunRanks]:
    """The world of torchrun for the time of a `with`; every rank enters."""
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    on_gpus = torch.cuda.device_count() >= on_this_host
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))) if on_gpus else None
    if device is not None:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # as started ranks: what a CPU adds up can depend on it
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=10 * TIMEOUT_S), device_id=device)
    try:
        yield TorchrunRanks()
    finally:
        dist.destroy_process_group()


def choose_num_ranks(asked: int | None, num_experts: int) -> int:
    """How many ranks train: as asked, as torchrun has, all GPUs, or two on the CPU.

    Raises:
        ConfigError: a number that cannot work, in a sentence that says which could.
    """
    by_torchrun, num_gpus = ranks_of_torchrun(asked), torch.cuda.device_count()
    possible = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    if by_torchrun is not None:
        asked, named = by_torchrun, f"torchrun's {by_torchrun} ranks"
    elif asked is None:
        return max(n for n in possible if n <= num_gpus) if num_gpus else 2
    else:
        named = f"--ranks {asked}"
        if num_gpus and asked > num_gpus:
            raise ConfigError(
                f"--ranks {asked} is more than the {num_gpus} GPUs of this machine; hide them to use the CPU"
            )
    if asked not in possible:
        raise ConfigError(f"{named} must divide the model's {num_experts} experts: {', '.join(map(str, possible))}")
    return asked
