"""How the members of a group agree to open one dispatcher (or guard), through the store alone.

Openings over one rank list happen in rounds. Every rank puts its offer (its configuration, its choice of backend, its
status address) into the first round that has not ended. A round ends once, by an atomic write: with nobody missing, by
the rank that finds all offers there, or with the absent ranks, by the first one whose time is up. So all ranks of a
round read the same end, no rank leads, and a rank that comes too late meets the others in the next round. Nothing of
the caller's group is used but its rank list: groups whose communicators are wired wrongly, or ranks that have opened
different numbers of groups, cannot pair up by accident.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ContractViolation, PeerTimeout
from .fingerprint import odd_ranks
from .members import Members
from .purpose import DISPATCHER, Purpose
from .store import within

_STORE_MARGIN_S = 2.0  # what the store's own answers may take beyond `timeout_s`


@dataclass(frozen=True)
class Opening:
    """One agreed opening.

    Attributes:
        prefix: a store prefix that no other opening has.
        offers: what each rank brought, by group rank.
    """

    prefix: str
    offers: tuple[dict[str, Any], ...]


def open_together(members: Members, offer: dict[str, Any], timeout_s: float, purpose: Purpose = DISPATCHER) -> Opening:
    """Meet the other members and check that all ask for the same thing.

    Raises:
        PeerTimeout: members that did not come within `timeout_s`, or a store that does not answer.
        ContractViolation: members that ask for something else, with the differing values.
    """
    meeting = _Meeting(members, timeout_s, purpose)
    try:
        opening = within(timeout_s + _STORE_MARGIN_S, lambda: meeting.attend(offer))
    except dist.DistError as error:
        cause = str(error).partition("\n")[0]
        raise PeerTimeout(
            f"{purpose.opened} cannot be opened: the rendezvous store does not answer, the process that hosts it may be"
            f" dead ({cause})"
        ) from error
    except TimeoutError as error:
        if isinstance(error, PeerTimeout):
            raise
        raise PeerTimeout(f"{purpose.opened} cannot be opened: {error}") from error
    _check_same(opening.offers, purpose)
    return opening


class _Meeting:
    def __init__(self, members: Members, timeout_s: float, purpose: Purpose) -> None:
        self.members, self.timeout_s, self.purpose = members, timeout_s, purpose
        self.prefix = f"{purpose.prefix}/{','.join(map(str, members.global_ranks))}"
        self.store = dist.PrefixStore(self.prefix, members.store)
        self.deadline = time.monotonic() + timeout_s

    def attend(self, offer: dict[str, Any]) -> Opening:
        self._announce()
        number = self._join(json.dumps(offer))
        missing = json.loads(self._end_of(number))["missing"]
        if missing:
            raise self._timeout(missing)
        texts = [bytes(self.store.get(key)).decode() for key in self._offer_keys(number)]
        return Opening(f"{self.prefix}/{number}", tuple(json.loads(text) for text in texts))

    def _join(self, offer: str) -> int:
        """Put the offer into the first round that does not end without it; returns the round's number."""
        number = int(self.store.add("ended", 0))  # a hint, never too high
        while True:
            if not self.store.check([f"{number}/end"]):
                self.store.set(self._offer_keys(number)[self.members.rank], offer)
                if self._is_in(number):
                    return number
            number += 1

    def _is_in(self, number: int) -> bool:
        """Whether the round may still end with this rank in it; ends it if this rank was the last one to come."""
        if self.store.check(self._offer_keys(number)):
            self._write_end(number, [])
        if not self.store.check([f"{number}/end"]):
            return True
        return self.members.rank not in json.loads(self.store.get(f"{number}/end"))["missing"]

    def _end_of(self, number: int) -> str:
        """How the round ended, ending it if the time is up."""
        try:
            self.store.wait([f"{number}/end"], timedelta(seconds=max(self.deadline - time.monotonic(), 0.01)))
        except dist.DistStoreError:
            return self._write_end(number, self._absent(number))
        return bytes(self.store.get(f"{number}/end")).decode()

    def _absent(self, number: int) -> list[int]:
        return [rank for rank, key in enumerate(self._offer_keys(number)) if not self.store.check([key])]

    def _write_end(self, number: int, missing: Sequence[int]) -> str:
        """End the round unless it has ended; returns how it did end."""
        mine = json.dumps({"missing": list(missing), "by": self.members.rank})
        stayed = bytes(self.store.compare_set(f"{number}/end", "", mine)).decode()
        if stayed == mine:
            self.store.add("ended", 1)
        return stayed

    def _offer_keys(self, number: int) -> list[str]:
        return [f"{number}/offer/{rank}" for rank in range(self.members.size)]

    def _announce(self) -> None:
        me = self.members.global_ranks[self.members.rank]
        self.members.store.set(f"{self.purpose.prefix}/opening/{me}", self.prefix)

    def _timeout(self, ranks: Sequence[int]) -> PeerTimeout:
        notes = []
        for rank in ranks:
            key = f"{self.purpose.prefix}/opening/{self.members.global_ranks[rank]}"
            if self.members.store.check([key]):
                where = bytes(self.members.store.get(key)).decode().removeprefix(f"{self.purpose.prefix}/")
                notes.append(f"rank {rank} last opened one over global ranks [{where}]")
        return PeerTimeout(
            f"ranks {list(ranks)} did not open {self.purpose.opened} over global ranks"
            f" {list(self.members.global_ranks)} within {self.timeout_s:g} s"
            + (f" ({'; '.join(notes)})" if notes else ""),
            ranks,
        )


def _check_same(offers: Sequence[dict[str, Any]], purpose: Purpose) -> None:
    asked = [offer["agree"] for offer in offers]
    odd = odd_ranks({rank: json.dumps(agree, sort_keys=True) for rank, agree in enumerate(asked)})
    if not odd:
        return
    names = sorted(set[str]().union(*asked))
    differences = "; ".join(
        f"{name} is " + ", ".join(f"{agree.get(name)!r} on rank {rank}" for rank, agree in enumerate(asked))
        for name in names
        if any(agree.get(name) != asked[0].get(name) for agree in asked)
    )
    others = [rank for rank in range(len(asked)) if rank not in odd]
    raise ContractViolation(f"ranks {odd} open another {purpose.name} than ranks {others}: {differences}", odd)
