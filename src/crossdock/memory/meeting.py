"""Telling every rank of one opening a small fact, through the store."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..group.faults import TransportFault
from ..group.members import Members
from ..group.store import within

_STORE_MARGIN_S = 1.0


class Meeting:
    """The ranks of one opening; `prefix` is one that no other opening has in the store."""

    def __init__(self, members: Members, prefix: str, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = members.rank, members.size, timeout_s
        self.store = dist.PrefixStore(f"{prefix}/memory", members.store) if members.size > 1 else None

    def share(self, topic: str, fact: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's fact on a topic, by rank; also a barrier. A topic is used once.

        Raises:
            TransportFault: a rank did not come, or the store does not answer.
        """
        if self.store is None:
            return [fact]
        keys = [f"{topic}/{rank}" for rank in range(self.size)]

        def meet(store: Any) -> list[bytes]:
            store.set(keys[self.rank], json.dumps(fact))
            store.wait(keys, timedelta(seconds=self.timeout_s))
            return [bytes(store.get(key)) for key in keys]

        try:
            texts = within(self.timeout_s + _STORE_MARGIN_S, lambda: meet(self.store))
        except (dist.DistError, TimeoutError) as error:
            first_line = str(error).partition("\n")[0]
            raise TransportFault(f"not all ranks came to share memory: {first_line}", expired=True) from error
        return [json.loads(text) for text in texts]
