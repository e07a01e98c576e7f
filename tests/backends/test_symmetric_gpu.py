"""`symmetric` on GPUs: bits, graphs, no host synchronisation, faults. On a machine with one GPU its ranks share it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.testing import StartedRanks, run_ranks, start_ranks
from tests.gpus import host_sync_is_an_error, on_gpus

TIMEOUT_S = 4.0
MARGIN_S = 5.0
SLEEP_CYCLES = 600_000_000  # about 300 ms
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def _config(**changes: Any) -> cd.DispatcherConfig:
    settings: dict[str, Any] = {
        "num_experts": 16,
        "top_k": 4,
        "hidden_dim": 256,
        "dtype": torch.bfloat16,
        "num_max_tokens_per_rank": 64,
        "timeout_s": 20.0,
    }
    return cd.DispatcherConfig(**{**settings, **changes})


def _inputs(config: cd.DispatcherConfig, rank: int, seed: int = 0, num_tokens: int | None = None) -> Inputs:
    generator = torch.Generator(device="cuda").manual_seed(100 * seed + rank)
    tokens = config.num_max_tokens_per_rank if num_tokens is None else num_tokens
    x = torch.randn(tokens, config.hidden_dim, device="cuda", generator=generator).to(config.dtype)
    scores = torch.rand(tokens, config.top_k, device="cuda", generator=generator)
    chances = torch.rand(tokens, config.num_experts, device="cuda", generator=generator)
    return x, scores, chances.topk(config.top_k, 1).indices


def _there_and_back(dispatcher: cd.TokenDispatcher, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rows up to the last offset, their scores, counts, offsets, output, and both gradients."""
    x, scores, ids = inputs[0].detach().requires_grad_(), inputs[1].detach().requires_grad_(), inputs[2]
    routed = dispatcher.dispatch(x, scores, ids)
    out = dispatcher.combine(routed.rows * 2, routed.handle)
    weights = torch.arange(out.shape[1], device=out.device)
    grads = torch.autograd.grad((out.float() * weights).sum(), (x, scores))
    dispatcher.check()
    end = int(routed.expert_offsets[-1])
    kept = (routed.rows[:end], routed.scores[:end], routed.tokens_per_expert, routed.expert_offsets, out, *grads)
    return [tensor.detach() for tensor in kept]


def _bits(rank: int, reduction: Any, alignment: int, dtype: torch.dtype, num_sms: int | None) -> list[bool]:
    exact = _config(reduction=reduction, expert_alignment=alignment, dtype=dtype, hidden_dim=40, num_sms=num_sms)
    free = _config(
        **{
            **{
                name: getattr(exact, name)
                for name in ("reduction", "expert_alignment", "dtype", "hidden_dim", "num_sms")
            }
        },
        row_capacity=cd.RowCapacity.worst_case(),
    )
    other, device = _other()
    came = []
    for config, backend, place in ((exact, other, device), (exact, "symmetric", "cuda"), (free, "symmetric", "cuda")):
        with cd.TokenDispatcher(config, backend=backend, device=place) as dispatcher:
            inputs = [tensor.to(place) for tensor in _inputs(config, rank, num_tokens=50 - 7 * rank)]
            came.append([tensor.cuda() for tensor in _there_and_back(dispatcher, inputs)])
    *kept, score_grads = came[0]
    same = [torch.equal(a, b) for other in came[1:] for a, b in zip(kept, other[:-1], strict=True)]
    if device == "cuda":
        return [*same, *(torch.equal(score_grads, other[-1]) for other in came[1:])]
    # A dot product's order of addition is the device's own.
    return [
        *same,
        torch.equal(came[1][-1], came[2][-1]),
        torch.allclose(score_grads, came[1][-1], rtol=1e-4, atol=1e-3),
    ]


def _other() -> tuple[str, str]:
    """A backend to compare with, and the device that its tensors live on."""
    if torch.distributed.get_world_size() == 1:
        return "local", "cuda"
    return "all_to_all", "cuda" if "nccl" in torch.distributed.get_backend() else "cpu"


@pytest.mark.parametrize("num_sms", [None, 16])
@pytest.mark.parametrize(
    ("reduction", "alignment", "dtype"),
    [("fast", 1, torch.bfloat16), ("exact", 16, torch.float32), ("fast", 16, torch.float16)],
)
def test_the_bits_are_those_of_all_to_all(reduction, alignment, dtype, num_sms):
    for same in run_ranks(_bits, 2, reduction, alignment, dtype, num_sms, **on_gpus(2), timeout_s=120.0):
        assert all(same), same


