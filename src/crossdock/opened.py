"""What stands behind a `TokenDispatcher`: the session, the transport, and the one way in which every call runs."""

from __future__ import annotations

import itertools
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import operations
from .accounts import Accounts
from .backends.base import Backend, Call, Link, Received, Transport, TransportSpec
from .callers import level_of_caller
from .dynamo import import_dynamo
from .errors import BackendUnavailable, ContractViolation, InvalidInput
from .group.fingerprint import CallFacts
from .group.members import Members
from .group.session import Session
from .inputs import check_dispatch, check_distinct_experts, check_expert_ids, check_local_counts
from .layer_sizes import LayerSizes
from .padding import open_transport
from .recompute.frames import Replay
from .row_capacity import Calibration, Size
from .rows import zero_tail
from .statistics import Statistics
from .types import DispatcherConfig, DispatchHandle

_NOT_IN_A_CAPTURE = "stream is capturing"  # the driver's words; Triton and torch pass them on
_key_numbers = itertools.count()
_T = TypeVar("_T")


class OpenDispatcher:
    """One opened dispatcher; the operators find it by `key` for as long as it lives. Owns session and transport.

    Attributes:
        accounts: what its dispatches asked for and got, and who is told of it.
        sizes: to how many rows they are sized.
        statistics: see `TokenDispatcher.stats`.

    Raises:
        PeerTimeout, ContractViolation: members that did not come, or asked for something else.
    """

    def __init__(self, config: DispatcherConfig, members: Members, spec: TransportSpec, backend: Backend) -> None:
        # The first operator call imports this, for seconds, and at another time on every rank: better before they meet.
        import_dynamo()
        self.config, self.spec, self.device = config, spec, members.device
        self.session, self.transport = _open(config, members, spec, backend)
        # Unlike that of any other opening or process: handles and exported programs cannot meet a stranger.
        self.key = f"{next(_key_numbers)}-{secrets.token_hex(8)}"
        self.anchor = torch.zeros(0, requires_grad=True, device=members.device or "cpu")
        # Graph nodes of the combines of every handle that still lives: what `join_backward` goes back from.
        self._combined: weakref.WeakKeyDictionary[DispatchHandle, list[Any]] = weakref.WeakKeyDictionary()
        self.sizes = LayerSizes(config, spec.ep_size)
        self.accounts = Accounts(config, spec, members.device)
        self.statistics = Statistics(spec, self.session, self.transport, self.accounts)
        self._last_stream: torch.cuda.Stream | None = None
        self._last_stream_handle = 0  # of it
        self._use = _Use()
        self.close = weakref.finalize(self, _close, self.session, self.transport, self.accounts, self._use, os.getpid())
        operations.register(self.key, self)

    def run_dispatch(
        self,
        x: Tensor,
        scores: Tensor,
        expert_ids: Tensor,
        local_counts: Tensor | None,
        facts: CallFacts,
        *,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Received]:
        """Body of the dispatch operator; arguments are those of `LayerView.dispatch`, scores float32."""
        self._check(x, scores, expert_ids, local_counts, facts)
        self.touch()
        num_rows = self.sizes.of_call(facts.layer, x, facts.num_tokens_per_rank, compiled=compiled)
        num_tokens = x.shape[0] if self.config.equal_token_counts else -1
        facts = facts._replace(num_tokens=num_tokens, num_rows=-1 if num_rows is None else num_rows)
        ids = expert_ids if expert_ids.dtype is torch.int64 else expert_ids.to(torch.int64)

        def movement(transport: Transport, call: Call) -> tuple[Tensor, Received]:
            account = self.accounts.offer(x, facts)
            received = transport.dispatch(x, scores, ids, num_rows, call._replace(account=account))
            if num_rows is None and self.config.row_capacity.kind == "calibrated":
                most_rows = transport.agree_max(received.rows.shape[0], call)
                if self.sizes.measure(facts.layer, x.shape[0], facts.num_tokens_per_rank, most_rows):
                    self.accounts.forget_fill(facts.layer)
            return self._note(x, ids, facts, received, was_offered=account is not None), received

        number = torch.full((1,), self.session.num_calls, dtype=torch.int64, device="cpu")
        rows_end, received = self.run(facts, movement)
        return number, rows_end, received

    def run_redispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, replay: Replay, facts: CallFacts
    ) -> list[Tensor]:
        """Body of a dispatch that is recomputed: all outputs of the operator, rows along the recorded layout."""
        check_dispatch(self.config, self.device, x, scores, expert_ids, None)

        def movement(transport: Transport, call: Call) -> list[Tensor]:
            recorded = replay.check(expert_ids, self.spec.rank)
            rows = transport.rows_out(x.contiguous(), recorded.layout, call)
            self.zero_tail(rows, recorded.rows_end)
            return [rows, *recorded.again()]

        return self.run(facts._replace(operation="redispatch", dispatch_number=replay.number), movement)

    def input_buffer(self, num_tokens: int) -> Tensor | None:
        """See `TokenDispatcher.input_buffer`; None where the backend offers none."""
        limit = self.config.num_max_tokens_per_rank
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool):
            raise InvalidInput(f"num_tokens of an input buffer must be an integer, got {num_tokens!r}")
        if not 0 <= num_tokens <= limit:
            raise InvalidInput(
                f"num_tokens ({num_tokens}) of an input buffer must lie in 0..num_max_tokens_per_rank ({limit})"
            )
        with self.session.aside("input_buffer"):
            self.session.raise_fault()
            self._follow_stream()
            return self.transport.input_buffer(num_tokens)

    def planned_rows(self, num_tokens: Size, num_tokens_per_rank: Size) -> Size | None:
        """See `LayerSizes.planned`."""
        return self.sizes.planned(num_tokens, num_tokens_per_rank)

    def resize(self, layer: str, calibration: Calibration) -> None:
        """Size a layer by something else from the next dispatch on; on all ranks at the same call."""
        self.sizes.set(layer, calibration)
        self.accounts.forget_fill(layer)

    def take_news(self, device: torch.device) -> Tensor:
        """`Accounts.take`, for a step that has come to its end; its first word is 2 where a call was given up."""
        self._follow_stream()
        news, fault = self.accounts.take(device), self.transport.fault_flag()
        if fault is not None:
            news[:1] = torch.maximum(news[:1], (fault != 0).to(torch.int64) * 2)
        return news

    def run(self, facts: CallFacts, movement: Callable[[Transport, Call], _T]) -> _T:
        """Body of every operator: one numbered, compared call."""
        if facts.operation == "combine":
            self.touch()
        # What we make inside is made where we say, whatever device the caller has set as the default.
        with self.session.call(facts) as numbered, torch._C.DisableTorchFunction():
            self._follow_stream()
            try:
                return movement(self.transport, Call(numbered, self.session.state.words, self.session.verify))
            except RuntimeError as error:
                if not (self._use.captured and _NOT_IN_A_CAPTURE in str(error)):
                    raise
                raise ContractViolation(
                    f"{numbered} was the first of its kind and met inside a CUDA graph's capture, where its kernels"
                    " cannot be loaded: open another dispatcher, and make the same call once before you capture"
                ) from error

    def note_combine(self, facts: CallFacts, num_rows: int) -> None:
        """See `Statistics.note_combine`."""
        self.statistics.note_combine(facts, num_rows)

    def note_combined(self, handle: DispatchHandle, node: Any) -> None:
        """Remember, weakly, the graph node of a combine's output."""
        living = [ref for ref in self._combined.get(handle, []) if ref() is not None]
        with suppress(TypeError):  # a node without weak references, of an output that is a tensor of another class
            living.append(weakref.ref(node))
        self._combined[handle] = living

    def take_combined(self, handle: DispatchHandle) -> list[Any]:
        """The nodes noted for a handle that still live, which are then forgotten."""
        return [node for ref in self._combined.pop(handle, []) if (node := ref()) is not None]

    def zero_tail(self, rows: Tensor, rows_end: Tensor) -> None:
        """Zero what lies behind the last expert's rows, in place, where the configuration asks for it."""
        if self.config.zero_tail and self.config.row_capacity.kind != "exact":
            zero_tail(rows, rows_end, max_programs=self.config.num_sms)

    def touch(self) -> None:
        """A host touch point: raise the first fault, or what the device has told of since the last one.

        Raises:
            CapacityOverflow: rows were dropped, and `on_overflow="raise"`; all peers raise it too.
            InvalidInput: ids that only the device could see; once for all that it has counted so far.
        """
        self.session.raise_fault()
        self.look()

    def check(self) -> None:
        """`touch`, and what the transport knows of calls for which no host has waited."""
        self.touch()
        self.session.probe(self.transport.look)

    def look(self, *, at_the_end: bool = False) -> None:
        """`touch` without the first fault; see `Accounts.look`."""
        if self.accounts.has_news:  # counted behind a wait that was given up, it may be of another call's routing
            self.session.probe(self.transport.look)
        overflow = self.accounts.look(at_the_end=at_the_end)
        if overflow is not None:
            self.session.break_off(overflow)
            self.transport.abandon()
            self.session.raise_fault()

    # -- parts of a dispatch -----------------------------------------------------------------------------------------

    def _check(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, local_counts: Tensor | None, facts: CallFacts
    ) -> None:
        num_tokens_per_rank = None if facts.num_tokens_per_rank < 0 else facts.num_tokens_per_rank
        check_dispatch(self.config, self.device, x, scores, expert_ids, num_tokens_per_rank)
        check_expert_ids(self.config, expert_ids)
        check_distinct_experts(self.config, expert_ids)
        if local_counts is not None and self.config.row_capacity.kind == "exact":
            check_local_counts(self.config, expert_ids, local_counts)

    def _note(
        self, x: Tensor, expert_ids: Tensor, facts: CallFacts, received: Received, *, was_offered: bool
    ) -> Tensor:
        """Enter a dispatch into the accounts and finish its tail; the end of its rows."""
        self.device = self.device or x.device  # alone: the first dispatch says where the rows live
        rows_end = self.accounts.enter(x, expert_ids, facts, received, was_offered=was_offered)
        self.statistics.note_dispatch(facts.layer, received.rows.shape[0])
        if facts.num_rows >= 0 and self.config.zero_tail:
            zero_tail(received.rows, rows_end, received.row_scores, max_programs=self.config.num_sms)
            if received.kept_scores is not None:
                zero_tail(received.kept_scores.unsqueeze(1), rows_end, max_programs=self.config.num_sms)
        return rows_end

    def allow_unmapping(self) -> None:
        """All graphs that were captured are gone: `close` may free what they use, and what it has left is freed now."""
        self._use.captured = False
        if _mapped_for_graphs.pop(self.transport, None) is not None:
            self.transport.close()

    @property
    def is_captured(self) -> bool:
        """Whether a graph has captured a call, and may still be there."""
        return self._use.captured

    def _follow_stream(self) -> None:
        """Calls are ordered on the device too: a call on another stream waits for what the last one's had to do."""
        if self.device is None or self.device.type != "cuda":
            return
        handle, last = torch._C._cuda_getCurrentRawStream(self.device.index), self._last_stream
        if last is not None and handle == self._last_stream_handle:
            self._use.captured = self._use.captured or torch.cuda.is_current_stream_capturing()
            return
        stream = torch.cuda.current_stream(self.device)
        is_captured = _is_captured(stream)
        self._use.captured |= is_captured
        if last is not None and is_captured == _is_captured(last):
            stream.wait_stream(last)  # what a graph captures waits for nothing outside of it: its replay is a call
        self._last_stream, self._last_stream_handle = stream, handle


