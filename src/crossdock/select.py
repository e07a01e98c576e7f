"""Which backends can serve a configuration on a group, why the others cannot, and what "auto" takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from operator import index
from typing import Any, TypeVar, get_args

import torch

from .backends.base import (
    EVERY_ROW_CAPACITY,
    Backend,
    BackendTraits,
    GroupFacts,
    Link,
    Preference,
    Transport,
    TransportSpec,
)
from .errors import BackendUnavailable, ConfigError
from .group.members import Members, resolve_members
from .row_capacity import resolve_num_rows
from .types import MAX_SIZE, DispatcherConfig

ENTRY_POINT_GROUP = "crossdock.backends"
_MISHAPS = Exception  # what another package's code may come to: its errors may well be of classes of its own
_Answer = TypeVar("_Answer")
_NO_TRAITS = BackendTraits(
    devices=frozenset(), dtypes=frozenset(), row_capacities=EVERY_ROW_CAPACITY, needs="its package mended"
)


@dataclass(frozen=True)
class Candidate:
    """One backend's answer: `why_not` is None where it can serve; its traits are what it offers anywhere.

    `how` says in words how it would share the work out here, and what it was asked in vain; empty where it has nothing
    to tell. Where it can serve, `by_name_only` says that "auto" never takes it here, and `workspace_bytes` what
    `TokenDispatcher.workspace_bytes` would be, or None of a backend that cannot tell before it is opened. A backend
    whose traits cannot be read has none of any kind.
    """

    name: str
    why_not: str | None
    traits: BackendTraits
    how: str = ""
    by_name_only: bool = False
    workspace_bytes: int | None = None


@dataclass(frozen=True)
class Explanation:
    """What `backend="auto"` takes for a configuration and a group (`chosen`, None if nothing can serve), and why."""

    chosen: str | None
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        width = max(len(candidate.name) for candidate in self.candidates)
        lines = [f"{c.name:<{width}}  {self._word(c)}" for c in self.candidates]
        return "\n".join(lines)

    def _word(self, candidate: Candidate) -> str:
        if candidate.why_not is not None:
            return f"cannot serve: {candidate.why_not}"
        word = "chosen" if candidate.name == self.chosen else "usable"
        word += " by name only" if candidate.by_name_only else ""
        told = [candidate.how] if candidate.how else []
        if candidate.workspace_bytes:
            told.append(f"{in_units(candidate.workspace_bytes)} of storage a rank")
        return f"{word}: {'; '.join(told)}" if told else word


def in_units(num_bytes: int) -> str:
    """A number of bytes in the largest unit of which there is one.

    >>> [in_units(size) for size in (0, 900, 5000, 49 * 2**20, 5 * 10**9)]
    ['0 bytes', '900 bytes', '4.9 KiB', '49.0 MiB', '4.7 GiB']
    """
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**exponent:
            return f"{num_bytes / 2**exponent:.1f} {unit}"
    return f"{num_bytes} bytes"


def explain(config: DispatcherConfig, group: Any = None, *, device: torch.device | str | None = None) -> Explanation:
    """Tell which backend `backend="auto"` would take here, and for every other one whether it could serve.

    Local: asks no other rank. `group` and `device` are as in `TokenDispatcher`.

    Raises:
        ConfigError: a configuration that no backend can serve on this group.
    """
    if not isinstance(config, DispatcherConfig):
        raise ConfigError(f"config must be a DispatcherConfig, got {type(config).__name__}")
    members = resolve_members(group, device)
    return _explain(config, make_spec(config, members), members, known_backends())


def known_backends() -> dict[str, Backend]:
    """The built-in backends and those that installed packages register, in order of preference."""
    from .backends.all_to_all import AllToAllBackend
    from .backends.local import LocalBackend
    from .backends.loopback import LoopbackBackend
    from .backends.symmetric import SymmetricBackend

    backends: list[Backend] = [LocalBackend(), LoopbackBackend(), AllToAllBackend(), SymmetricBackend()]
    known = {backend.name: backend for backend in backends}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name not in known:
            known[entry.name] = _loaded(entry)
    return known


class _Broken(Backend):
    """Stands for a backend of another package that cannot be loaded."""

    traits = _NO_TRAITS
    preference = "never"

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self._error = name, error

    def refusal(self, spec: TransportSpec, group: GroupFacts) -> str | None:
        return f"it could not be loaded: {self._error!r}"

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        raise BackendUnavailable(self.name, f"it could not be loaded: {self._error!r}")


def _loaded(entry: EntryPoint) -> Backend:
    try:
        backend: Backend = entry.load()()
    except _MISHAPS as error:  # one broken package must not take the other backends along
        return _Broken(entry.name, error)
    return backend


def choose(config: DispatcherConfig, spec: TransportSpec, members: Members, backend: str | Backend) -> list[Backend]:
    """The backend that will serve: the named or given one; for "auto" the usable ones, the first choice first.

    What a backend can only find out together with its peers, when it opens, is not looked at.

    Raises:
        ConfigError: an unknown name, or a configuration that the group cannot have.
        BackendUnavailable: it cannot serve here; a backend asked for by name is never replaced by another.
    """
    if isinstance(backend, Backend):
        return [_serving(backend, config, spec, members)]
    known = known_backends()
    if backend != "auto":
        if backend not in known:
            raise ConfigError(f"unknown backend {backend!r}; known are {', '.join(map(repr, ('auto', *known)))}")
        return [_serving(known[backend], config, spec, members)]
    candidates = _candidates(config, spec, members, known)
    usable = _usable(candidates, members, known)
    if not usable:
        explanation = Explanation(None, candidates)
        raise BackendUnavailable("auto", "no backend can serve this configuration on this group:\n" + str(explanation))
    return [known[name] for name in usable]


def make_spec(config: DispatcherConfig, members: Members) -> TransportSpec:
    """The transport's view of a configuration on a group.

    Raises:
        ConfigError: experts that do not divide over the group, or more rows than offsets can count.
    """
    if config.num_experts % members.size:
        raise ConfigError(
            f"num_experts ({config.num_experts}) must be divisible by the EP group's size ({members.size}):"
            " every rank holds the same number of experts"
        )
    _refuse_uncountable(config, members.size)
    return TransportSpec(
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_dim=config.hidden_dim,
        dtype=config.dtype,
        num_max_tokens_per_rank=config.num_max_tokens_per_rank,
        expert_alignment=config.expert_alignment,
        reduction=config.reduction,
        num_sms=config.num_sms,
        timeout_s=config.timeout_s,
        rank=members.rank,
        ep_size=members.size,
        row_capacity=config.row_capacity,
    )


def _refuse_uncountable(config: DispatcherConfig, ep_size: int) -> None:
    """Offsets are int32: the rows of a call as large as may be must fit them, where a formula tells their number."""
    if config.row_capacity.kind in ("exact", "calibrated"):
        return

    def num_rows(tokens: int) -> int:
        return int(resolve_num_rows(config, ep_size, tokens))

    tokens = config.num_max_tokens_per_rank
    if num_rows(tokens) > MAX_SIZE:
        most = bisect_right(range(1, tokens), MAX_SIZE, key=num_rows)
        raise ConfigError(
            f"row_capacity {config.row_capacity} means {num_rows(tokens)} rows for num_max_tokens_per_rank ({tokens})"
            f" on {ep_size} ranks, above {MAX_SIZE}, the largest offset; num_max_tokens_per_rank may be {most} at most"
        )


def _explain(config: DispatcherConfig, spec: TransportSpec, members: Members, known: dict[str, Backend]) -> Explanation:
    candidates = _candidates(config, spec, members, known)
    usable = _usable(candidates, members, known)

    def described(candidate: Candidate) -> Candidate:
        if candidate.why_not is not None:
            return candidate
        told = _described(candidate, known[candidate.name], spec, members.device)
        return replace(told, by_name_only=candidate.name not in usable)

    return Explanation(usable[0] if usable else None, tuple(map(described, candidates)))


def _described(candidate: Candidate, backend: Backend, spec: TransportSpec, device: torch.device | None) -> Candidate:
    """With what the backend says of itself."""

    def num_bytes() -> int | None:
        told = backend.workspace_bytes(_as_opened(spec, candidate.traits))
        return None if told is None else index(told)  # which refuses what is no integer

    how, mute = _asked(lambda: _of_kind(str, backend.describe(spec, device)), "how it would share out the work")
    workspace_bytes, sizeless = _asked(num_bytes, "how much storage it would take")
    _, aimless = _asked(lambda: _preference(backend, device), 'whether "auto" should take it')
    words = "; ".join(filter(None, (how, mute, sizeless, aimless)))
    return replace(candidate, how=words, workspace_bytes=workspace_bytes)


def _asked(ask: Callable[[], _Answer], what: str) -> tuple[_Answer | None, str | None]:
    """What a backend answers; or, in one sentence, that it could not tell `what`.

    It may be another package's: whatever goes wrong in it takes no other backend along.

    >>> _asked(lambda: 1 // 0, "how much"), _asked(lambda: 3, "how much")
    ((None, 'it could not tell how much: ZeroDivisionError: integer division or modulo by zero'), (3, None))
    """
    try:
        return ask(), None
    except _MISHAPS as error:
        return None, f"it could not tell {what}: {type(error).__name__}: {' '.join(str(error).split())}"


def _of_kind(kind: type[_Answer], answer: object) -> _Answer:
    if not isinstance(answer, kind):
        raise TypeError(f"{kind.__name__} is wanted, not {type(answer).__name__}")
    return answer


def _preference(backend: Backend, device: torch.device | None) -> Preference:
    told = backend.preference_on(device)
    if told not in get_args(Preference):
        raise ValueError(f"one of {', '.join(get_args(Preference))} is wanted, not {told!r}")
    return told


def _as_opened(spec: TransportSpec, traits: BackendTraits) -> TransportSpec:
    """What a backend of these traits is opened with, whose token counts the dispatcher pads."""
    alignment = traits.token_alignment
    most = -(-spec.num_max_tokens_per_rank // alignment) * alignment
    return replace(spec, num_max_tokens_per_rank=most)


def _candidates(
    config: DispatcherConfig, spec: TransportSpec, members: Members, known: dict[str, Backend]
) -> tuple[Candidate, ...]:
    return tuple(_candidate(name, backend, config, spec, members) for name, backend in known.items())


def _candidate(
    name: str, backend: Backend, config: DispatcherConfig, spec: TransportSpec, members: Members
) -> Candidate:
    """Whether a backend can serve, and why not."""
    traits, why_not = _asked(lambda: _of_kind(BackendTraits, backend.traits), "its traits")
    if traits is None:
        return Candidate(name, why_not, _NO_TRAITS)
    refusal, mute = _asked(lambda: _refusal(backend, traits, config, spec, members), "whether it can serve")
    return Candidate(name, refusal if mute is None else mute, traits)


def _usable(candidates: tuple[Candidate, ...], members: Members, known: dict[str, Backend]) -> list[str]:
    """What "auto" may take, the first choice first."""

    def preference(name: str) -> str:
        told, _ = _asked(lambda: _preference(known[name], members.device), "")
        return told or "never"

    preferences = {c.name: preference(c.name) for c in candidates if c.why_not is None}
    usable = [name for name, preferred in preferences.items() if preferred != "never"]
    return sorted(usable, key=lambda name: preferences[name] != "preferred")


def _refusal(
    backend: Backend, traits: BackendTraits, config: DispatcherConfig, spec: TransportSpec, members: Members
) -> str | None:
    why_not = _not_offered(traits, config) or backend.refusal(spec, _facts(members))
    return None if why_not is None else _of_kind(str, why_not) or "it gives no reason"


def _not_offered(traits: BackendTraits, config: DispatcherConfig) -> str | None:
    if config.row_capacity.kind not in traits.row_capacities:
        offered = ", ".join(sorted(traits.row_capacities))
        return f"row_capacity {config.row_capacity} is not offered by this backend, only {offered}"
    if not traits.duplicate_experts and not config.distinct_experts:
        return "it needs tokens that never name an expert twice, which distinct_experts=True declares"
    return None


def _facts(members: Members) -> GroupFacts:
    return GroupFacts(members.rank, members.size, members.device, members.transport)


def _serving(backend: Backend, config: DispatcherConfig, spec: TransportSpec, members: Members) -> Backend:
    candidate = _candidate(backend.name, backend, config, spec, members)
    if candidate.why_not is not None:
        known = known_backends()
        usable = _usable(_candidates(config, spec, members, known), members, known)
        other = [f'leave backend= out: "auto" takes {usable[0]!r} here'] if usable else []
        own = _remedy(backend, candidate, config, spec, members)
        raise BackendUnavailable(backend.name, candidate.why_not, ", or ".join([*own, *other]))
    return backend


def _remedy(
    backend: Backend, candidate: Candidate, config: DispatcherConfig, spec: TransportSpec, members: Members
) -> list[str]:
    """What would let a backend serve that refuses: another group, or what it needs; empty if neither would help."""
    traits, facts = candidate.traits, _facts(members)

    def refusal_with(transport: str) -> str | None:
        moved = replace(members, transport=transport)
        return _asked(lambda: _refusal(backend, traits, config, spec, moved), "")[0]

    if facts.transport not in ("gloo", "nccl") and refusal_with("gloo") != candidate.why_not:
        if facts.transport == "none":
            return ["call torch.distributed.init_process_group first, as on the ranks of torchrun"]
        return ["pass a group of torch.distributed"]
    unmended = (_not_offered(traits, config), _asked(lambda: Backend.refusal(backend, spec, facts), "")[0])
    return [] if traits.needs == "nothing" or candidate.why_not in unmended else [f"it needs {traits.needs}"]
