"""What a backend promises: its traits as data, and the few movements it makes.

A backend moves rows and scalars between ranks. It knows nothing of autograd, of configurations, or of who calls it; the
dispatcher hands it a `TransportSpec` once and a `Call` with every operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from ..group.faults import TransportFault
from ..group.fingerprint import CallFacts
from ..group.members import Members
from ..kernels.account import Account
from ..rows import score_gradient
from ..types import Reduction, RowCapacity

EVERY_ROW_CAPACITY = frozenset({"exact", "worst_case", "balanced", "calibrated", "rows"})

__all__ = [
    "EVERY_ROW_CAPACITY",
    "Backend",
    "BackendTraits",
    "Call",
    "Demand",
    "GroupFacts",
    "Layout",
    "Link",
    "NewSize",
    "Received",
    "Transport",
    "TransportFault",
    "TransportSpec",
    "Weights",
]


@dataclass(frozen=True, kw_only=True)
class BackendTraits:
    """What a backend can and cannot do, as data that `explain` prints and the conformance suite reads.

    Attributes:
        devices: device types its rows may live on.
        dtypes: dtypes of rows.
        row_capacities: kinds of `RowCapacity` it offers.
        sync_free_devices: device types on which it offers others than `exact`; None is all that it serves.
        reductions: reductions it meets to the bit.
        capturable: whether its sync-free calls can be captured in a CUDA graph.
        token_alignment: every rank's token count must be a multiple of this; the dispatcher pads.
        ragged_counts: whether ranks may bring different token counts; where not, the dispatcher pads.
        ordered_rows: whether rows come in the contract's order; otherwise they are compared as a multiset.
        duplicate_experts: whether a token may name an expert twice.
        deduplicates: whether a token crosses the wire once per rank that wants it, as `Transport.sent` counts.
        max_top_k: the most slots of a token; None is no limit.
        hidden_multiple: `hidden_dim` must be a multiple of this.
        multi_node: whether the group may span hosts.
        ranks_share_gpus: whether ranks may have the same GPU, which serves them by turns; for tests of what they move.
        needs: what has to be installed or present, in words.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    row_capacities: frozenset[str] = frozenset({"exact"})
    sync_free_devices: frozenset[str] | None = None
    reductions: frozenset[str] = frozenset({"fast", "exact"})
    capturable: bool = False
    token_alignment: int = 1
    ragged_counts: bool = True
    ordered_rows: bool = True
    duplicate_experts: bool = True
    deduplicates: bool = True
    max_top_k: int | None = None
    hidden_multiple: int = 1
    multi_node: bool = False
    ranks_share_gpus: bool = False
    needs: str = "nothing"

    def offers(self, row_capacity: str, device_type: str) -> bool:
        """Whether this kind of `RowCapacity` is offered for rows on this type of device."""
        anywhere = self.sync_free_devices is None or device_type in self.sync_free_devices
        return row_capacity == "exact" or (row_capacity in self.row_capacities and anywhere)


class GroupFacts(NamedTuple):
    """The group as a backend needs to know it when it is asked whether it can serve."""

    rank: int
    size: int
    device: torch.device | None
    transport: str


@dataclass(frozen=True, kw_only=True)
class TransportSpec:
    """The facts of one opened dispatcher that its transport is built for."""

    num_experts: int
    top_k: int
    hidden_dim: int
    dtype: torch.dtype
    num_max_tokens_per_rank: int
    expert_alignment: int
    reduction: Reduction
    num_sms: int | None
    timeout_s: float
    rank: int
    ep_size: int
    row_capacity: RowCapacity = field(default_factory=RowCapacity.exact)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.ep_size


@dataclass(frozen=True, kw_only=True)
class Link:
    """How a transport reaches the peers of one opening.

    Attributes:
        members: see `group.members.Members`.
        store_prefix: a prefix of the store that no other opening has; empty without a store.
        on_expiry: tells the session, from any thread, that work of a call (`CallFacts`, None if unknown) is overdue on
            the device; or, with a second argument, that it failed so many seconds after it began.
    """

    members: Members
    store_prefix: str
    on_expiry: Callable[..., None]


class Call(NamedTuple):
    """One operation, as the transport sees it.

    Attributes:
        facts: what this rank understands the call to be.
        words: the same as `fingerprint.NUM_WORDS` integers, to be sent to every peer.
        verify: takes every rank's words and raises `ContractViolation` where they differ.
        account: where a dispatch may be entered on the device by what moves its rows; None where it is done for it.
    """

    facts: CallFacts
    words: tuple[int, ...]
    verify: Callable[[Sequence[Sequence[int]]], None]
    account: Account | None = None


