"""The members of a dispatcher's group, whatever kind of group the caller passed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from ..errors import ConfigError


@runtime_checkable
class InProcessMember(Protocol):
    """One rank of a group that lives inside this process (see `crossdock.testing.LoopbackGroup`)."""

    rank: int
    size: int

    @property
    def store(self) -> Any:
        """A torch.distributed Store that the group's members share."""


@dataclass(frozen=True)
class Members:
    """Who is in the group, seen from one rank.

    Attributes:
        rank: this process's rank inside the group.
        global_ranks: ranks of the default group, by group rank.
        device: where the rows live; None where any device will do (one rank without torch.distributed).
        transport: "none" (one rank), "in_process", or what torch.distributed moves such rows with: "gloo" or "nccl".
            The group itself says who its members are and need not have it.
        store: the store of the default or in-process group; None where there is none.
        in_process: the member object of an in-process group.
    """

    rank: int
    global_ranks: tuple[int, ...]
    device: torch.device | None
    transport: str
    store: Any = None
    in_process: Any = None

    @property
    def size(self) -> int:
        return len(self.global_ranks)


def resolve_members(group: Any, device: torch.device | str | None) -> Members:
    """Find out who `group` is: a ProcessGroup, an in-process member, or None for the default group.

    Raises:
        ConfigError: this process is not in the group, or there is no such device.
    """
    wanted = _indexed(device)
    if group is not None and not isinstance(group, dist.ProcessGroup) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"this process (global rank {dist.get_rank()}) is not a member of the group it passed")
    if isinstance(group, InProcessMember) and not isinstance(group, dist.ProcessGroup):
        place = wanted or torch.device("cpu")
        return Members(group.rank, tuple(range(group.size)), place, "in_process", group.store, group)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Members(0, (0,), wanted, "none")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"group must be a torch.distributed ProcessGroup or None, got {type(group).__name__}")
    return _from_process_group(group, wanted)


def _from_process_group(group: dist.ProcessGroup | None, wanted: torch.device | None) -> Members:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(f"this process (global rank {dist.get_rank()}) is not a member of the group it passed")
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    device = wanted or _device_of(str(dist.get_backend_config(group)))
    transport = "nccl" if device.type == "cuda" else "gloo"
    return Members(rank, ranks, device, transport, store=dist.distributed_c10d._get_default_store())


def _indexed(device: torch.device | str | None) -> torch.device | None:
    """The device as tensors name theirs: a GPU has a number, the CPU has none."""
    if device is None:
        return None
    try:
        plain = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be one of torch's, such as 'cpu' or 'cuda', got {device!r}") from error
    if plain.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} was asked for, and torch sees no GPU here")
    if plain.type == "cuda" and plain.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if plain.type == "cpu" else plain


def _device_of(backends: str) -> torch.device:
    has_gpu = "nccl" in backends and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
