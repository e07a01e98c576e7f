"""A whole training step with dispatches that wait for their counts, and with dispatches that do not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from .. import DispatcherConfig, RowCapacity, TokenDispatcher, explain
from ..errors import BackendUnavailable, ConfigError
from .movements.group import agree
from .timing import Spread
from .train_step_model import RoutingKind, StepModel, StepSizes

_TIMEOUT_S = 120.0
_WARM_UP_STEPS = 3  # the first one calibrates
_PROFILED_STEPS = 3
_LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One run: a model, trained from its first step on.

    Attributes:
        sizes: of the model.
        routing: "dynamic" is a router's; "static" the balanced one of benchmarks.
        row_capacity: of the dispatches; `exact` waits.
        backend: of the dispatcher.
    """

    sizes: StepSizes
    routing: RoutingKind
    row_capacity: RowCapacity
    backend: str

    @property
    def waits(self) -> bool:
        """Whether dispatches wait for their counts."""
        return self.row_capacity.kind == "exact"

    def config(self) -> DispatcherConfig:
        """The dispatcher that all layers share."""
        return DispatcherConfig(
            num_experts=self.sizes.num_experts,
            top_k=self.sizes.top_k,
            hidden_dim=self.sizes.hidden_dim,
            dtype=self.sizes.torch_dtype,
            num_max_tokens_per_rank=self.sizes.num_tokens,
            row_capacity=self.row_capacity,
            equal_token_counts=True,
            timeout_s=_TIMEOUT_S,
        )


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """What one run gave, over all ranks.

    Attributes:
        step_ms: of the slowest rank, over the steps.
        tokens_per_s: of all ranks, at the median step.
        dispatch_host_us: how long the host is busy with a dispatch, of the slowest rank.
        host_reads_per_step: how often a dispatcher waited for a number on the host, in the steps that are timed.
        device_busy_ms: of a step: something ran on the device, waiting for other ranks included; None on a CPU.
        rows_per_layer: rows that a layer keeps for its backward, the busiest rank's, as many as the last step had room
            for.
        bytes_per_layer: what they take.
        losses: every step's, of all ranks, as float32 bits.
    """

    step_ms: Spread
    tokens_per_s: float
    dispatch_host_us: Spread
    host_reads_per_step: float
    device_busy_ms: float | None
    rows_per_layer: int
    bytes_per_layer: int
    losses: tuple[int, ...]

    @property
    def device_idle_pct(self) -> float | None:
        """The share of the median step in which nothing ran on the device."""
        if self.device_busy_ms is None:
            return None
        return max(0.0, 100 * (1 - self.device_busy_ms / self.step_ms.median))


def sync_free_backend(rank: int, sizes: StepSizes, wanted: str | None) -> str:
    """The backend that is measured: the wanted one, else what "auto" takes for a capacity of fixed size.

    Raises:
        ConfigError: an unknown name.
        BackendUnavailable: it does not offer such a capacity here, or nothing does.
    """
    capacity = RowCapacity.calibrated()
    config = StepCase(sizes=sizes, routing="dynamic", row_capacity=capacity, backend="").config()
    told = explain(config)
    reasons = {each.name: each.why_not for each in told.candidates}
    chosen = wanted or told.chosen
    if chosen is None:
        raise BackendUnavailable("auto", f"no backend offers row_capacity {capacity} here:\n{told}")
    if chosen not in reasons:
        raise ConfigError(f"unknown backend {chosen!r}; known are {', '.join(map(repr, reasons))}")
    if reasons[chosen] is not None:
        raise BackendUnavailable(chosen, str(reasons[chosen]))
    return chosen


def cases_of(
    sizes: StepSizes, routing: RoutingKind, backend: str, factor: float, num_ranks: int
) -> tuple[StepCase, StepCase]:
    """Blocking and sync-free; under the static routing the number of rows is known, and no factor applies."""
    waiting = StepCase(sizes=sizes, routing=routing, row_capacity=RowCapacity.exact(), backend=backend)
    capacity = RowCapacity.calibrated(factor)
    if routing == "static":
        capacity = RowCapacity.rows(max(_static_rows(sizes, num_ranks)))
    return waiting, replace(waiting, row_capacity=capacity)


