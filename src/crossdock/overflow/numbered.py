"""A guard's group on the host: its ranks gather what each brings, in steps that are numbered and bounded.

Each group has a session (`group/session.py`) and a communicator of its own, both opened at the first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ContractViolation, CrossdockError
from ..group.faults import TransportFault
from ..group.fingerprint import CallFacts, odd_ranks
from ..group.gloo import OwnGloo, first_line
from ..group.members import Members
from ..group.purpose import GUARD
from ..group.session import Session
from .agree import Agreement, Look, StepName

_POLL_S = 0.0002
_GLOO_MARGIN_S = 5.0  # Gloo's own limit lies this far behind ours
_CLOSE_S = 1.0  # a step that never came to its end may keep Gloo busy for longer
_RANKS_TOLD = 16


class Numbered(Agreement):
    """Gathers what all ranks bring, in steps that are numbered and bounded."""

    def __init__(self, members: Members, timeout_s: float) -> None:
        super().__init__(members)
        self._timeout_s = timeout_s
        self._session: Session | None = None
        self._inside: CallFacts | None = None
        self._step = StepName(0)
        self._gather: Callable[[Tensor, Look], list[Tensor]]
        self._gloo: OwnGloo | None = None

    def begin(self, step: StepName) -> None:
        if self._session is None:
            self._session = self._open()
        self._step = step
        named = f"{step} (global ranks {_ranks_in_words(self.members)})"
        self._inside = self._session.begin(CallFacts(-1, GUARD.operation, named))

    def maximum(self, values: Tensor, look: Look, num_calls: int | None = None) -> None:
        num_words = len(self._step)
        if num_calls is not None:
            heads = torch.stack(self._gathered(torch.tensor([*self._step, num_calls, values.numel()]), look))
            self._compare_steps(heads[:, :num_words])
            self._compare(heads[:, num_words:])
            values.copy_(torch.stack(self._gathered(values, look)).amax(0))
        else:
            brought = torch.stack(self._gathered(torch.cat([values.new_tensor(self._step), values]), look))
            self._compare_steps(brought[:, :num_words])
            values.copy_(brought[:, num_words:].amax(0))

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

    def _compare_steps(self, heads: Tensor) -> None:
        """Refuse ranks that came to another step: `[size, len(StepName)]`, as that is a tuple."""
        step_of_rank = {rank: StepName(*head) for rank, head in enumerate(heads.tolist())}
        odd = odd_ranks(step_of_rank)
        if odd:
            steps = sorted(set(step_of_rank.values()))
            told = (f"step {step} on ranks {[r for r, at in step_of_rank.items() if at == step]}" for step in steps)
            violation = ContractViolation(
                f"ranks {odd} came to another step of an overflow guard than the others (global ranks"
                f" {_ranks_in_words(self.members)}): {'; '.join(told)}; a closure that raises on one rank has to end"
                " the step on all",
                odd,
            )
            raise self._meaning(violation)

    def _compare(self, heads: Tensor) -> None:
        """Refuse ranks from another point of training: `[size, 2]`, numbers of calls and of values."""
        odd = odd_ranks({rank: tuple(head) for rank, head in enumerate(heads.tolist())})
        if odd:
            calls = heads[:, 0].tolist()
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