def _replays(rank: int, backend: str) -> list[str]:
    """What went wrong, in words."""
    config = _config(row_capacity=cd.RowCapacity.worst_case())
    wrong = []
    with torch.no_grad():
        dispatcher = cd.TokenDispatcher(config, backend=backend, device="cuda")
        held = _inputs(config, rank)

        def pair() -> torch.Tensor:
            routed = dispatcher.dispatch(*held)
            return dispatcher.combine(routed.rows, routed.handle)

        for _ in range(2):
            pair()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = pair()
        for seed in range(5):
            x, scores, ids = _inputs(config, rank, seed + 1)
            ids = (ids, torch.full_like(ids, -1), torch.zeros_like(ids), ids, ids)[seed]
            for tensor, value in zip(held, (x, scores, ids), strict=True):
                tensor.copy_(value)
            graph.replay()
            got = captured.clone()
            if not torch.equal(got, pair()):
                wrong.append(f"replay {seed} differs from an eager call")
            dispatcher.check()
        del graph
        dispatcher.close(graphs_destroyed=True)
    return wrong


def test_graphs_replay_other_routings_with_eager_calls_between():
    assert run_ranks(_replays, 2, "symmetric", **on_gpus(2), timeout_s=120.0) == [[], []]


def _captures_exact(rank: int) -> str:
    with torch.no_grad(), cd.TokenDispatcher(_config(), backend="symmetric", device="cuda") as dispatcher:
        inputs = _inputs(_config(), rank)
        dispatcher.dispatch(*inputs)
        torch.cuda.synchronize()
        message = "nothing was raised"
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                dispatcher.dispatch(*inputs)
            except cd.ContractViolation as error:
                message = str(error)
            torch.zeros(1, device="cuda")  # an empty graph is a warning
        dispatcher.dispatch(*inputs)
    return message


def test_a_capture_without_a_fixed_capacity_is_refused():
    for message in run_ranks(_captures_exact, 2, **on_gpus(2), timeout_s=60.0):
        assert "waits for the host, which a CUDA graph cannot capture" in message


def _captures_first(rank: int) -> str:
    """The very first call of a process, kernels not loaded, in a capture: refused in words, or captured as another."""
    config = _config(row_capacity=cd.RowCapacity.worst_case())
    inputs, message, cold_graph = _inputs(config, rank), "", torch.cuda.CUDAGraph()

    def pair(dispatcher: cd.TokenDispatcher) -> torch.Tensor:
        routed = dispatcher.dispatch(*inputs)
        return dispatcher.combine(routed.rows, routed.handle)

    with torch.no_grad():
        cold = cd.TokenDispatcher(config, backend="symmetric", device="cuda")
        with suppress(RuntimeError), torch.cuda.graph(cold_graph):  # torch says once more that a capture is lost
            try:
                first = pair(cold)
            except cd.ContractViolation as error:
                message = str(error)
        if not message:  # Triton and the driver load kernels inside a capture
            cold_graph.replay()
            torch.cuda.synchronize()
        warm = cd.TokenDispatcher(config, backend="symmetric", device="cuda")
        expected, graph = pair(warm), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = pair(warm)
        graph.replay()
        assert torch.equal(captured, expected), "a replay differs from an eager call"
        assert message or torch.equal(first, expected), "a replay of the very first call differs"
        warm.check()
        del graph, cold_graph
        for dispatcher in (cold, warm):
            dispatcher.close(graphs_destroyed=True)
    return message


def test_a_capture_as_the_very_first_call_works_or_is_refused_in_words():
    for message in run_ranks(_captures_first, 2, **on_gpus(2), timeout_s=120.0):
        assert not message or "was the first of its kind and met inside a CUDA graph's capture" in message


def _host_time(rank: int) -> dict[str, float]:
    config = _config(row_capacity=cd.RowCapacity.worst_case())
    with cd.TokenDispatcher(config, backend="symmetric", device="cuda") as dispatcher:
        x, scores, ids = _inputs(config, rank)
        x.requires_grad_()
        for _ in range(3):
            routed = dispatcher.dispatch(x, scores, ids)
            dispatcher.combine(routed.rows, routed.handle).sum().backward()
        torch.cuda.synchronize()
        with host_sync_is_an_error():
            torch.cuda._sleep(SLEEP_CYCLES)
            marks = [time.perf_counter()]
            routed = dispatcher.dispatch(x, scores, ids)
            marks.append(time.perf_counter())
            out = dispatcher.combine(routed.rows, routed.handle)
            marks.append(time.perf_counter())
            out.sum().backward()
            marks.append(time.perf_counter())
        torch.cuda.synchronize()
        slept = time.perf_counter() - marks[0]
        assert dispatcher.stats().host_syncs == 0
    names = ("dispatch", "combine", "backward")
    return {
        **{name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)},
        "all": slept,
    }


