"""Training with a row capacity, through an overflow and out of it again, against training that waits for counts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossdock import DispatcherConfig, RowCapacity, TokenDispatcher, explain
from crossdock.nn import GroupedExperts
from crossdock.overflow import OverflowGuard

from .claims import Claim, Comparison, on_ranks
from .data import load_text
from .layers import LayerLine, layer_lines
from .model import Transformer
from .parallel import device_of_rank
from .settings import Job, ModelSizes
from .step import Batch, loss_of_rank, sum_dense_gradients

STEPS = 8
COLLAPSED = (3, 6)  # in these steps, from 0, the routers send every token to the first rank
_CAPACITY = RowCapacity.calibrated(1.5)
_DTYPE_ON_GPUS = "bfloat16"  # of experts that read no counts on the host there
_NUM_SEQUENCES = 1
_NO_WAITS = "no step waits for a count: dynamic routing without a host synchronisation"
_SAME_BITS = "training with a row capacity gives the bits of training that waits for its counts"
_FAR = 100.0  # a bias that no router's scores reach


@dataclass(frozen=True)
class _Place:
    """Where the capacity is tried: `group` is None for all ranks as they are, and `why` then empty."""

    backend: str
    device: torch.device
    group: Any = None
    why: str = ""

    @property
    def reads_sizes(self) -> bool:
        """Whether the transport takes its sizes from the host under every capacity."""
        return self.backend == "all_to_all"


@dataclass(frozen=True, eq=False)
class _Run:
    """What one training gave, by step where it is a list.

    Attributes:
        tensors: losses of the steps that were applied, and the weights at the end.
        reads: how often the dispatcher waited for a count on the host.
        device_waits: how often the host waited for the GPU; empty on a CPU.
        skipped: steps that were not applied.
        capacities: rows that the largest layer had room for; -1 where it waited.
        layers: see `LayerLine`.
    """

    tensors: dict[str, Tensor]
    reads: list[int]
    device_waits: list[int]
    skipped: list[int]
    capacities: list[int]
    layers: tuple[LayerLine, ...]


def prove_sync_free(rank: int, job: Job) -> list[Claim]:
    """Train with a calibrated capacity under a guard, then with `exact` and without the steps that were skipped."""
    place = _place(job)
    sizes = replace(job.sizes, experts_dtype=_DTYPE_ON_GPUS) if place.device.type == "cuda" else job.sizes
    batches = _batches(rank, job, sizes, place)
    config = sizes.dispatcher_config(_NUM_SEQUENCES, "fast", equal_token_counts=True, on_overflow="skip_step")
    free = _train(replace(config, row_capacity=_CAPACITY), place, job, sizes, batches, leave_out=())
    exact = _train(config, replace(place, backend="auto"), job, sizes, batches, leave_out=free.skipped)
    comparison = Comparison()
    comparison.add_all("with a capacity:", free.tensors, exact.tensors)
    where = on_ranks(dist.get_world_size(), place.device)
    how = f"{STEPS} steps with row_capacity {_CAPACITY} on {where} over {place.backend}, against exact(){place.why}"
    if place.reads_sizes:
        how += "; Gloo takes sizes from the host, so its reads stay"
    same = comparison.claim("", how, place.group)
    reads = replace(
        same,
        claim=_SAME_BITS if place.reads_sizes else _NO_WAITS,
        holds=same.holds and (place.reads_sizes or not any(free.reads[1:] + free.device_waits[1:])),
        result=f"host reads of counts by step: {_told(exact.reads)} before, {_told(free.reads)} after"
        f"{_device_told(exact, free)}; {same.result}",
        layers=free.layers,
    )
    room = free.capacities[COLLAPSED[0] - 1]
    overflow = replace(
        same,
        claim="an overflow costs one step, and nothing else",
        how=f"all tokens go to one rank in step {COLLAPSED[0] + 1} and again in {COLLAPSED[1] + 1}; an OverflowGuard"
        " skips what lacks rows and the capacity grows; against exact() without the skipped steps",
        holds=same.holds and free.skipped == [COLLAPSED[0]] and free.capacities[-1] > room,
        result=f"skipped: step {_told([step + 1 for step in free.skipped])}; room for {room} rows before,"
        f" {free.capacities[-1]} after; {same.result}",
    )
    return [reads, overflow]


def _place(job: Job) -> _Place:
    """The job's own backend if it offers the capacity here, else the best that does; at last two CPUs' worth of it."""
    device = device_of_rank()
    config = job.sizes.dispatcher_config(_NUM_SEQUENCES, "fast", row_capacity=_CAPACITY)
    backend, waits = _offering(config, job.backend, None), _experts_wait(job.sizes, device)
    if backend and not waits:
        return _Place(backend, device)
    group = dist.new_group(backend="gloo")
    backend = _offering(config, "auto", group)
    assert backend is not None, "all_to_all serves every Gloo group"
    why = "experts read their counts on the host" if waits else "nothing offers it"
    return _Place(backend, torch.device("cpu"), group, f"; on the CPU, for {why} on {device.type}")


def _experts_wait(sizes: ModelSizes, device: torch.device) -> bool:
    """Whether this GPU has no product of grouped rows that leaves the host alone."""
    if device.type != "cuda":
        return False
    dtype = replace(sizes, experts_dtype=_DTYPE_ON_GPUS).dtype
    return GroupedExperts(1, sizes.hidden_dim, sizes.ffn_dim, dtype=dtype, device=device).reads_counts_on_host


def _offering(config: DispatcherConfig, wanted: str, group: Any) -> str | None:
    """A backend with this capacity: the wanted one; for "auto" the one that reads the least on the host."""
    usable = [each.name for each in explain(config, group).candidates if each.why_not is None]
    names = ("symmetric", *usable) if wanted == "auto" else (wanted,)
    return next((name for name in names if name in usable), None)


def _batches(rank: int, job: Job, sizes: ModelSizes, place: _Place) -> list[Batch]:
    text, generator = load_text(job.data), torch.Generator().manual_seed(1000 * job.seed + 300 + rank)
    batches = []
    for _ in range(STEPS):
        sequences = text.batch(_NUM_SEQUENCES, sizes.seq_len, generator).to(place.device)
        num_tokens = dist.get_world_size() * _NUM_SEQUENCES * sizes.seq_len
        batches.append(Batch(sequences[:, :-1], sequences[:, 1:], num_tokens))
    return batches


def _train(
    config: DispatcherConfig, place: _Place, job: Job, sizes: ModelSizes, batches: list[Batch], leave_out: Any
) -> _Run:
    """All steps but those left out, whose batches are passed over."""
    tensors: dict[str, Tensor] = {}
    reads, waits, skipped, capacities = (list[int]() for _ in range(4))
    with TokenDispatcher(config, place.group, place.backend) as dispatcher:
        model = Transformer(sizes, dispatcher, job.seed, place.device)
        guard = OverflowGuard(dispatcher, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        for step, batch in enumerate(batches):
            if step in leave_out:
                continue
            before = dispatcher.stats().host_syncs
            with _collapsed(model, step in COLLAPSED), _device_waits(place.device) as waited:
                loss = _step(model, guard, batch, place.group)
            reads.append(dispatcher.stats().host_syncs - before)
            waits += waited
            if guard.num_skipped() > len(skipped):
                skipped.append(step)
            else:
                tensors[f"loss of step {step + 1}"] = loss
            capacities.append(max(layer.capacity for layer in dispatcher.stats().layers.values()))
        tensors |= {name: parameter.detach() for name, parameter in model.named_parameters()}
        lines = layer_lines("capacity", dispatcher, place.group)
    return _Run(tensors, reads, waits, skipped, capacities, lines)


def _step(model: Transformer, guard: OverflowGuard, batch: Batch, group: Any) -> Tensor:
    """Forward, backward, and the guard's word on the optimiser's step; this rank's share of the loss."""
    loss = loss_of_rank(model(batch.inputs).logits, batch)
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    sum_dense_gradients(model, group)
    guard.step()
    return loss.detach()


@contextmanager
def _collapsed(model: Transformer, collapses: bool) -> Iterator[None]:
    """Routers that, while this lasts, see no experts but those of the first rank."""
    biases = [block.get_buffer("expert_bias") for block in model.each_block()] if collapses else []
    for bias in biases:
        bias[: len(bias) // model.ep_size] += _FAR
    yield
    for bias in biases:
        bias.zero_()


@contextmanager
def _device_waits(device: torch.device) -> Iterator[list[int]]:
    """A list that gets, at the end, how often the host has waited for the GPU; on a CPU it stays empty."""
    counted: list[int] = []
    if device.type != "cuda":
        yield counted
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counted
        finally:
            torch.cuda.set_sync_debug_mode(before)
    counted.append(sum("synchroniz" in str(warning.message) for warning in told))


def _told(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _device_told(exact: _Run, free: _Run) -> str:
    if not free.device_waits:
        return ""
    return f"; waits for the GPU: {_told(exact.device_waits)} before, {_told(free.device_waits)} after"