class Traffic(NamedTuple):
    """Bytes that a rank has put on the wire to other ranks.

    Attributes:
        layers: those that have moved rows, by name.
        rows_bytes: `[len(layers)]` int64, where they are counted: those of each layer's rows.
        other_bytes: headers, routing and scalars, of all layers.
    """

    layers: Sequence[str]
    rows_bytes: torch.Tensor
    other_bytes: int


class Demand(NamedTuple):
    """What one dispatch asked for, on the device; nobody on the host waits for it.

    Attributes:
        wanted: `[num_local_experts]` int64: rows asked for by local expert, before the capacity and without padding.
        bad_ids: `[ep_size]` int64: ids outside the range by source rank, as far as this rank has counted them; zeros
            where they were refused before.
    """

    wanted: torch.Tensor
    bad_ids: torch.Tensor


class Received(NamedTuple):
    """What a dispatch brings: rows in the contract's order and all that later movements need.

    Attributes:
        rows: `[R, hidden_dim]`; padding rows are zero, rows behind the last offset uninitialised.
        row_scores: `[R]` float32; 0 on padding rows, uninitialised behind the last offset.
        tokens_per_expert: `[num_local_experts]` int64: kept rows.
        expert_offsets: `[num_local_experts]` int32 inclusive padded ends, at most R.
        layout: the backend's own tensors, fixed in number and meaning for one spec.
        demand: see `Demand`.
        kept_scores: `row_scores` once more, in memory of its own, where the transport has written both; else whoever
            needs it copies.
        rows_end: `[1]` int64: the last offset, where the transport has entered the dispatch into `Call.account`.
    """

    rows: torch.Tensor
    row_scores: torch.Tensor
    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    layout: list[torch.Tensor]
    demand: Demand
    kept_scores: torch.Tensor | None = None
    rows_end: torch.Tensor | None = None


Layout = Sequence[torch.Tensor]
Preference = Literal["never", "fallback", "preferred"]
NewSize = Callable[[], int | torch.SymInt]


