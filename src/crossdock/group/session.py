"""The life of one opened dispatcher, or of a guard's group, among its peers: call numbers, first fault, and end."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..errors import CapacityOverflow, ContractViolation, CrossdockError, InvalidInput, PeerTimeout
from .addresses import Address, own_hosts
from .diagnosis import Verdict, agree_on, diagnose
from .faults import TransportFault
from .fingerprint import CallFacts, compare, in_words
from .members import Members
from .purpose import DISPATCHER, Purpose
from .rendezvous import Opening, open_together
from .status import CallState, StatusServer, find_all
from .store import store_endpoint, store_fault

_AT_ONCE_S = 1.0  # a shorter wait is none that anybody notices


@dataclass
class Session:
    """What a dispatcher, or a guard in one group, shares with its peers. Owns the status endpoint; `close` ends it."""

    members: Members
    timeout_s: float
    purpose: Purpose = DISPATCHER
    opening: Opening | None = None
    server: StatusServer | None = None
    peers: tuple[Address, ...] = ()

    def __post_init__(self) -> None:
        self.state = CallState()
        self.fault: CrossdockError | None = None
        self.num_calls = -1  # the opening of the transport is call -1
        self._entry = threading.Lock()
        self._aside, self._aside_since = "", 0.0  # what is inside without being a call, and since when
        self._pid = os.getpid()

    @classmethod
    def open(cls, members: Members, agree: dict[str, Any], timeout_s: float, purpose: Purpose = DISPATCHER) -> Session:
        """Meet the peers; `agree` holds what every rank must ask for alike, by name.

        Raises:
            PeerTimeout, ContractViolation: see `open_together`.
        """
        session = cls(members, timeout_s, purpose)
        if members.store is None or members.size == 1:
            return session
        if members.transport == "in_process":
            session.opening = open_together(members, {"agree": agree}, timeout_s, purpose)
            return session
        session.server = StatusServer(session.state, own_hosts(store_endpoint(members.store)[0]))
        try:
            offer = {"agree": agree, "address": session.server.address.as_dict()}
            session.opening = open_together(members, offer, timeout_s, purpose)
            session._find_peers([Address.from_dict(other["address"]) for other in session.opening.offers])
        except BaseException:
            session.server.close()
            raise
        return session

    def call(self, facts: CallFacts) -> InCall:
        """Run one operation: number it, keep second threads out, and turn a transport's fault into its meaning.

        The context gives the facts with their number; `state.words` are its words.

        Raises:
            ContractViolation, PeerTimeout: this call's fault, or the first one of this session again.
        """
        return InCall(self, facts)

    def begin(self, facts: CallFacts) -> CallFacts:
        """Enter a call, see `call`; the facts with their number."""
        self._let_in(facts.operation, facts.layer)
        try:
            self.raise_fault()
            return self._enter(facts)
        except BaseException:
            self._entry.release()
            raise

    @contextmanager
    def aside(self, operation: str) -> Iterator[None]:
        """Inside like a call, for what is none of the group's, and so has no number.

        Raises:
            ContractViolation: a forked child or a second thread, as in `call`.
        """
        self._let_in(operation)
        self._aside, self._aside_since = operation, time.monotonic()
        try:
            yield
        finally:
            self._aside = ""
            self._entry.release()

    def end(self, numbered: CallFacts, error: BaseException | None) -> None:
        """Leave a call, which `error` may have ended."""
        try:
            if error is not None:
                self._fail(numbered, error)
            else:
                self.num_calls += 1
                self.state.move_to("idle")
        finally:
            self._entry.release()

    def verify(self, words_by_rank: Sequence[Sequence[int]]) -> None:
        """Compare what all ranks sent as this call's fingerprint; see `fingerprint.compare`."""
        compare(words_by_rank)

    def raise_fault(self) -> None:
        """Raise the first fault again, if there was one: this rank's own, or one that a peer has told it of."""
        self._hear()
        if self.fault is None and self.state.verdict is not None:
            self.fault = self._fault_of(Verdict.from_dict(self.state.verdict))
            self.state.move_to("faulted")
        if self.fault is not None:
            raise copy.copy(self.fault)  # a fresh one: a traceback would keep the tensors of the failed call alive
        if self.state.phase == "closed":
            raise ContractViolation(f"this {self.purpose.name} is closed")

    def probe(self, look: Callable[[], None]) -> None:
        """Let a transport look at calls for which no host has waited; what it raises becomes the session's fault.

        Raises:
            ContractViolation, PeerTimeout: see `call`.
        """
        try:
            look()
        except (TransportFault, ContractViolation) as error:
            self._fail(CallFacts(self.state.call, self.state.operation, self.state.layer), error)

    def expire(self, facts: CallFacts | None, failed_after_s: float | None = None) -> None:
        """Work of a call is overdue on the device: find out who is missing. Called by a watch, from its own thread.

        With `failed_after_s` it has failed so long after it began, before it was overdue: nobody is late yet.
        """
        call = facts or CallFacts(self.state.call, self.state.operation, self.state.layer)
        if failed_after_s is None:
            lost, waited_s = TransportFault("its work on the device did not finish", expired=True), self.timeout_s
        else:
            lost, waited_s = TransportFault("its work on the device failed", expired=False), failed_after_s
        self.fault = self.fault or self._explain(call, lost, waited_s)
        self.state.move_to("faulted")

    def break_off(self, overflow: str) -> None:
        """Give up because rows were dropped, and tell every peer: all raise the same; `raise_fault` does here."""
        self._tell(Verdict((self.members.rank,), overflow=overflow))

    def give_up(self, numbered: CallFacts, why: str) -> None:
        """Leave a call for a reason that its peers cannot know, and tell them; raises nothing."""
        waited_s = round(time.monotonic() - self.state.since, 1)
        try:
            self._tell(Verdict((), (f"rank {self.members.rank}: it gave up: {why}",), str(numbered), waited_s))
        finally:
            self._entry.release()

    def _tell(self, verdict: Verdict) -> None:
        """Make a verdict the session's fault, on every rank, unless there is another one."""
        if self.peers:
            verdict = agree_on(verdict, range(len(self.peers)), self.members.rank, self.peers, self.state)
        elif (key := self._told_key) is not None:
            text = bytes(self.members.store.compare_set(key, "", json.dumps(verdict.as_dict()))).decode()
            verdict = Verdict.from_dict(self.state.propose(json.loads(text)))
        self.fault = self.fault or self._fault_of(verdict)
        self.state.move_to("faulted")

    def _hear(self) -> None:
        """Among the ranks of one process there is nobody to ask: who gives up leaves word in their store."""
        key = self._told_key
        if key is not None and self.state.verdict is None and self.members.store.check([key]):
            self.state.propose(json.loads(bytes(self.members.store.get(key)).decode()))

    @property
    def _told_key(self) -> str | None:
        return f"{self.opening.prefix}/told" if self.opening is not None and self.server is None else None

    def close(self) -> None:
        """Stop answering peers."""
        self.state.move_to("closed")
        if self.server is not None:
            self.server.close()

    def _let_in(self, operation: str, layer: str | None = None) -> None:
        """Keep forked children and second threads out; whoever is let in releases `_entry`."""
        if os.getpid() != self._pid:
            raise ContractViolation(
                f"this {self.purpose.name} was opened by process {self._pid}; a forked child ({os.getpid()}) cannot use"
                " it"
            )
        if not self._entry.acquire(blocking=False):
            state, what = self.state, operation if layer is None else in_words(operation, layer)
            inside = self._aside or in_words(state.operation, state.layer, state.call)
            raise ContractViolation(
                f"{what} was entered from a second thread while {inside} is running;"
                f" one {self.purpose.name} serves one thread at a time"
            )

    def _enter(self, facts: CallFacts) -> CallFacts:
        numbered = facts._replace(number=self.num_calls)
        self.state.enter(numbered.number, facts.operation, facts.layer, numbered.words())
        return numbered

    def _fail(self, numbered: CallFacts, error: BaseException) -> None:
        """Raise what an error of a call means; where it means itself, its own way goes on."""
        if isinstance(error, TransportFault):
            waited_s = time.monotonic() - (self._aside_since if self._aside else self.state.since)
            self._break(self.fault or self._explain(numbered, error, waited_s), error)
        elif isinstance(error, ContractViolation):
            self._break(self._agreed_violation(numbered, error), error)
        elif isinstance(error, InvalidInput):
            self.state.move_to("idle")  # refused before any communication, or by all ranks alike
        else:  # the peers are waiting for what will not come: this rank is to blame
            own_rank = [self.members.rank]
            self.fault = ContractViolation(f"{numbered} failed on this rank: {error!r}", own_rank)
            self.state.move_to("failed")

    def _break(self, fault: CrossdockError, cause: BaseException) -> None:
        self.fault = copy.copy(fault)
        self.state.move_to("faulted")
        if fault is cause:
            raise fault
        raise fault from cause

    def _explain(self, call: CallFacts, error: TransportFault, waited_s: float) -> CrossdockError:
        self._hear()
        if self.state.verdict is not None and self.state.verdict.get("overflow"):
            return self._fault_of(Verdict.from_dict(self.state.verdict))  # who gave up has told everyone
        if error.expired and call.number >= 0:  # on a device, maybe in a call that the host has left long ago
            waited_s = max(waited_s, self.timeout_s)
        if error.blamed or not self.peers:
            verdict = Verdict(error.blamed, (), str(call), round(waited_s, 1))
            if self.peers:
                verdict = agree_on(verdict, range(len(self.peers)), self.members.rank, self.peers, self.state)
            else:
                self.state.propose(verdict.as_dict())
        else:
            expired = waited_s >= self.timeout_s if error.expired is None else error.expired
            self.state.timed_out = self.state.timed_out or expired
            self.state.move_to("diagnosing")
            verdict = diagnose(call, self.members.rank, self.peers, self.state, waited_s, self.purpose)
        return self._fault_of(verdict, f"transport: {error}")

    def _fault_of(self, verdict: Verdict, *notes: str) -> CrossdockError:
        if verdict.overflow:
            return CapacityOverflow(verdict.overflow, verdict.ranks)
        if verdict.violation:
            return ContractViolation(verdict.violation, verdict.ranks)
        is_at_once = verdict.waited_s < min(_AT_ONCE_S, self.timeout_s / 2)
        when = "at once" if is_at_once else f"after {verdict.waited_s:g} s"
        limit = f"timeout_s is {self.timeout_s:g}"
        if verdict.ranks:
            text = f"ranks {list(verdict.ranks)} were missing in {verdict.where}, found {when} ({limit})"
        else:
            text = f"{verdict.where} failed {when} ({limit}), although every rank still answers"
        if self.members.rank in verdict.ranks:
            text += f"; this rank ({self.members.rank}) is one of them: the others have given it up"
        gone = store_fault(self.members.store)
        reasons = [*verdict.reasons, *([gone] if gone else []), *notes]
        return PeerTimeout(f"{text}: " + "; ".join(reasons), verdict.ranks)

    def _agreed_violation(self, call: CallFacts, error: ContractViolation) -> CrossdockError:
        """The violation itself, unless this rank has been told of an earlier fault."""
        own = Verdict(error.ranks, (), str(call), 0.0, str(error)).as_dict()
        stayed = self.state.propose(own)
        return error if stayed == own else self._fault_of(Verdict.from_dict(stayed))

    def _find_peers(self, addresses: Sequence[Address]) -> None:
        """Keep of every peer's addresses the one that leads to it from here.

        Raises:
            PeerTimeout: peers that offered to open and do not answer.
        """
        opening = self._enter(CallFacts(-1, self.purpose.operation, "opening"))
        found = find_all(addresses)
        self.peers = tuple(there or address for there, address in zip(found, addresses, strict=True))
        lost = [rank for rank, there in enumerate(found) if there is None]
        if lost:
            nothing = TransportFault(
                f"ranks {lost} offered to open, and nothing answers where they can be asked", expired=False
            )
            raise self._explain(opening, nothing, time.monotonic() - self.state.since)


class InCall:
    """The inside of one call, see `Session.call`. A class, since `contextmanager` costs the host 1 us a call more."""

    __slots__ = ("_facts", "_session")

    def __init__(self, session: Session, facts: CallFacts) -> None:
        self._session, self._facts = session, facts

    def __enter__(self) -> CallFacts:
        self._facts = self._session.begin(self._facts)
        return self._facts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.end(self._facts, error)