def _static_rows(sizes: StepSizes, num_ranks: int) -> list[int]:
    """Rows of every rank: each brings the same tokens, whose slots go to the experts in turn.

    >>> _static_rows(StepSizes(num_tokens=3, top_k=2, num_experts=4), 2)  # experts 0 1 | 2 3 | 0 1, on two ranks
    [8, 4]
    """
    turns, rest = divmod(sizes.num_tokens * sizes.top_k, sizes.num_experts)
    num_local = sizes.num_experts // num_ranks
    firsts = range(0, sizes.num_experts, num_local)
    return [num_ranks * (turns * num_local + min(max(rest - first, 0), num_local)) for first in firsts]


def run_case(rank: int, case: StepCase, num_steps: int) -> StepRun:
    """Train from the beginning; the last `num_steps` steps are timed. Collective; every rank returns the same."""
    with TokenDispatcher(case.config(), backend=case.backend) as dispatcher:
        training = _Training(rank, case, dispatcher)
        for _ in range(_WARM_UP_STEPS):
            training.step()
        training.forget_times()
        reads = dispatcher.stats().host_syncs
        step_ms = _timed(training.step, num_steps, training.device)
        reads = dispatcher.stats().host_syncs - reads
        dispatch_us = training.dispatch_us()
        busy_ms = _busy_ms(training.step) if training.device.type == "cuda" else None
        rows = max(agree(max(training.rows_of(dispatcher))))
        losses = torch.stack(agree(torch.stack(training.losses).cpu())).view(torch.int32).flatten().tolist()
    slowest_ms = [max(times) for times in zip(*agree(step_ms), strict=True)]
    slowest_us = max(agree(dispatch_us), key=statistics.median)
    sizes = case.sizes
    row_bytes = sizes.hidden_dim * sizes.torch_dtype.itemsize
    return StepRun(
        step_ms=Spread.of(slowest_ms),
        tokens_per_s=dist.get_world_size() * sizes.num_tokens / statistics.median(slowest_ms) * 1e3,
        dispatch_host_us=Spread.of(slowest_us),
        host_reads_per_step=reads / num_steps,
        device_busy_ms=None if busy_ms is None else max(agree(busy_ms)),
        rows_per_layer=rows,
        bytes_per_layer=rows * row_bytes,
        losses=tuple(losses),
    )


class _Training:
    """A model with its batch and its optimizer; dense gradients are averaged over all ranks."""

    def __init__(self, rank: int, case: StepCase, dispatcher: TokenDispatcher) -> None:
        assert dispatcher.device is not None  # of a group
        self.device, sizes = dispatcher.device, case.sizes
        self.model = StepModel(sizes, dispatcher, case.routing)
        self.losses: list[Tensor] = []
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        generator = torch.Generator().manual_seed(1 + rank)
        both = torch.randn(2, sizes.num_tokens, sizes.hidden_dim, generator=generator)
        self._x, self._target = both.to(self.device, sizes.torch_dtype).unbind()

    def step(self) -> None:
        """Forward, backward, one optimizer step."""
        loss = (self.model(self._x) - self._target).float().square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._average_dense_gradients()
        self._optimizer.step()
        self.losses.append(loss.detach())

    def _average_dense_gradients(self) -> None:
        grads = [parameter.grad for parameter in self.model.dense_parameters() if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])

    def forget_times(self) -> None:
        """Of the dispatches so far."""
        for layer in self.model.timed_layers():
            layer.dispatch_us.clear()

    def dispatch_us(self) -> list[float]:
        """Of all layers, since they were forgotten."""
        return [taken for layer in self.model.timed_layers() for taken in layer.dispatch_us]

    def rows_of(self, dispatcher: TokenDispatcher) -> list[int]:
        """Rows that each layer had room for, or, without a capacity, the most that came."""
        layers = dispatcher.stats().layers.values()
        return [layer.capacity if layer.capacity > 0 else layer.largest_demand for layer in layers]


def _timed(step: Callable[[], None], num_steps: int, device: torch.device) -> list[float]:
    """Milliseconds of every step; on a GPU between marks on the device, so that nobody waits in between."""
    dist.barrier()
    if device.type != "cuda":
        marks = [time.perf_counter() * 1e3]
        for _ in range(num_steps):
            step()
            marks.append(time.perf_counter() * 1e3)
        return [end - start for start, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def _busy_ms(step: Callable[[], None]) -> float:
    """Milliseconds of a step in which something ran on the device, in any stream."""
    from torch.autograd.profiler_util import FunctionEvent
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    events: Sequence[FunctionEvent] = profiled.events()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return covered(spans) / 1e3 / _PROFILED_STEPS


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of some spans lasts.

    >>> covered([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
