"""How the ranks of several groups find the largest of what each has, at one numbered step after the other.

A rank that does not come to a step is named to all others within `timeout_s` plus 5 s, as in a dispatcher's calls. It
is *in* a step from its beginning in all of its groups at once. So whoever waits in one of them is not taken for missing
in the others, and tells them why it gave up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import CrossdockError
from ..group.members import Members

Look = Callable[[], None]


class StepName(NamedTuple):
    """Which step ranks are in: its number, and which run of it.

    >>> str(StepName(3)), str(StepName(3).again())
    ('3', '3, run 2,')
    """

    number: int
    run: int = 1

    def again(self) -> StepName:
        """The next run of the same step."""
        return self._replace(run=self.run + 1)

    def __str__(self) -> str:
        return str(self.number) if self.run == 1 else f"{self.number}, run {self.run},"


class Agreement(ABC):
    """A group over which a guard agrees.

    Attributes:
        members: who is in it.
        alike: what its guard is to all ranks of the group, by name; they compare it at the first step.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self.alike: dict[str, Any] = {}

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """The same for two groups of the same ranks."""
        return id(self.members.store), self.members.global_ranks

    @abstractmethod
    def maximum(self, values: Tensor, look: Look, num_calls: int | None = None) -> None:
        """Put the largest value of all ranks in the place of each of `values` (int64); in a step.

        `look` is called while the host waits. `num_calls`, where it is given, is the same on all ranks that have come
        to the same point of training; where it is not, all ranks have to bring equally many values. Where the host does
        not wait, ranks that came to another step make the first of the values `APART`.

        Raises:
            PeerTimeout: ranks that did not come.
            ContractViolation: ranks that came to another step, or from another point of training. Whatever `look`
                raises.
        """

    def begin(self, step: StepName) -> None:
        """Come to a step, the first time by opening the group's session."""

    def end(self) -> None:
        """It has come to its end on this rank."""

    def give_up(self, why: str) -> None:
        """Leave the step, if this rank is still in it, for a reason that the group's other ranks cannot know."""

    def close(self) -> None:
        """Answer no more. Idempotent, and waits for nobody's step."""


@contextmanager
def come_to(step: StepName, agreements: Sequence[Agreement], look: Look) -> Iterator[None]:
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
