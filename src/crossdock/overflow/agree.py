"""How the ranks of several groups find the largest of what each has, at one numbered step after the other.

A rank that does not come to a step is named to all others within `timeout_s` plus 5 s, as in a dispatcher's calls: each
group has a session (`group/session.py`) and a communicator of its own, both opened at the first step. A rank is *in* a
step from its beginning in all of its groups at once. So whoever waits in one of them is not taken for missing in the
others, and tells them why it gave up.

Over NCCL the host does not wait, and a step is a collective of the caller's group: what bounds it is that group's own
timeout.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ContractViolation, CrossdockError, PeerTimeout
from ..group.faults import TransportFault
from ..group.fingerprint import CallFacts, odd_ranks
from ..group.gloo import OwnGloo, first_line
from ..group.members import Members, resolve_members
from ..group.purpose import GUARD
from ..group.session import Session

_POLL_S = 0.0002
_GLOO_MARGIN_S = 5.0  # Gloo's own limit lies this far behind ours
_CLOSE_S = 1.0  # a step that never came to its end may keep Gloo busy for longer
_RANKS_TOLD = 16

Look = Callable[[], None]


class Agreement(ABC):
    """A group over which a guard agrees.

    Attributes:
        members: who is in it.
        alike: what its guard is to all ranks of the group, by name; they compare it at the first step.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self.alike: dict[str, Any] = {}

    @classmethod
    def over(cls, group: Any, device: torch.device, timeout_s: float) -> Agreement:
        """Of a group as a dispatcher takes it: a ProcessGroup, an in-process member, or None.

        `device` is where the values lie; `timeout_s` bounds how long the host waits for other ranks, where it does.

        Raises:
            ConfigError: this process is not in the group, or it is none.
        """
        members = resolve_members(group, None)
        if members.size == 1:
            return _Alone(members)
        if members.in_process is None and device.type == "cuda" and "nccl" in str(dist.get_backend_config(group)):
            return _OverNccl(members, group)
        return _Numbered(members, timeout_s)

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """The same for two groups of the same ranks."""
        return id(self.members.store), self.members.global_ranks

    @abstractmethod
    def maximum(self, values: Tensor, look: Look, num_calls: int | None = None) -> None:
        """Put the largest value of all ranks in the place of each of `values` (int64); in a step.

        `look` is called while the host waits. `num_calls`, where it is given, is the same on all ranks that have come
        to the same point of training; where it is not, all ranks have to bring equally many values.

        Raises:
            PeerTimeout: ranks that did not come.
            ContractViolation: ranks that came from another point of training. Whatever `look` raises.
        """

    def begin(self, step: str) -> None:
        """Come to a step, the first time by opening the group's session."""

    def end(self) -> None:
        """It has come to its end on this rank."""

    def give_up(self, why: str) -> None:
        """Leave the step, if this rank is still in it, for a reason that the group's other ranks cannot know."""

    def close(self) -> None:
        """Answer no more. Idempotent, and waits for nobody's step."""


@contextmanager
def come_to(step: str, agreements: Sequence[Agreement], look: Look) -> Iterator[None]:
    """Be in a step of every group at once.

    Raises:
        PeerTimeout, ContractViolation: of an earlier step, or of this one. What `look` raises goes first.
    """
    begun: list[Agreement] = []
    try:
        for agreement in agreements:
            try:
                agreement.begin(step)
            except CrossdockError:
                look()
                raise
            begun.append(agreement)
        yield
    except BaseException as error:
        for agreement in begun:
            agreement.give_up(f"{type(error).__name__}: {error}")
        raise
    for agreement in begun:
        agreement.end()


class _Alone(Agreement):
    """One rank has the largest."""

    def maximum(self, values: Tensor, look: Look, num_calls: int | None = None) -> None:
        pass


class _OverNccl(Agreement):
    """A collective of the caller's group, for which the stream waits."""

    def __init__(self, members: Members, group: Any) -> None:
        super().__init__(members)
        self._group = group

    def maximum(self, values: Tensor, look: Look, num_calls: int | None = None) -> None:
        try:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            look()
            raise PeerTimeout(f"the ranks of a guard's group cannot agree over NCCL: {first_line(error)}") from error


