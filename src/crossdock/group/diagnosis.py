"""Who is to blame when a call does not come to its end.

Every surviving rank asks all others which call they are in. Dead, failed and silent ranks are to blame; so are ranks
that answer but have not entered the call, once somebody has waited for the whole `timeout_s`; and ranks that are in
another call than the rest.

All survivors name the same ranks: each proposes its verdict to the lowest rank that answers, where the first one stays,
and nobody leaves before it has told what stayed to everyone who does not know it yet. A rank that comes later learns of
it from its own state, even when the others are gone by then; so does one that was stopped, when it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .addresses import Address
from .fingerprint import CallFacts, in_words, odd_ranks
from .purpose import DISPATCHER, Purpose
from .status import CallState, ask, tell

GRACE_S = 2.0  # the longest inquiry but for its last round: timeout_s plus all of it must stay below timeout_s + 5 s
_SETTLE_S = 0.5  # ranks that fall together do not fall in the same millisecond
_PAUSE_S = 0.1
_SILENCE_S = 1.2  # a busy process may miss a question; one that is stopped misses them all
_MAX_THREADS = 128
_ENTERED = ("in_call", "diagnosing", "faulted")
_GONE = ("dead", "silent")


@dataclass(frozen=True)
class Verdict:
    """A dispatcher's first fault, as all its ranks tell it.

    Attributes:
        ranks: who was at fault.
        reasons: what each of them was doing instead.
        where: the call, in words.
        waited_s: how long the rank that gave the verdict had waited in it.
        violation: the whole message, where ranks disagreed rather than were missing; else "".
        overflow: the whole message, where a rank gave up because rows had been dropped; else "".

    """

    ranks: tuple[int, ...]
    reasons: tuple[str, ...] = ()
    where: str = ""
    waited_s: float = 0.0
    violation: str = ""
    overflow: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "ranks": list(self.ranks), "reasons": list(self.reasons)}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Verdict:
        """The reverse of `as_dict`."""
        return cls(**{**plain, "ranks": tuple(plain["ranks"]), "reasons": tuple(plain["reasons"])})


def diagnose(
    call: CallFacts,
    rank: int,
    peers: Sequence[Address],
    state: CallState,
    waited_s: float,
    purpose: Purpose = DISPATCHER,
) -> Verdict:
    """Ask every peer until the blame is clear and agreed. `state.timed_out` says whether `timeout_s` has passed."""
    inquiry = _Inquiry(call, rank, peers, state, waited_s, purpose)
    with ThreadPoolExecutor(min(max(len(peers), 1), _MAX_THREADS), thread_name_prefix="crossdock-ask") as pool:
        return inquiry.run(pool)


def agree_on(own: Verdict, answering: Sequence[int], rank: int, peers: Sequence[Address], state: CallState) -> Verdict:
    """Settle on one verdict with the ranks that answer (this one, `rank`, among them) and make it known to them."""
    agreed = own.as_dict()
    for register in answering:
        stayed = state.propose(agreed) if register == rank else ask(peers[register], agreed).get("verdict")
        if stayed:
            agreed = stayed
            break
    return make_known(agreed, [peer for peer in answering if peer != rank], peers, state)


def make_known(verdict: dict[str, Any], ranks: Sequence[int], peers: Sequence[Address], state: CallState) -> Verdict:
    """Tell the ranks, and only then return: whoever has a verdict may be gone in the next moment."""
    state.verdict = verdict
    with ThreadPoolExecutor(min(max(len(ranks), 1), _MAX_THREADS), thread_name_prefix="crossdock-tell") as pool:
        list(pool.map(lambda rank: ask(peers[rank], verdict), ranks))
    return Verdict.from_dict(verdict)


@dataclass
class _Inquiry:
    call: CallFacts
    rank: int
    peers: Sequence[Address]
    state: CallState
    waited_s: float
    purpose: Purpose
    blamed_since: float | None = None
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    silent_since: dict[int, float] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    last_comers: list[int] | None = None

    def run(self, pool: ThreadPoolExecutor) -> Verdict:
        verdict = self._found(pool)
        list(pool.map(lambda rank: tell(self.peers[rank], verdict.as_dict()), self.silent_since))
        return verdict

    def _found(self, pool: ThreadPoolExecutor) -> Verdict:
        deadline = time.monotonic() + GRACE_S
        while True:
            self._ask_all(pool)
            known = self._known_verdict()
            if known is not None:
                unaware = [rank for rank in self._answering() if not self.answers[rank].get("verdict")]
                return make_known(self.state.propose(known), unaware, self.peers, self.state)
            is_late = time.monotonic() > deadline
            blamed = self._blamed(silence_s=0.0 if is_late else _SILENCE_S)
            if is_late or (blamed and self._is_settled()):
                return self._agree(blamed or self.last_comers or [])
            time.sleep(_PAUSE_S)

    def _ask_all(self, pool: ThreadPoolExecutor) -> None:
        asked = time.monotonic()
        others = [rank for rank in range(len(self.peers)) if rank != self.rank]
        answers = pool.map(lambda rank: ask(self.peers[rank]), others)
        self.answers = dict(zip(others, answers, strict=True))
        silent = {rank for rank, answer in self.answers.items() if answer["phase"] == "silent"}
        self.silent_since = {rank: self.silent_since.get(rank, asked) for rank in silent}

    def _known_verdict(self) -> dict[str, Any] | None:
        if self.state.verdict is not None:
            return self.state.verdict
        return next((a["verdict"] for _, a in sorted(self.answers.items()) if a.get("verdict")), None)

    def _blamed(self, silence_s: float) -> list[int]:
        told_late = any(a.get("timed_out") and a["call"] == self.call.number for a in self.answers.values())
        if self.state.timed_out or told_late:
            # Whoever comes from here on is late all the same, so nobody is ever taken off again.
            self.late |= {rank for rank, answer in self.answers.items() if self._is_absent(answer)}
            self._note_last_comers()
        ended = {rank for rank, answer in self.answers.items() if answer["phase"] in ("dead", "closed", "failed")}
        now = time.monotonic()
        silent = {rank for rank, since in self.silent_since.items() if now - since >= silence_s}
        return sorted(ended | silent | self.late | set(self._elsewhere()))

    def _is_absent(self, answer: dict[str, Any]) -> bool:
        """Whether it is outside of all calls and has this one still before it.

        A rank in an earlier call waits itself, for what the ranks at fault have not sent it.
        """
        return bool(answer["phase"] == "idle" and answer["call"] < self.call.number)

    def _note_last_comers(self) -> None:
        """Who came just as the wait ended, or is behind: to blame if nobody else turns out to be."""
        if self.last_comers is None:
            inside = {r: a for r, a in self.answers.items() if a["phase"] in _ENTERED and a["call"] <= self.call.number}
            is_last = {r: a["call"] < self.call.number or a["for_s"] < self.waited_s / 5 for r, a in inside.items()}
            self.last_comers = sorted(rank for rank, last in is_last.items() if last)

    def _elsewhere(self) -> list[int]:
        """Ranks that stand in a call of this number, but another one than most."""
        inside = {r: a for r, a in self.answers.items() if a.get("call") == self.call.number and a["phase"] in _ENTERED}
        words = {rank: tuple(answer["words"]) for rank, answer in inside.items()}
        return odd_ranks({**words, self.rank: tuple(self.call.words())}) if words else []

    def _is_settled(self) -> bool:
        now = time.monotonic()
        if self.blamed_since is None:
            self.blamed_since = now
        undecided = any(now - since < _SILENCE_S for since in self.silent_since.values())
        return now - self.blamed_since >= _SETTLE_S and not undecided

    def _agree(self, blamed: Sequence[int]) -> Verdict:
        reasons = tuple(self._reason(rank) for rank in blamed)
        own = Verdict(tuple(blamed), reasons, str(self.call), round(self.waited_s, 1))
        answering = sorted([*self._answering(), self.rank])
        return agree_on(own, answering, self.rank, self.peers, self.state)

    def _answering(self) -> list[int]:
        return [rank for rank, answer in self.answers.items() if answer["phase"] not in _GONE]

    def _reason(self, rank: int) -> str:
        if rank == self.rank:
            return f"rank {rank}: it made {self.call}, and most others another"
        answer = self.answers[rank]
        if "reason" in answer:
            return f"rank {rank}: {answer['reason']}"
        if answer["phase"] == "dead":
            return f"rank {rank}: its process has ended or {self.purpose.gone}"
        doing = in_words(answer["operation"], answer["layer"], answer["call"])
        if answer["phase"] == "closed":
            return f"rank {rank}: {self.purpose.gone}"
        if answer["phase"] == "failed":
            return f"rank {rank}: it failed inside {doing} with an error of its own"
        if answer["call"] == self.call.number and answer["phase"] in _ENTERED:
            return f"rank {rank}: it came to {doing}, too late or where most others made another call"
        last = f"its last call was {doing}" if answer["call"] >= 0 else "it has made no call yet"
        return f"rank {rank}: it is alive but has not come; {last}"
