"""What a checkpointed region's forward recorded, and the passes that record and replay it.

A *frame* belongs to one run of one checkpointed region; torch's graph holds it, so it dies with the graph. A *pass* is
one run through the region: the first records, every later one replays. The k-th dispatch of a layer in a replaying
pass takes the k-th one that the frame has of this layer.

Passes nest with their regions. A recording pass inside a replaying one (the inner region of a nested checkpoint, run
again for the outer one) takes what the outer pass replays, and records that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import ContractViolation


class Layer(NamedTuple):
    """A layer of one dispatcher."""

    dispatcher_key: str
    name: str


class Named(Protocol):
    """A layer view."""

    @property
    def name(self) -> str:
        """The layer's name."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """One dispatch without its rows: what a recomputation needs to move them along the same layout.

    Attributes:
        num_tokens: T.
        expert_ids: `[T, top_k]`, kept only where they are to be compared.
        outputs: tokens per expert, expert offsets, kept scores `[R]`, the call's number, the rows' end, then the
            layout, as the operator returned them behind the rows and their scores.
        eager: whether eager code dispatched, not a compiled region, which selective checkpointing saves as a whole.
    """

    num_tokens: int
    expert_ids: Tensor | None
    outputs: tuple[Tensor, ...]
    eager: bool

    @property
    def number(self) -> int:
        """The number of the recorded call."""
        return int(self.outputs[3])

    @property
    def rows_end(self) -> Tensor:
        """See `DispatchHandle`."""
        return self.outputs[4]

    @property
    def layout(self) -> tuple[Tensor, ...]:
        """See `backends.base.Received`."""
        return self.outputs[5:]

    def again(self) -> list[Tensor]:
        """All outputs but the rows for another caller, who may write to the row scores and the two behind them."""
        kept_scores = self.outputs[2]
        return [kept_scores.clone(), *_for_a_caller(self.outputs)]


def _for_a_caller(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Fresh copies of what a user sees. The rest is shared, but not as the objects that autograd marks."""
    return [*(tensor.clone() for tensor in outputs[:2]), *(tensor.detach() for tensor in outputs[2:])]


@dataclass(frozen=True, eq=False)
class Frame:
    """The dispatches of one run of a checkpointed region, by layer and by their order within the layer."""

    check_ids: bool = False
    dispatches: dict[tuple[Layer, int], Recorded] = field(default_factory=dict)

    def num_dispatches(self) -> Counter[Layer]:
        """How many there are of each layer."""
        return Counter(layer for layer, _ in self.dispatches)


@dataclass(frozen=True, eq=False)
class Pass:
    """One run through a region: `outer` is the pass that a recording one is nested in."""

    frame: Frame
    replays: bool
    outer: Pass | None
    counts: Counter[Layer] = field(default_factory=Counter)

    def count(self, layer: Layer) -> None:
        """One more dispatch of this layer."""
        self.counts[layer] += 1
        if self.outer is not None:
            self.outer.count(layer)

    def replay(self, layer: Layer) -> Replay | None:
        """What the dispatch counted last replays; None if it is to be recorded."""
        if not self.replays:
            return None if self.outer is None else self.outer.replay(layer)
        ordinal = self.counts[layer] - 1
        return Replay(layer, self.frame, ordinal, self.frame.dispatches.get((layer, ordinal)))

    def record(self, layer: Layer, recorded: Recorded) -> None:
        """Keep the dispatch counted last, in every recording pass."""
        if self.replays:
            return
        self.frame.dispatches[layer, self.counts[layer] - 1] = recorded
        if self.outer is not None:
            self.outer.record(layer, recorded)

    @property
    def wants_ids(self) -> bool:
        """Whether any frame compares ids."""
        return self.frame.check_ids or (self.outer is not None and self.outer.wants_ids)

    def end(self) -> None:
        """Refuse a recomputation that came to its end with fewer dispatches than the forward.

        Raises:
            ContractViolation: with the layer and both numbers.
        """
        if not self.replays:
            return
        for (layer, ordinal), recorded in self.frame.dispatches.items():
            if recorded.eager and ordinal >= self.counts[layer]:
                raise ContractViolation(
                    f"the recomputation of a checkpointed region dispatched layer {layer.name!r}"
                    f" {self.counts[layer]} times, its forward {self.frame.num_dispatches()[layer]} times"
                )