class _Numbered(Agreement):
    """Gathers what all ranks bring, in steps that are numbered and bounded."""

    def __init__(self, members: Members, timeout_s: float) -> None:
        super().__init__(members)
        self._timeout_s = timeout_s
        self._session: Session | None = None
        self._inside: CallFacts | None = None
        self._gather: Callable[[Tensor, Look], list[Tensor]]
        self._gloo: OwnGloo | None = None

    def begin(self, step: str) -> None:
        if self._session is None:
            self._session = self._open()
        named = f"{step} (global ranks {_ranks_in_words(self.members)})"
        self._inside = self._session.begin(CallFacts(-1, GUARD.operation, named))

    def maximum(self, values: Tensor, look: Look, num_calls: int | None = None) -> None:
        if num_calls is not None:
            heads = self._gathered(torch.tensor([num_calls, values.numel()]), look)
            self._compare([tuple(head.tolist()) for head in heads])
        values.copy_(torch.stack(self._gathered(values, look)).amax(0))

    def end(self) -> None:
        inside, self._inside = self._inside, None
        if self._session is not None and inside is not None:
            self._session.end(inside, None)

    def give_up(self, why: str) -> None:
        inside, self._inside = self._inside, None
        if self._session is not None and inside is not None:
            self._session.give_up(inside, why)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._gloo is not None:
            self._gloo.close(_CLOSE_S)

    def _open(self) -> Session:
        session = Session.open(self.members, self.alike, self._timeout_s, GUARD)
        try:
            with session.call(CallFacts(-1, GUARD.operation, "opening")):
                self._connect(session)
        except BaseException:
            session.close()
            raise
        return session

    def _connect(self, session: Session) -> None:
        assert session.opening is not None  # of several ranks
        prefix = session.opening.prefix
        if self.members.in_process is not None:
            gather = self.members.in_process.gathering(prefix, self._timeout_s)
            self._gather = lambda values, _: gather(values)
        else:
            self._gloo = OwnGloo(self.members, prefix, self._timeout_s + _GLOO_MARGIN_S)
            self._gather = self._gather_over_gloo

    def _gathered(self, values: Tensor, look: Look) -> list[Tensor]:
        try:
            return self._gather(values, look)
        except TransportFault as fault:
            look()  # why they do not come, if this rank knows it
            raise self._meaning(fault) from fault

    def _gather_over_gloo(self, values: Tensor, look: Look) -> list[Tensor]:
        assert self._session is not None and self._gloo is not None  # opened
        deadline, own = time.monotonic() + self._timeout_s, values.cpu()
        came = [torch.empty_like(own) for _ in range(self.members.size)]
        try:
            work = self._gloo.group.allgather([came], [own])
        except RuntimeError as error:
            raise TransportFault(first_line(error)) from error
        while not work.is_completed():
            look()
            if self._session.state.verdict is not None:
                raise TransportFault("other ranks have given up")
            if time.monotonic() > deadline:
                raise TransportFault(f"an exchange did not finish within {self._timeout_s:g} s", expired=True)
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise TransportFault(first_line(error)) from error
        return [part.to(values.device) for part in came]

    def _compare(self, heads: list[tuple[int, ...]]) -> None:
        odd = odd_ranks(dict(enumerate(heads)))
        if odd:
            calls = [head[0] for head in heads]
            violation = ContractViolation(
                f"ranks {odd} came to {self._inside} from another point of training than the others: their dispatchers"
                f" had made {calls} calls before it, by rank; every rank has to call guard.step() at the same points",
                odd,
            )
            raise self._meaning(violation)

    def _meaning(self, error: TransportFault | ContractViolation) -> CrossdockError:
        """Leave the step by a fault; what it means."""
        assert self._session is not None and self._inside is not None  # in a step
        inside, self._inside = self._inside, None
        try:
            self._session.end(inside, error)
        except CrossdockError as fault:
            return fault
        raise AssertionError("a fault ends a step")


def _ranks_in_words(members: Members) -> str:
    ranks = members.global_ranks
    if len(ranks) <= _RANKS_TOLD:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
