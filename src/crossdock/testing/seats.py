"""A seat: one rank's place in a run of the suite, whether ranks are threads, processes, or `torchrun`'s."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from .. import Backend, TokenDispatcher, explain
from ..backends.base import BackendTraits
from ..backends.loopback import LoopbackGroup
from ..errors import BackendUnavailable, ConfigError
from ..types import DispatcherConfig
from .problems import Problem
from .ranks import RankPool
from .workloads import FACTORS, NotOffered, Workload

Result = TypeVar("Result")


def traits_of(backend: str | Backend) -> BackendTraits:
    """The traits of a backend, which is named or given.

    Raises:
        ConfigError: no backend has this name.
        BackendUnavailable: it offers no device at all, as one that cannot be loaded or that cannot tell its traits.

    """
    if not isinstance(backend, str):
        return backend.traits
    config = DispatcherConfig(num_experts=1, top_k=1, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=1)
    known = {candidate.name: candidate for candidate in explain(config, LoopbackGroup(1).member(0)).candidates}
    if backend not in known:
        raise ConfigError(f"unknown backend {backend!r}; known are {', '.join(map(repr, known))}")
    traits = known[backend].traits
    if not traits.devices:
        raise BackendUnavailable(backend, known[backend].why_not or "its traits name no device")
    return traits


class Groups(Protocol):
    """Makes groups of some of the ranks. Every rank of the world asks for the same ones in the same order."""

    def of(self, ranks: tuple[int, ...], rank: int) -> Any:
        """What `rank` passes to its dispatcher as the group of `ranks`, in that order if torch can; None outside it."""


@dataclass(frozen=True, eq=False)
class Seat:
    """One rank of a world.

    Attributes:
        rank: of the world.
        size: ranks of the world.
        backend: what dispatchers are opened with: a name or a `Backend`.
        device: where the tensors are.
        groups: see `Groups`.

    """

    rank: int
    size: int
    backend: Any
    device: torch.device
    groups: Groups

    def group(self, ranks: Sequence[int] | None = None) -> Any:
        """A group of some ranks, in that order; of all without `ranks`. None if this rank is not in it. Collective."""
        return self.groups.of(tuple(range(self.size) if ranks is None else ranks), self.rank)

    @cached_property
    def traits(self) -> BackendTraits:
        """Of the backend."""
        return traits_of(self.backend)

    def problem(self, routing: str, ep_size: int | None = None, **choices: Any) -> Problem:
        """A workload of this backend, for `ep_size` ranks or all: what is not chosen is as in `Workload`, if offered.

        Raises:
            NotOffered: a trait that the backend lacks keeps it from running this; on every rank alike.
        """
        traits, given = self.traits, Workload(ep_size=ep_size or self.size, routing=routing)
        offered = {"dtype": traits.dtypes, "reduction": traits.reductions}
        for name, values in offered.items():
            usual = getattr(given, name)
            choices.setdefault(name, next((value for value in (usual, *FACTORS[name]) if value in values), usual))
        workload = dataclasses.replace(given, **choices).fitted(traits)
        missing = workload.missing_trait(traits, self.device.type)
        if missing is not None:
            raise NotOffered(missing)
        return workload.problem()

    def open(self, config: DispatcherConfig, group: Any = None) -> TokenDispatcher:
        """Open a dispatcher over `group`, or over all ranks. Collective over the group."""
        return TokenDispatcher(config, self.group() if group is None else group, self.backend, device=self.device)


class ThreadGroups:
    """Groups of ranks that are threads of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[int, ...], LoopbackGroup] = {}

    def of(self, ranks: tuple[int, ...], rank: int) -> Any:
        """See `Groups`."""
        with self._lock:
            group = self._made.setdefault(ranks, LoopbackGroup(len(ranks)))
        return group.member(ranks.index(rank)) if rank in ranks else None


@dataclass
class ProcessGroups:
    """Groups of ranks of torch.distributed's default group, each made once."""

    _made: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def of(self, ranks: tuple[int, ...], rank: int) -> Any:
        """See `Groups`."""
        if ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        if ranks not in self._made:
            # torch before 2.13 sorts the ranks of every group, and cannot be asked not to.
            unsorted: dict[str, Any] = (
                {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
            )
            self._made[ranks] = dist.new_group(list(ranks), **unsorted)
        return self._made[ranks] if rank in ranks else None


_process_groups = ProcessGroups()


def seat_of_process(backend: Any, device: torch.device | None = None) -> Seat:
    """The seat of a process that has joined torch.distributed's default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if device is None:
        on_gpu = "nccl" in str(dist.get_backend_config())
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Seat(rank, size, backend, device, _process_groups)


class Runner(Protocol):
    """Calls a function on a seat of every rank: `runner(fn, *args)` is `fn(seat, *args)` by rank."""

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""

    def __call__(self, fn: Callable[..., Result], *args: Any, timeout_s: float = 60.0) -> list[Result]:
        """Results by rank. Raises what `RankPool.run` raises, or a thread's own exception."""


@dataclass(frozen=True, eq=False)
class PoolRunner:
    """Ranks that are processes of a pool."""

    pool: RankPool
    backend: Any = "all_to_all"

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.pool.num_ranks

    def __call__(self, fn: Callable[..., Result], *args: Any, timeout_s: float = 60.0) -> list[Result]:
        """See `Runner`."""
        return self.pool.run(_on_process_seat, fn, self.backend, self.pool.device_type, args, timeout_s=timeout_s)


def _on_process_seat(
    rank: int, fn: Callable[..., Result], backend: Any, device_type: str, args: tuple[Any, ...]
) -> Result:
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    return fn(seat_of_process(backend, device), *args)


@dataclass(frozen=True, eq=False)
class ThreadRunner:
    """Ranks that are threads of this process."""

    num_ranks: int
    backend: Any = "loopback"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __call__(self, fn: Callable[..., Result], *args: Any, timeout_s: float = 60.0) -> list[Result]:
        """See `Runner`; of several exceptions the first rank's that is not a consequence."""
        groups = ThreadGroups()
        seats = [Seat(rank, self.num_ranks, self.backend, self.device, groups) for rank in range(self.num_ranks)]
        with ThreadPoolExecutor(self.num_ranks) as threads:
            calls = [threads.submit(fn, seat, *args) for seat in seats]
            faults = [
                (isinstance(fault, TimeoutError), fault) for call in calls if (fault := call.exception()) is not None
            ]
        if faults:
            raise min(faults, key=lambda pair: pair[0])[1]
        return [call.result() for call in calls]
