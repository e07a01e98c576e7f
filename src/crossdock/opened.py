"""What stands behind a `TokenDispatcher`: the session, the transport, and the one way in which every call runs."""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import autograd
from .backends.base import Backend, Call, Link, Received, Transport, TransportSpec
from .group.fingerprint import CallFacts
from .group.members import Members
from .group.session import Session
from .inputs import check_dispatch, check_expert_ids, check_local_counts
from .names import encode_name
from .types import DispatcherConfig, DispatcherStats, DispatchHandle

_key_numbers = itertools.count()
_T = TypeVar("_T")


class OpenDispatcher:
    """One opened dispatcher; the operators find it by `key` for as long as it lives. Owns session and transport.

    Raises:
        PeerTimeout, ContractViolation: members that did not come, or asked for something else.
    """

    def __init__(self, config: DispatcherConfig, members: Members, spec: TransportSpec, backend: Backend) -> None:
        # The first operator call imports this, for seconds, and at another time on every rank: better before they meet.
        import torch._dynamo

        self.config, self.spec, self.device = config, spec, members.device
        self.session, self.transport = _open(config, members, spec, backend)
        # Unlike that of any other opening or process: handles and exported programs cannot meet a stranger.
        self.key = f"{next(_key_numbers)}-{secrets.token_hex(8)}"
        self.anchor = torch.zeros(0, requires_grad=True, device=members.device or "cpu")
        # Graph nodes of the combines of every handle that still lives: what `join_backward` goes back from.
        self._combined: weakref.WeakKeyDictionary[DispatchHandle, list[Any]] = weakref.WeakKeyDictionary()
        self._num_tokens = self._num_rows = 0
        self._last_stream: torch.cuda.Stream | None = None
        self.nameless = encode_name("")
        self.close = weakref.finalize(self, _close, self.session, self.transport, os.getpid())
        autograd.register(self.key, self)

    def run_dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, local_counts: Tensor | None, facts: CallFacts
    ) -> tuple[Tensor, Received]:
        """Body of the dispatch operator; arguments are those of `LayerView.dispatch`, scores float32."""
        num_tokens_per_rank = None if facts.num_tokens_per_rank < 0 else facts.num_tokens_per_rank
        check_dispatch(self.config, self.device, x, scores, expert_ids, num_tokens_per_rank)
        check_expert_ids(self.config, expert_ids)
        if local_counts is not None:
            check_local_counts(self.config, expert_ids, local_counts)
        if self.config.equal_token_counts:
            facts = replace(facts, num_tokens=x.shape[0])
        ids = expert_ids.to(torch.int64)

        def movement(transport: Transport, call: Call) -> Received:
            return transport.dispatch(x, scores, ids, call)

        number = torch.tensor([self.session.num_calls], device="cpu")
        received = self.run(facts, movement)
        self._num_tokens += x.shape[0]
        self._num_rows += received.rows.shape[0]
        return number, received

    def run(self, facts: CallFacts, movement: Callable[[Transport, Call], _T]) -> _T:
        """Body of every operator: one numbered, compared call."""
        # What we make inside is made where we say, whatever device the caller has set as the default.
        with self.session.call(facts) as numbered, torch._C.DisableTorchFunction():
            self._follow_stream()
            call = Call(facts=numbered, words=tuple(numbered.words()), verify=self.session.verify)
            return movement(self.transport, call)

    def note_combined(self, handle: DispatchHandle, node: Any) -> None:
        """Remember, weakly, the graph node of a combine's output."""
        living = [ref for ref in self._combined.get(handle, []) if ref() is not None]
        with suppress(TypeError):  # a node without weak references, of an output that is a tensor of another class
            living.append(weakref.ref(node))
        self._combined[handle] = living

    def take_combined(self, handle: DispatchHandle) -> list[Any]:
        """The nodes noted for a handle that still live, which are then forgotten."""
        return [node for ref in self._combined.pop(handle, []) if (node := ref()) is not None]

    def stats(self) -> DispatcherStats:
        """See `TokenDispatcher.stats`."""
        sent, sent_rows = self.transport.bytes_sent()
        return DispatcherStats(
            calls=self.session.num_calls,
            tokens=self._num_tokens,
            rows=self._num_rows,
            host_syncs=self.transport.num_host_syncs(),
            sent_bytes=sent,
            sent_rows_bytes=sent_rows,
        )

    def _follow_stream(self) -> None:
        """Calls are ordered on the device too: a call on another stream waits for what the last one's had to do."""
        if self.device is not None and self.device.type == "cuda":
            stream, last = torch.cuda.current_stream(self.device), self._last_stream
            if last is not None and last != stream:
                stream.wait_stream(last)
            self._last_stream = stream


def _open(
    config: DispatcherConfig, members: Members, spec: TransportSpec, backend: Backend
) -> tuple[Session, Transport]:
    agree = {**config.agreed_fields(), "backend": backend.name, "global ranks": list(members.global_ranks)}
    session = Session.open(members, agree, config.timeout_s)
    prefix = "" if session.opening is None else session.opening.prefix
    link = Link(members=members, store_prefix=prefix, on_expiry=session.expire)
    try:
        with session.call(CallFacts(-1, "dispatch", "opening")):
            return session, backend.open(spec, link)
    except BaseException:
        session.close()
        raise


def _close(session: Session, transport: Transport, pid: int) -> None:
    if os.getpid() != pid:  # a forked child: the links are its parent's
        return
    session.close()
    transport.close()