class Transport(ABC):
    """The storage and the movements of one opened dispatcher. Every movement is called by all ranks or by none."""

    spec: TransportSpec

    @abstractmethod
    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, num_rows: int | None, call: Call
    ) -> Received:
        """Make a layout and move rows `[T, hidden_dim]` with their scores `[T, top_k]` out along it.

        With `num_rows` None it waits for the counts and returns as many rows as arrive. Otherwise it returns exactly
        `num_rows`: slots whose row would lie at or behind it are dropped, padding is cut off there too, and on a GPU
        nothing is read on the host.
        """

    @abstractmethod
    def rows_out(self, x: torch.Tensor, layout: Layout, call: Call) -> torch.Tensor:
        """Move rows `[T, hidden_dim]` out along a known layout: `[R, hidden_dim]`, padding rows zero."""

    @abstractmethod
    def scalars_home(self, values: torch.Tensor, layout: Layout, call: Call | None) -> torch.Tensor:
        """Bring one float32 per row `[R]` home to its slot: `[T, top_k]`, 0 where a slot has no row.

        `call` is None when the scalars go with rows that already opened the operation.
        """

    @abstractmethod
    def rows_home(self, rows: torch.Tensor, weights: Weights | None, layout: Layout, call: Call) -> torch.Tensor:
        """Bring rows `[R, hidden_dim]` home and add them up by the spec's reduction: `[T, hidden_dim]`."""

    def combine_backward(
        self, grad_out: torch.Tensor, rows: torch.Tensor, row_scores: torch.Tensor, layout: Layout, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a combine of `rows [R, hidden_dim]` weighted by `row_scores [R]` needs on the way back.

        Returns:
            The gradient of the rows, `[R, hidden_dim]`, and of the scores, `[T, top_k]` float32.
        """
        grad_rows = self.rows_out(grad_out, layout, call)
        grad_row_scores = score_gradient(rows, grad_rows, row_scores, self.spec.num_sms)
        return grad_rows, self.scalars_home(grad_row_scores, layout, None)

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_row_scores: torch.Tensor, layout: Layout, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients `[R, hidden_dim]` and `[R]` brought home and added up: `[T, hidden_dim]` and `[T, top_k]`."""
        dx = self.rows_home(grad_rows, None, layout, call)
        return dx, self.scalars_home(grad_row_scores, layout, None)

    @abstractmethod
    def fake_layout(
        self, num_tokens: int | torch.SymInt, num_rows: int | torch.SymInt, like: torch.Tensor, new_size: NewSize
    ) -> list[torch.Tensor]:
        """Empty tensors of the shapes that `dispatch` returns as layout, for tracing."""

    def agree_max(self, value: int, call: Call) -> int:
        """The largest `value` of all ranks, which may be waited for.

        Asked inside a layer's calibrating dispatch, and before an `exact` one of a backend without `ragged_counts`.

        Raises:
            NotImplementedError: a backend that is asked for more than one rank, and lacks this.
        """
        if self.spec.ep_size > 1:
            raise NotImplementedError(
                "a backend that offers row_capacity calibrated, or no ragged_counts, has to agree on a maximum"
            )
        return value

    def input_buffer(self, num_tokens: int) -> torch.Tensor | None:
        """A view `[num_tokens, hidden_dim]` of a buffer of this transport, for a producer to fill; None: not offered.

        One rank alone asks for it, nobody waits, and nothing is raised. No movement writes there, and none reads there
        but of the views that it is given, as of any tensor. The address never changes, and the view has no history in
        autograd; each call counts as a write, by which autograd knows what it has saved of the buffer before.
        """
        return None

    def fault_flag(self) -> torch.Tensor | None:
        """`[1]` int64 on the device, not 0 once a call was given up that the host may not have heard of.

        None where a call that fails raises at once. Whoever applies results asks it, so that none are applied.
        """
        return None

    def look(self) -> None:
        """Raise what is known by now of calls for which no host has waited; does not wait.

        Raises:
            TransportFault, ContractViolation: peers that did not come, or made another call.
        """

    @property
    def reads_slot_scores(self) -> bool:
        """Whether a weighted `rows_home` reads the values of `Weights.of_slots`.

        Where not, no copy of them is kept outside of grad mode and compiled regions.
        """
        return True

    @property
    def workspace_bytes(self) -> int:
        """Bytes of persistent storage for communication on this rank."""
        return 0

    def abandon(self) -> None:
        """Wake the peers that wait for this rank, if that is possible: it has given up, and they were told why."""

    def sent(self) -> Traffic:
        """What has been put on the wire to other ranks so far; does not wait."""
        return Traffic((), torch.zeros(0, dtype=torch.int64, device="cpu"), 0)

    def num_host_syncs(self) -> int:
        """How often this transport waited for a number on the host."""
        return 0

    def close(self) -> None:
        """Free all storage and links; called once, never waits longer than the spec's timeout."""


class Weights(NamedTuple):
    """The scores of a weighted reduction, at both ends: per slot `[T, top_k]` at home, per row `[R]` at the experts."""

    of_slots: torch.Tensor
    of_rows: torch.Tensor


class Backend(ABC):
    """A kind of transport: answers whether it can serve, and opens."""

    name: str
    traits: BackendTraits
    preference: Preference = "fallback"

    def preference_on(self, device: torch.device | None) -> Preference:
        """What "auto" thinks of it for rows on this device: `preference`, wherever they are."""
        return self.preference

    def describe(self, spec: TransportSpec, device: torch.device | None) -> str:
        """In words, how it shares out the work of such a dispatcher, which `explain` prints; empty: nothing to tell."""
        return ""

    def workspace_bytes(self, spec: TransportSpec) -> int | None:
        """What `Transport.workspace_bytes` would be if it were opened with this spec; None: not known beforehand."""
        return None

    def refusal(self, spec: TransportSpec, group: GroupFacts) -> str | None:
        """Why it cannot serve this shape on this group, in one sentence; None if it can."""
        traits, device = self.traits, group.device
        checks = (
            (
                device is None or device.type in traits.devices,
                f"rows on {device} are not offered, only on {', '.join(sorted(traits.devices))}",
            ),
            (
                device is None or traits.offers(spec.row_capacity.kind, device.type),
                f"row_capacity {spec.row_capacity} is not offered on {device}, only exact()",
            ),
            (spec.dtype in traits.dtypes, f"{spec.dtype} is not offered"),
            (spec.reduction in traits.reductions, f"reduction={spec.reduction!r} is not offered"),
            (
                traits.max_top_k is None or spec.top_k <= traits.max_top_k,
                f"top_k ({spec.top_k}) is above its limit of {traits.max_top_k}",
            ),
            (
                spec.hidden_dim % traits.hidden_multiple == 0,
                f"hidden_dim ({spec.hidden_dim}) is not a multiple of {traits.hidden_multiple}",
            ),
        )
        return next((why for holds, why in checks if not holds), None)

    @abstractmethod
    def open(self, spec: TransportSpec, link: Link) -> Transport:
        """Allocate and connect. Collective over the group."""