class Replay(NamedTuple):
    """A dispatch that replays another one: the `ordinal`-th of its layer in a frame."""

    layer: Layer
    frame: Frame
    ordinal: int
    recorded: Recorded | None

    @property
    def number(self) -> int:
        """The number of the call that is replayed; -1 if there is none."""
        return -1 if self.recorded is None else self.recorded.number

    def check(self, expert_ids: Tensor, rank: int) -> Recorded:
        """The recorded dispatch.

        Raises:
            ContractViolation: there is none, or it was another one than this; it blames `rank`.
        """
        found = self.recorded
        if found is None:
            raise ContractViolation(self._superfluous(), [rank])
        num_tokens = expert_ids.shape[0]
        if found.num_tokens != num_tokens:
            raise ContractViolation(
                f"the recomputation of layer {self.layer.name!r} dispatches {num_tokens} tokens, its forward"
                f" (call {found.number}) dispatched {found.num_tokens}",
                [rank],
            )
        if self.frame.check_ids and found.expert_ids is not None:
            self._compare(expert_ids, found.expert_ids, found.number, rank)
        return found

    def _superfluous(self) -> str:
        before = self.frame.num_dispatches()
        told = [
            f"{layer.name!r}{'' if layer.dispatcher_key == self.layer.dispatcher_key else ' of another dispatcher'}"
            f" {num} times"
            for layer, num in before.items()
        ]
        return (
            f"the recomputation of a checkpointed region dispatches layer {self.layer.name!r} {self.ordinal + 1} times,"
            f" its forward dispatched {', '.join(told) or 'nothing'}"
        )

    def _compare(self, ids: Tensor, recorded: Tensor, number: int, rank: int) -> None:
        differ = ids != recorded
        if bool(differ.any()):
            token, slot = differ.nonzero()[0].tolist()
            raise ContractViolation(
                f"the recomputation of layer {self.layer.name!r} sends token {token} to expert {int(ids[token, slot])}"
                f" in slot {slot}, its forward (call {number}) to expert {int(recorded[token, slot])}"
                f" ({int(differ.sum())} slots differ)",
                [rank],
            )


_active: ContextVar[Pass | None] = ContextVar("crossdock_recompute", default=None)  # of this thread


def count_dispatch(dispatcher_key: str, view: Named) -> None:
    """Count an eager dispatch of a layer view, also one that selective checkpointing will serve from what it saved.

    A dispatch in compiled code is counted by the operator, in `replay_of`.
    """
    if not torch.compiler.is_compiling() and (active := _active.get()) is not None:
        active.count(Layer(dispatcher_key, view.name))


def replay_of(layer: Layer, compiled: bool) -> Replay | None:
    """What the dispatch that runs now has to replay; None outside of recomputation."""
    active = _active.get()
    if active is None:
        return None
    if compiled:
        active.count(layer)
    return active.replay(layer)


def record(layer: Layer, compiled: bool, expert_ids: Tensor, outputs: Sequence[Tensor]) -> None:
    """Keep the dispatch that has just run, if a checkpointed region is in its forward; `outputs`: see `Recorded`."""
    active = _active.get()
    if active is None or active.replays:
        return
    ids = expert_ids.clone() if active.wants_ids else None
    active.record(layer, Recorded(expert_ids.shape[0], ids, tuple(_for_a_caller(outputs)), eager=not compiled))


class Region:
    """Makes everything inside its `with` one pass over a frame; may be entered any number of times.

    `beside` is entered too, inside: another context of the same region.
    """

    def __init__(self, frame: Frame, *, replays: bool, beside: AbstractContextManager[Any]) -> None:
        self._frame, self._replays, self._beside = frame, replays, beside
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        entering = _one_pass(self._frame, self._replays, self._beside)
        entering.__enter__()
        self._entered.append(entering)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)


@contextmanager
def _one_pass(frame: Frame, replays: bool, beside: AbstractContextManager[Any]) -> Iterator[None]:
    this = Pass(frame, replays, outer=None if replays else _active.get())
    token = _active.set(this)
    try:
        with beside:
            yield
        this.end()
    finally:
        _active.reset(token)