def test_nothing_waits_on_the_host():
    for took in run_ranks(_host_time, 2, **on_gpus(2), timeout_s=120.0):
        assert took["all"] > 0.2, "the device was to sleep meanwhile"
        assert max(took["dispatch"], took["combine"], took["backward"]) < 0.02, took


def _without_a_peer(rank: int, fault: str) -> dict[str, Any]:
    """Rank 1 goes after one good pair of calls; rank 0 tells what its next combine came to."""
    config = _config(row_capacity=cd.RowCapacity.worst_case(), timeout_s=TIMEOUT_S)
    dispatcher = cd.TokenDispatcher(config, backend="symmetric", device="cuda")
    with torch.no_grad():
        routed = dispatcher.dispatch(*_inputs(config, rank))
        dispatcher.combine(routed.rows, routed.handle)
        torch.cuda.synchronize()
        if rank == 1:
            if fault == "dies":
                os._exit(7)
            if fault == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "closes":
                dispatcher.close()
            time.sleep(3 * TIMEOUT_S)  # "idles"
            return {}
        begun = time.monotonic()
        out = dispatcher.combine(routed.rows, routed.handle)
        enqueued_s = time.monotonic() - begun
        torch.cuda.synchronize()
        told: dict[str, Any] = {"enqueued_s": enqueued_s, "is_nan": bool(out.isnan().all())}
        try:
            dispatcher.check()
        except cd.PeerTimeout as error:
            told |= {"ranks": error.ranks, "after_s": time.monotonic() - begun}
        dispatcher.close()
    return told


def _first_rank_of(started: StartedRanks) -> dict[str, Any]:
    """What rank 0 has told, whether rank 1 answers or not."""
    deadline = time.monotonic() + 90.0
    while True:
        first = started.results(timeout_s=2.0)[0]
        if not first.silent or time.monotonic() > deadline:
            told: dict[str, Any] = first.value
            return told


@pytest.mark.parametrize("fault", ["dies", "stops", "idles", "closes"])
def test_a_missing_rank_is_named_and_the_device_is_freed(fault):
    with start_ranks(_without_a_peer, 2, fault, **on_gpus(2)) as started:
        told = _first_rank_of(started)
    assert told["enqueued_s"] < 1.0, "combine waited on the host"
    assert told["is_nan"], "outputs of a call that was given up are NaN"
    assert told["ranks"] == (1,)
    assert told["after_s"] < TIMEOUT_S + MARGIN_S


def _differ(rank: int) -> tuple[bool, str]:
    config = _config(row_capacity=cd.RowCapacity.worst_case(), timeout_s=TIMEOUT_S)
    dispatcher = cd.TokenDispatcher(config, backend="symmetric", device="cuda")
    with torch.no_grad():
        routed = dispatcher.dispatch(*_inputs(config, rank))
        out = dispatcher.layer(f"layer {rank}").combine(routed.rows, routed.handle)
        torch.cuda.synchronize()
        try:
            dispatcher.check()
        except cd.ContractViolation as error:
            return bool(out.isnan().all()), str(error)
        finally:
            dispatcher.close()
    return False, "nothing was noticed"


def test_ranks_that_differ_are_told_what_differs():
    for is_nan, message in run_ranks(_differ, 2, **on_gpus(2), timeout_s=60.0):
        assert is_nan
        assert "layer is 'layer 0' on ranks [0], 'layer 1' on ranks [1]" in message


def _overflow(rank: int) -> str:
    config = _config(row_capacity=cd.RowCapacity.rows(8), timeout_s=TIMEOUT_S)
    dispatcher = cd.TokenDispatcher(config, backend="symmetric", device="cuda")
    with torch.no_grad():
        try:
            x, scores, ids = _inputs(config, rank)
            dispatcher.dispatch(x, scores, torch.zeros_like(ids))  # all rows go to rank 0
            torch.cuda.synchronize()
            for _ in range(3):
                dispatcher.dispatch(x, scores, torch.full_like(ids, -1))
                time.sleep(0.2)
        except cd.CapacityOverflow as error:
            return str(error)
        finally:
            dispatcher.close()
    return "nothing was raised"


def test_an_overflow_is_raised_on_all_ranks_alike():
    first, second = run_ranks(_overflow, 2, **on_gpus(2), timeout_s=60.0)
    assert first == second
    assert "on rank 0" in first and "asked for 512 rows" in first


def test_one_gpu_alone():
    for reduction, alignment in (("fast", 1), ("exact", 16)):
        (same,) = run_ranks(_bits, 1, reduction, alignment, torch.bfloat16, None, **on_gpus(1), timeout_s=90.0)
        assert all(same), same
    assert run_ranks(_replays, 1, "symmetric", **on_gpus(1), timeout_s=60.0) == [[]]
