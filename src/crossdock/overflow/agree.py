"""How the ranks of a group find the largest of what each has; on a GPU the host does not wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import PeerTimeout
from ..group.faults import TransportFault
from ..group.members import Members, resolve_members

_POLL_S = 0.0002


@dataclass(frozen=True, eq=False)
class Agreement:
    """A group over which a guard agrees.

    Attributes:
        members: who is in it.
        timeout_s: how long its ranks wait for each other, where the host waits.
    """

    members: Members
    timeout_s: float
    _reduce: Callable[[Tensor, Callable[[], None]], None] = field(repr=False)

    @classmethod
    def over(cls, group: Any, timeout_s: float) -> Agreement:
        """Of a group as a dispatcher takes it: a ProcessGroup, an in-process member, or None. Collective.

        Raises:
            ConfigError: this process is not in the group, or it is none.
        """
        members = resolve_members(group, None)
        if members.size == 1:
            return cls(members, timeout_s, _alone)
        if members.in_process is not None:
            return cls(members, timeout_s, _in_process(members.in_process, timeout_s))
        return cls(members, timeout_s, _over_processes(group, timeout_s))

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """The same for two groups of the same ranks."""
        return id(self.members.store), self.members.global_ranks

    def maximum(self, values: Tensor, look: Callable[[], None]) -> None:
        """Put the largest value of all ranks in the place of each of `values`; `look` is called while the host waits.

        Raises:
            PeerTimeout: ranks that did not come. Whatever `look` raises.
        """
        self._reduce(values, look)


def _alone(values: Tensor, look: Callable[[], None]) -> None:
    """One rank has the largest."""


def _in_process(member: Any, timeout_s: float) -> Callable[[Tensor, Callable[[], None]], None]:
    reduce_max = member.reduction(timeout_s)

    def reduce(values: Tensor, look: Callable[[], None]) -> None:
        try:
            reduce_max(values)
        except TransportFault as fault:
            look()
            raise _late(timeout_s, str(fault), fault.blamed) from fault

    return reduce


def _over_processes(group: Any, timeout_s: float) -> Callable[[Tensor, Callable[[], None]], None]:
    def reduce(values: Tensor, look: Callable[[], None]) -> None:
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None  # this process is a member
        if not (values.is_cuda and "nccl" in str(dist.get_backend_config(group))):
            deadline = time.monotonic() + timeout_s
            while not work.is_completed():
                look()
                if time.monotonic() > deadline:
                    raise _late(timeout_s, "its exchange did not finish")
                time.sleep(_POLL_S)
        try:
            work.wait()  # under NCCL the stream waits, not the host
        except RuntimeError as error:
            look()
            raise _late(timeout_s, str(error)) from error

    return reduce


def _late(timeout_s: float, why: str, blamed: tuple[int, ...] = ()) -> PeerTimeout:
    return PeerTimeout(
        f"not every rank of a guard's groups has come to this optimizer step (timeout_s is {timeout_s:g}): {why}",
        blamed,
    )
