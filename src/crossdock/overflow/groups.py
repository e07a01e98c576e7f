"""The groups that a guard agrees over: which they are, and how each of them does.

Over NCCL the host does not wait, and a step is a collective of the caller's group: what bounds it is that group's own
timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerTimeout
from ..group.gloo import first_line
from ..group.members import Members, resolve_members
from .agree import Agreement, Look, StepName
from .arguments import listed
from .numbered import Numbered
from .report import APART


def agreement_over(group: Any, device: torch.device, timeout_s: float) -> Agreement:
    """The agreement over a group as a dispatcher takes it: a ProcessGroup, an in-process member, or None.

    `device` is where the values lie; `timeout_s` bounds how long the host waits for other ranks, where it does.

    Raises:
        ConfigError: this process is not in the group, or it is none.
    """
    members = resolve_members(group, None)
    if members.size == 1:
        return _Alone(members)
    if members.in_process is None and device.type == "cuda" and "nccl" in str(dist.get_backend_config(group)):
        return _OverNccl(members, group)
    return Numbered(members, timeout_s)


def wider(own: list[Agreement], groups: Sequence[Any], device: torch.device, timeout_s: float) -> list[Agreement]:
    """Over the given groups; not over the dispatchers' own where they have only one, for that is agreed already."""
    agreements = [agreement_over(group, device, timeout_s) for group in listed(groups)]
    for place, agreement in enumerate(agreements):  # one after the other, so ranks that turn them round would miss news
        agreement.alike = {"place in groups": place}
    known = {agreement.key for agreement in own}
    return [each for each in agreements if each.members.size > 1 and (len(known) > 1 or each.key not in known)]


def by_key(agreements: list[Agreement]) -> list[list[int]]:
    """Places of those over the same ranks, in order."""
    places: dict[Any, list[int]] = {}
    for i, agreement in enumerate(agreements):
        places.setdefault(agreement.key, []).append(i)
    return list(places.values())


class _Alone(Agreement):
    """One rank has the largest."""

    def maximum(self, values: Tensor, look: Look, num_calls: int | None = None) -> None:
        pass


class _OverNccl(Agreement):
    """A collective of the caller's group, for which the stream waits."""

    def __init__(self, members: Members, group: Any) -> None:
        super().__init__(members)
        self._group = group
        self._step = StepName(0)

    def begin(self, step: StepName) -> None:
        self._step = step

    def maximum(self, values: Tensor, look: Look, num_calls: int | None = None) -> None:
        step = self._step.number << 32 | self._step.run
        joined = torch.cat([values, *(values.new_full((1,), word) for word in (step, -step))])
        try:
            dist.all_reduce(joined, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            look()
            raise PeerTimeout(f"the ranks of a guard's group cannot agree over NCCL: {first_line(error)}") from error
        values.copy_(joined[:-2])
        is_apart = joined[-2] != -joined[-1]  # the largest and the smallest of all ranks' steps
        values[:1] = torch.where(is_apart, APART, values[:1])
