"""The values of the public interface: what a dispatcher is asked to be, and what a dispatch returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import torch

from .errors import ConfigError
from .names import decode_name

Reduction = Literal["fast", "exact"]
OnOverflow = Literal["raise", "skip_step", "drop"]

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_TIMEOUT_S = 1e6
MAX_SIZE = 2**31 - 1  # ids travel as int32
NOT_AGREED = ("num_sms", "timeout_s")  # a rank may have its own


_CAPACITY_VALUES = {"worst_case": "fraction", "balanced": "factor", "calibrated": "factor", "rows": "num_rows"}


@dataclass(frozen=True)
class RowCapacity:
    """How many rows `Dispatched.rows` has. Build one with the constructors below.

    `exact()` is the only kind that waits for the count on the host; every other kind is sync-free.

    Raises:
        ConfigError: an unknown kind, or a value that its kind cannot have.
    """

    kind: Literal["exact", "worst_case", "balanced", "calibrated", "rows"]
    value: float | None = None

    def __post_init__(self) -> None:
        check_choice("row_capacity kind", self.kind, ("exact", *_CAPACITY_VALUES))
        name = f"{self.kind} {_CAPACITY_VALUES.get(self.kind, 'value')}"
        if self.kind == "exact":
            if self.value is not None:
                raise ConfigError(f"an exact row capacity has no value, got {self.value!r}")
        elif self.kind == "rows":
            check_positive_int(name, self.value)
            if self.value is not None and self.value > MAX_SIZE:
                raise ConfigError(f"{name} must be at most {MAX_SIZE}, got {self.value}")
        else:
            _check_factor(name, self.value, upper=1.0 if self.kind == "worst_case" else math.inf)

    @classmethod
    def exact(cls) -> RowCapacity:
        """As many rows as arrive: one host synchronisation per dispatch, nothing is ever dropped."""
        return cls("exact")

    @classmethod
    def worst_case(cls, fraction: float = 1.0) -> RowCapacity:
        """`num_tokens_per_rank * ep_size * top_k * fraction` rows; at 1.0 it can never overflow."""
        return cls("worst_case", fraction)

    @classmethod
    def balanced(cls, factor: float) -> RowCapacity:
        """`num_tokens_per_rank * top_k * factor` rows: a multiple of what perfectly balanced routing needs."""
        return cls("balanced", factor)

    @classmethod
    def calibrated(cls, factor: float = 1.5) -> RowCapacity:
        """A multiple of what the first dispatch of each layer needed (the group's maximum)."""
        return cls("calibrated", factor)

    @classmethod
    def rows(cls, num_rows: int) -> RowCapacity:
        """Exactly `num_rows` rows, a multiple of `expert_alignment`."""
        return cls("rows", num_rows)

    def __str__(self) -> str:
        return f"{self.kind}({'' if self.value is None else self.value})"


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """The facts a dispatcher needs, the same on every rank and for every backend.

    Args:
        num_experts: experts over the whole group; a multiple of the group's size.
        top_k: slots of a token.
        hidden_dim: elements of a row.
        dtype: bfloat16, float16 or float32: of the rows, in both directions.
        num_max_tokens_per_rank: the most tokens any rank will ever bring to a call; sizes all persistent storage.
        row_capacity: how many rows a dispatch returns.
        expert_alignment: every expert's group of rows is padded to a multiple of this (16 for FP8, 32 for MXFP8).
        reduction: "exact" gives the same bits for every EP size; "fast" pre-adds on the experts' ranks.
        on_overflow: what happens to rows that do not fit a sync-free capacity.
        equal_token_counts: a declaration that every rank brings the same number of tokens to a call.
        distinct_experts: a declaration that a token never names an expert twice.
        quantization: must be None: no quantised transport is offered yet.
        zero_tail: whether rows behind the last expert's group are zeroed.
        num_sms: the most GPU blocks a kernel that moves rows may take; None lets the backend choose.
        timeout_s: seconds that a rank waits for its peers in one call.

    Raises:
        ConfigError: a value that cannot work, named with its limit.
    """

    num_experts: int
    top_k: int
    hidden_dim: int
    dtype: torch.dtype
    num_max_tokens_per_rank: int
    row_capacity: RowCapacity = field(default_factory=RowCapacity.exact)
    expert_alignment: int = 1
    reduction: Reduction = "fast"
    on_overflow: OnOverflow = "raise"
    equal_token_counts: bool = False
    distinct_experts: bool = False
    quantization: None = None
    zero_tail: bool = False
    num_sms: int | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_dim", "num_max_tokens_per_rank", "expert_alignment"):
            check_positive_int(name, getattr(self, name))
            if getattr(self, name) > MAX_SIZE:
                raise ConfigError(f"{name} must be at most {MAX_SIZE}, got {getattr(self, name)}")
        if self.num_sms is not None:
            check_positive_int("num_sms", self.num_sms)
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})")
        if self.dtype not in SUPPORTED_DTYPES:
            raise ConfigError(f"dtype must be one of {_names(SUPPORTED_DTYPES)}, got {self.dtype!r}")
        check_choice("reduction", self.reduction, ("fast", "exact"))
        check_choice("on_overflow", self.on_overflow, ("raise", "skip_step", "drop"))
        self._check_row_capacity()
        for name in ("equal_token_counts", "distinct_experts", "zero_tail"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.quantization is not None:
            raise ConfigError(
                f"quantization must be None: no quantised transport is offered yet, got {self.quantization!r}"
            )
        _check_factor("timeout_s", self.timeout_s, upper=MAX_TIMEOUT_S)

    def _check_row_capacity(self) -> None:
        if not isinstance(self.row_capacity, RowCapacity):
            raise ConfigError(
                f"row_capacity must be a RowCapacity such as RowCapacity.exact(), got {self.row_capacity!r}"
            )
        value = self.row_capacity.value
        if self.row_capacity.kind == "rows" and value is not None and value % self.expert_alignment:
            raise ConfigError(
                f"row_capacity {self.row_capacity} must be a multiple of expert_alignment ({self.expert_alignment})"
            )

    def as_dict(self) -> dict[str, Any]:
        """Every field as plain JSON values; `from_dict` builds an equal configuration from it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["dtype"] = str(self.dtype).removeprefix("torch.")
        plain["row_capacity"] = {"kind": self.row_capacity.kind, "value": self.row_capacity.value}
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> DispatcherConfig:
        """The configuration that `as_dict` described.

        Raises:
            ConfigError: fields that do not exist, are missing, or have no such value.
        """
        unknown = sorted(set(plain) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown configuration fields {unknown}; known are {[f.name for f in fields(cls)]}")
        values = dict(plain)
        if isinstance(values.get("dtype"), str):
            values["dtype"] = getattr(torch, values["dtype"], values["dtype"])
        try:
            if isinstance(values.get("row_capacity"), Mapping):
                values["row_capacity"] = RowCapacity(**values["row_capacity"])
            return cls(**values)
        except TypeError as error:  # a field that is missing, or one of row_capacity that does not exist
            raise ConfigError(f"{dict(plain)} describes no configuration: {error}") from error

    def agreed_fields(self) -> dict[str, Any]:
        """The fields that every rank must share, as plain JSON values."""
        return {name: value for name, value in self.as_dict().items() if name not in NOT_AGREED}


def check_positive_int(name: str, value: object) -> None:
    """Refuse anything but a positive integer; booleans are none.

    Raises:
        ConfigError: with the name and the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse anything but one of `choices`.

    Raises:
        ConfigError: with the name, the choices and the value.
    """
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_factor(name: str, value: object, upper: float) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= upper and math.isfinite(value):
        return
    if math.isfinite(upper):
        raise ConfigError(f"{name} must be a positive number of at most {upper:g}, got {value!r}")
    raise ConfigError(f"{name} must be a positive, finite number, got {value!r}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchHandle:
    """What `combine` needs from one dispatch; the only link between the two.

    A handle belongs to the dispatcher that made it, holds no communication storage, and may be combined any number of
    times and in any order.

    Attributes:
        num_tokens: T, tokens of this rank in that dispatch.
        num_rows: rows of `Dispatched.rows`.
        topk_scores: `[T, top_k]` float32, as given to dispatch (differentiable). Without grad mode it may share the
            caller's memory: then no combine reads what is written there.
        row_scores: `[num_rows]` float32: the score that came with each row.
        rows_end: `[1]` int64: the end of the last expert's rows; what lies behind it is nobody's.
        dispatch_number: `[1]` int64 on the CPU: number of that dispatch among the dispatcher's calls.
    """

    num_tokens: int
    num_rows: int
    topk_scores: torch.Tensor = field(repr=False)
    row_scores: torch.Tensor = field(repr=False)
    rows_end: torch.Tensor = field(repr=False)
    dispatch_number: torch.Tensor = field(repr=False)
    encoded_layer: torch.Tensor = field(repr=False)
    dispatcher_key: str = field(repr=False)
    layout: tuple[torch.Tensor, ...] = field(repr=False)

    @property
    def layer(self) -> str:
        """Name of the layer view that dispatched."""
        return decode_name(self.encoded_layer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """The rows that reached this rank's experts; also unpacks as `rows, tokens_per_expert, handle`.

    Attributes:
        rows: `[row_capacity, hidden_dim]`, by local expert, then source rank, then token, then slot; padding rows
            inside an expert's group are zero, rows behind the last offset uninitialised (zero under `zero_tail`).
        tokens_per_expert: `[num_local_experts]` int64: kept rows of each local expert, without padding.
        expert_offsets: `[num_local_experts]` int32: inclusive ends of the padded groups, as grouped GEMMs take them;
            never behind the capacity.
        scores: `[row_capacity]` float32, differentiable; 0 on padding rows, behind the last offset as `rows`.
        handle: what `combine` takes.
    """

    rows: torch.Tensor
    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    scores: torch.Tensor
    handle: DispatchHandle

    def __iter__(self) -> Iterator[Any]:
        return iter((self.rows, self.tokens_per_expert, self.handle))

    @property
    def row_valid(self) -> torch.Tensor:
        """`[row_capacity]` bool: True where a row carries a token, made when asked for."""
        row = torch.arange(self.rows.shape[0], device=self.rows.device)
        expert = torch.searchsorted(self.expert_offsets, row, right=True)
        start = torch.nn.functional.pad(self.expert_offsets, (1, 0))[expert]
        count = torch.nn.functional.pad(self.tokens_per_expert, (0, 1))[expert]
        return row - start < count


class DispatchLayer(Protocol):
    """What the consumers of a dispatch need: a `TokenDispatcher`, one of its layer views, or anything like them."""

    def dispatch(
        self,
        x: torch.Tensor,
        topk_scores: torch.Tensor,
        topk_expert_ids: torch.Tensor,
        num_local_tokens_per_expert: torch.Tensor | None = None,
        *,
        num_tokens_per_rank: int | None = None,
    ) -> Dispatched:
        """Tokens to their experts' ranks."""

    def combine(self, rows: torch.Tensor, handle: DispatchHandle, *, apply_scores: bool = True) -> torch.Tensor:
        """Results back to their tokens, summed over the slots."""


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """What one layer's dispatches have brought to this rank's experts so far.

    Attributes:
        calls: dispatches.
        tokens: tokens this rank brought to them.
        rows: rows that reached this rank's experts, without padding.
        rows_wanted: rows that were asked for; `rows_wanted - rows` were dropped.
        overflows: dispatches of which rows were dropped.
        largest_demand: rows, padding included, of the dispatch that took up most of its capacity, since that changed
            last.
        capacity: rows that dispatch was sized to; 0 where none has come since, as after every growth; -1 under `exact`,
            which has no capacity, and so of the dispatch that calibrates the layer.
        wanted_by_expert: rows that were asked for, by local expert.
        skipped_steps: optimizer steps that a guard did not apply because this layer lacked rows, here or on another
            rank; without the last step of a guard that reads one step late.
        bytes_per_row: of one row.
        sent_rows_bytes: bytes of rows that this rank sent to other ranks for this layer, in every operation: one row
            for each pair of a token and a rank; on their way home under the reduction `exact`, one for each slot.
        last_rows_bytes: of the rows of its last dispatch, padding and what no row took up included.
        saved_bytes: of the rows that its last combine in grad mode keeps for its backward, whatever was combined
            without gradients since; 0 before the first one, and where the experts apply the scores.
    """

    calls: int
    tokens: int
    rows: int
    rows_wanted: int
    overflows: int
    largest_demand: int
    capacity: int
    wanted_by_expert: tuple[int, ...]
    skipped_steps: int = 0
    bytes_per_row: int = 0
    sent_rows_bytes: int = 0
    last_rows_bytes: int = 0
    saved_bytes: int = 0

    @property
    def received_rows_bytes(self) -> int:
        """Bytes of the rows that reached this rank's experts, a copy for every expert, from all ranks."""
        return self.rows * self.bytes_per_row

    @property
    def imbalance(self) -> float:
        """The largest expert's rows over the mean of this rank's experts; 1.0 is balanced, and nothing is too."""
        return max(self.wanted_by_expert) * len(self.wanted_by_expert) / (self.rows_wanted or 1) or 1.0

    @property
    def fill(self) -> float | None:
        """`largest_demand` over its capacity: rows were dropped above 1.0; None where `capacity` is 0 or -1."""
        return self.largest_demand / self.capacity if self.capacity > 0 else None

    @property
    def headroom(self) -> float | None:
        """The share of its capacity that no dispatch took up: `1 - fill`, below 0 where rows were dropped, or None."""
        return None if self.fill is None else 1.0 - self.fill


@dataclass(frozen=True, kw_only=True)
class DispatcherStats:
    """What a dispatcher has done so far on this rank.

    Attributes:
        calls: operations finished (dispatch, combine, their backward, and what is recomputed count one each).
        tokens: tokens this rank brought to dispatches.
        rows: rows that reached this rank's experts, without padding.
        host_syncs: times an operation waited for a number on the host.
        sent_bytes: bytes this rank put on the wire to other ranks, rows, scalars and headers together.
        sent_rows_bytes: the part of it that were rows of `hidden_dim` elements.
        skipped_steps: optimizer steps that a guard did not apply.
        layers: every layer's own account, by its name.
    """

    calls: int = 0
    tokens: int = 0
    rows: int = 0
    host_syncs: int = 0
    sent_bytes: int = 0
    sent_rows_bytes: int = 0
    skipped_steps: int = 0
    layers: Mapping[str, LayerStats] = field(default_factory=dict)
