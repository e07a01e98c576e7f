"""What was typed, and the workloads that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossdock import DispatcherConfig
from crossdock.bench.bars import NUM_SMS
from crossdock.bench.movements.workloads import DEFAULT_NAMES, NAMED, ROUTINGS, SWEEPS, Workload
from crossdock.errors import ConfigError
from crossdock.types import SUPPORTED_DTYPES

from ..output import counted

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SUPPORTED_DTYPES}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was typed; see the command for their meaning."""

    backends: tuple[str, ...]
    ranks: int | None
    device: str
    workloads: tuple[str, ...]
    sizes: Mapping[str, int | None]
    dtype: str
    routings: tuple[str, ...]
    capacities: tuple[str, ...]
    exact: bool
    num_sms: int | None
    repeats: int | None
    runs: int
    sweep: str | None
    bars: bool
    json: Path | None
    plot: Path | None


_OPTIONS = {"num_tokens": "--tokens", "hidden_dim": "--hidden", "num_experts": "--experts", "top_k": "--top-k"}


@dataclass(frozen=True)
class Job:
    """A workload, with the bound on blocks that its contenders are opened with."""

    workload: Workload
    num_sms: int | None


def jobs_of(options: Options, device_type: str, num_ranks: int) -> tuple[Job, ...]:
    """What is measured, one workload after the other.

    Raises:
        ConfigError: sizes that cannot work, in one sentence.
    """
    workloads = [replace(workload, routing=routing) for workload in _sizes(options, device_type)
                 for routing in _routings(options)]  # fmt: skip
    for workload in workloads:
        if workload.num_experts % num_ranks:
            raise ConfigError(
                f"the {workload.num_experts} experts of {workload.name} do not divide over {counted(num_ranks, 'rank')}"
            )
        _refuse(workload, options.num_sms)
    jobs = [Job(workload, options.num_sms) for workload in workloads]
    if options.bars and device_type == "cuda" and NAMED["train"] in workloads:
        jobs += [Job(NAMED["train"], NUM_SMS), Job(replace(NAMED["train"], routing="zipf"), options.num_sms)]
    return tuple(dict.fromkeys(jobs))


def _refuse(workload: Workload, num_sms: int | None) -> None:
    """Sizes that no dispatcher can be configured with, before anything is started."""
    DispatcherConfig(
        num_experts=workload.num_experts,
        top_k=workload.top_k,
        hidden_dim=workload.hidden_dim,
        dtype=workload.dtype,
        num_max_tokens_per_rank=workload.num_tokens,
        num_sms=num_sms,
    )


def _routings(options: Options) -> Any:
    for routing in options.routings:
        if routing not in ROUTINGS:
            raise ConfigError(f"--routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    return options.routings


def _sizes(options: Options, device_type: str) -> list[Workload]:
    own = {name: value for name, value in options.sizes.items() if value is not None}
    for name, value in own.items():
        if value < 1:
            raise ConfigError(f"{_OPTIONS[name]} must be at least 1, got {value}")
    if options.dtype not in _DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(_DTYPES)}, got {options.dtype!r}")
    for name in options.workloads:
        if name not in NAMED:
            raise ConfigError(f"--workload must be one of {', '.join(NAMED)}, got {name!r}")
    names = options.workloads or DEFAULT_NAMES[device_type]
    if options.sweep is not None and "num_tokens" in own:
        raise ConfigError(
            f"--sweep {options.sweep} and --tokens {own['num_tokens']} both say how many tokens there are"
        )
    if own or options.sweep is not None:
        if len(options.workloads) > 1:
            raise ConfigError("own sizes and a sweep start from one --workload, got several")
        base = NAMED["train" if device_type == "cuda" and not options.workloads else names[0]]
        bases = [_own(base, own)]
    else:
        bases = [NAMED[name] for name in names]
    chosen = [replace(base, dtype=_DTYPES[options.dtype]) for base in bases]
    return chosen if options.sweep is None else _swept(chosen[0], options.sweep, device_type)


def _own(base: Workload, own: Mapping[str, int]) -> Workload:
    changes: dict[str, Any] = {**own, "name": "own"} if own else {}
    workload = replace(base, **changes)
    if workload.top_k > workload.num_experts:
        raise ConfigError(f"--top-k ({workload.top_k}) must not exceed --experts ({workload.num_experts})")
    return workload


def _swept(base: Workload, sweep: str, device_type: str) -> list[Workload]:
    parts = sweep.split(",")
    if sweep == "auto":
        numbers = SWEEPS[device_type]
    elif all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        numbers = tuple(int(part) for part in parts)
    else:
        raise ConfigError(f"--sweep must be 'auto' or numbers of tokens such as 16,128,1024, got {sweep!r}")
    return [replace(base, num_tokens=number, name=f"{base.name}-{number}") for number in numbers]
