"""Who is measured: a backend with a row capacity and a reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import DispatcherConfig, explain
from ...backends.base import BackendTraits
from ...errors import ConfigError
from ...types import Reduction
from .capacities import CapacityChoice
from .problems import Problem

_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A backend as it will be opened.

    Attributes:
        backend: name.
        capacity: of rows.
        reduction: "fast" or "exact".
        num_sms: the most blocks of a data-moving kernel; None lets the backend choose.
    """

    backend: str
    capacity: CapacityChoice
    reduction: Reduction = "fast"
    num_sms: int | None = None

    def config(self, problem: Problem, traits: BackendTraits | None = None) -> DispatcherConfig:
        """What its dispatcher is opened with; what a backend's traits ask to be declared is so here."""
        workload = problem.workload
        return DispatcherConfig(
            num_experts=workload.num_experts,
            top_k=workload.top_k,
            hidden_dim=workload.hidden_dim,
            dtype=workload.dtype,
            num_max_tokens_per_rank=workload.num_tokens,
            row_capacity=self.capacity.of(problem.num_rows_needed),
            reduction=self.reduction,
            num_sms=self.num_sms,
            equal_token_counts=traits is not None and not traits.ragged_counts,
            distinct_experts=traits is not None and not traits.duplicate_experts,
            timeout_s=_TIMEOUT_S,
        )

    def is_interpreted(self, device_type: str) -> bool:
        """Whether its kernels run in Triton's interpreter, whose time says nothing of what they can reach."""
        return self.backend == "symmetric" and device_type == "cpu"


@dataclass(frozen=True)
class Field:
    """The contenders of a workload, and why others are none: by backend, or by backend and capacity."""

    contenders: tuple[Contender, ...]
    refused: Mapping[str, str]


def find_contenders(
    problem: Problem,
    backends: Sequence[str],
    capacities: Sequence[CapacityChoice],
    reductions: Sequence[Reduction],
    num_sms: Sequence[int | None],
) -> Field:
    """Who can serve a problem on the default group.

    Without `backends` all are asked; without `capacities` each takes part with `rows` if it offers them here, else with
    `exact`. The other arguments multiply.
    """
    found: list[Contender] = []
    refused: dict[str, str] = {}
    for backend in backends or _reasons(problem, Contender(backend="", capacity=CapacityChoice("exact"))):
        choices = capacities or (CapacityChoice("rows"), CapacityChoice("exact"))
        for capacity in choices:
            trial = Contender(backend=backend, capacity=capacity)
            why_not = _why_not(problem, trial)
            if why_not is None:
                found += [
                    Contender(backend=backend, capacity=capacity, reduction=reduction, num_sms=sms)
                    for reduction in reductions
                    for sms in num_sms
                ]
                if not capacities:
                    refused.pop(backend, None)
                    break
            else:
                refused[f"{backend}, {capacity.kind}" if capacities else backend] = why_not
    return Field(tuple(found), refused)


def traits_here(problem: Problem, contender: Contender) -> BackendTraits:
    """The traits of a contender's backend."""
    traits: BackendTraits = _candidates(contender.config(problem), problem.device)[contender.backend].traits
    return traits


def _why_not(problem: Problem, contender: Contender) -> str | None:
    reasons = _reasons(problem, contender)
    if contender.backend not in reasons:
        raise ConfigError(f"unknown backend {contender.backend!r}; known are {', '.join(map(repr, reasons))}")
    if reasons[contender.backend] is None and not contender.capacity.holds(problem):
        held = contender.capacity.of(problem.num_rows_needed)
        raise ConfigError(f"{held} holds less than the {problem.num_rows_needed} rows that {problem.workload} needs")
    return reasons[contender.backend]


def _reasons(problem: Problem, contender: Contender) -> dict[str, str | None]:
    """Why each backend cannot serve, None where it can, once what its traits ask for is declared."""
    plain = _candidates(contender.config(problem), problem.device)
    declared = {
        name: _candidates(contender.config(problem, candidate.traits), problem.device)[name]
        for name, candidate in plain.items()
        if not (candidate.traits.ragged_counts and candidate.traits.duplicate_experts)
    }
    return {name: declared.get(name, candidate).why_not for name, candidate in plain.items()}


def _candidates(config: DispatcherConfig, device: torch.device) -> dict[str, Any]:
    return {candidate.name: candidate for candidate in explain(config, device=device).candidates}