def open_first(
    config: DispatcherConfig, members: Members, spec: TransportSpec, backends: Sequence[Backend]
) -> tuple[Backend, OpenDispatcher]:
    """Open with the first backend that can be opened; one that cannot says so on all ranks alike.

    Raises:
        BackendUnavailable: what the last one said.
        PeerTimeout, ContractViolation: see `OpenDispatcher`.
    """
    *others, last = backends
    for backend in others:
        with suppress(BackendUnavailable):
            return backend, OpenDispatcher(config, members, spec, backend)
    return last, OpenDispatcher(config, members, spec, last)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _open(
    config: DispatcherConfig, members: Members, spec: TransportSpec, backend: Backend
) -> tuple[Session, Transport]:
    agree = {**config.agreed_fields(), "backend": backend.name, "global ranks": list(members.global_ranks)}
    session = Session.open(members, agree, config.timeout_s)
    prefix = "" if session.opening is None else session.opening.prefix
    link = Link(members=members, store_prefix=prefix, on_expiry=session.expire)
    try:
        with session.call(CallFacts(-1, "dispatch", "opening")):
            return session, open_transport(backend, spec, link)
    except BaseException:
        session.close()
        raise


@dataclass
class _Use:
    """Whether a graph has captured calls of a dispatcher."""

    captured: bool = False


# Of closed dispatchers, whose storage graphs may still use: what moves their rows, and what a replay writes down.
_mapped_for_graphs: dict[Transport, Accounts] = {}


def _tell_of_what_nobody_heard(session: Session, accounts: Accounts) -> None:
    """Dropped without `close`, a dispatcher cannot raise any more what it has counted since the last touch point."""
    if session.fault is not None:
        return
    try:
        news = accounts.look(at_the_end=True)
    except InvalidInput as error:
        news = str(error)
    if news is not None:
        warnings.warn(f"a dispatcher was dropped before it could raise: {news}", stacklevel=level_of_caller())


def _close(session: Session, transport: Transport, accounts: Accounts, use: _Use, pid: int) -> None:
    if os.getpid() != pid:  # a forked child: the links are its parent's
        return
    try:
        _tell_of_what_nobody_heard(session, accounts)
    finally:  # also where warnings are errors
        session.close()
        if use.captured:
            transport.abandon()
            _mapped_for_graphs[transport] = accounts
        else:
            transport.close()
