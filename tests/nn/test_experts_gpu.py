"""Experts on a GPU: no host synchronisation, and who waits is refused; tails of NaN, empty experts, CUDA graphs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossdock as cd
from crossdock.nn import GroupedExperts, MoE
from crossdock.routing import softmax_topk
from crossdock.testing import assert_bit_equal
from tests.gpus import host_sync_is_an_error

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDTHS = [(256, 192), (24, 40), (17, 5)]
COUNTS = [130, 0, 17, 1, 64, 0, 2, 33]
TAIL = 70
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_width = pytest.mark.parametrize("widths", WIDTHS, ids=str)


def drawn(widths: tuple[int, int], dtype: torch.dtype, counts: list[int] = COUNTS) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and gradient with a tail of NaN, and the offsets."""
    kept = sum(counts)
    rows, grad = (torch.randn(kept + TAIL, widths[0], generator=torch.Generator().manual_seed(i)) for i in range(2))
    rows[kept:], grad[kept:] = math.nan, math.nan
    return rows.to(dtype).cuda(), grad.to(dtype).cuda(), torch.tensor(counts).cumsum(0).int().cuda()


def run(experts: GroupedExperts, rows: Tensor, offsets: Tensor, grad: Tensor) -> list[Tensor]:
    experts.zero_grad(set_to_none=True)
    rows = rows.clone().requires_grad_()
    out = experts(rows, offsets)
    out.backward(grad)
    weights = [experts.gate_proj, experts.up_proj, experts.down_proj]
    return [out.detach(), *(tensor.grad for tensor in (rows, *weights) if tensor.grad is not None)]


@every_dtype
@every_width
def test_tails_and_empty_experts(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    experts = GroupedExperts(len(COUNTS), *widths, dtype=dtype, device="cuda", seed=1)
    poison = [torch.full_like(weight, math.nan) for weight in experts.parameters() for _ in range(4)]
    del poison  # what the allocator hands out next is full of NaN
    rows, grad, offsets = drawn(widths, dtype)
    out, grad_rows, *grad_weights = run(experts, rows, offsets, grad)
    host = GroupedExperts(len(COUNTS), *widths, dtype=torch.float64)
    host.load_state_dict({name: weight.double() for name, weight in experts.state_dict().items()})
    kept = sum(COUNTS)
    truth = run(host, rows[:kept].double().cpu(), offsets.cpu(), grad[:kept].double().cpu())
    step = torch.finfo(dtype).eps
    for found, true in zip([out[:kept], grad_rows[:kept], *grad_weights], truth, strict=True):
        assert found.isfinite().all()
        assert float((found.double().cpu() - true).abs().max()) <= 8 * step * float(true.abs().max())
    for expert, count in enumerate(COUNTS):
        for gradient in grad_weights:
            if count == 0:
                assert_bit_equal(gradient[expert], torch.zeros_like(gradient[expert]))


@every_dtype
@every_width
@pytest.mark.parametrize("ep_size", [2, 4])
def test_an_expert_does_not_depend_on_its_neighbours(dtype: torch.dtype, widths: tuple[int, int], ep_size: int) -> None:
    num_local = len(COUNTS) // ep_size
    rows, grad, offsets = drawn(widths, dtype)
    whole = run(GroupedExperts(len(COUNTS), *widths, dtype=dtype, device="cuda", seed=2), rows, offsets, grad)
    start = 0
    for rank in range(ep_size):
        local = slice(rank * num_local, (rank + 1) * num_local)
        end = start + sum(COUNTS[local])
        experts = GroupedExperts(num_local, *widths, dtype=dtype, device="cuda", seed=2, first_expert_id=local.start)
        ends = torch.tensor(COUNTS[local]).cumsum(0).int().cuda()
        part = run(experts, rows[start:end].clone(), ends, grad[start:end].clone())
        for found, expected in zip(part[:2], whole[:2], strict=True):
            assert_bit_equal(found, expected[start:end])
        for found, expected in zip(part[2:], whole[2:], strict=True):
            assert_bit_equal(found, expected[local])
        start = end


def test_bfloat16_on_a_new_enough_gpu_never_reads_the_counts() -> None:
    experts = GroupedExperts(len(COUNTS), 256, 192, dtype=torch.bfloat16, device="cuda")
    if experts.reads_counts_on_host:
        pytest.skip("this GPU has no grouped product in one kernel")
    rows, grad, offsets = drawn((256, 192), torch.bfloat16)
    for scores in (None, torch.ones(rows.shape[0], device="cuda")):
        with host_sync_is_an_error():
            experts(rows.requires_grad_(), offsets, scores).backward(grad)


def test_float32_says_that_it_reads_the_counts() -> None:
    assert GroupedExperts(2, 256, 192, device="cuda").reads_counts_on_host
    assert GroupedExperts(2, 17, 5, dtype=torch.bfloat16, device="cuda").reads_counts_on_host


def moe_over(dispatcher: cd.TokenDispatcher, **of_experts: Any) -> MoE:
    experts = GroupedExperts(8, 256, 192, seed=5, **of_experts)
    router = nn.Linear(256, 8, device="cuda")
    return MoE(dispatcher.layer("moe"), router, experts, routing=partial(softmax_topk, top_k=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_of_fixed_capacity_takes_no_experts_that_wait(dtype: torch.dtype) -> None:
    config = cd.DispatcherConfig(
        num_experts=8, top_k=2, hidden_dim=256, dtype=dtype, num_max_tokens_per_rank=32,
        row_capacity=cd.RowCapacity.worst_case(),
    )  # fmt: skip
    x = torch.randn(32, 256, dtype=dtype, device="cuda")
    with cd.TokenDispatcher(config, backend="local", device="cuda") as dispatcher, torch.no_grad():
        if GroupedExperts(1, 256, 192, dtype=dtype, device="cuda").reads_counts_on_host:
            with pytest.raises(cd.ConfigError, match="would wait for its counts in every call"):
                moe_over(dispatcher, dtype=dtype, device="cuda")
            made_on_a_cpu = moe_over(dispatcher, dtype=dtype).cuda()
            with pytest.raises(cd.ConfigError, match="would wait for its counts in every call"):
                made_on_a_cpu(x)
            return
        for cast_later in (moe_over(dispatcher, device="cuda"), moe_over(dispatcher)):
            moe = cast_later.to("cuda", dtype)
            moe(x)  # compiles, and admits the experts
            with host_sync_is_an_error():
                moe(x)


def test_capture_in_a_graph_and_replay_with_other_counts() -> None:
    experts = GroupedExperts(len(COUNTS), 256, 192, dtype=torch.bfloat16, device="cuda", seed=3)
    if experts.reads_counts_on_host:
        pytest.skip("this GPU has no grouped product in one kernel")
    rows, _, offsets = drawn((256, 192), torch.bfloat16)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        experts(rows, offsets)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad(), torch.cuda.graph(graph):
        out = experts(rows, offsets)
    for counts in (COUNTS, COUNTS[::-1], [0] * len(COUNTS), [sum(COUNTS)] + [0] * (len(COUNTS) - 1)):
        kept = sum(counts)
        new_rows, _, new_offsets = drawn((256, 192), torch.bfloat16, counts)
        if kept == 0:
            new_rows = torch.full_like(rows, math.nan)
        rows.copy_(new_rows)
        offsets.copy_(new_offsets)
        graph.replay()
        with torch.no_grad():
            assert_bit_equal(out[:kept], experts(rows, offsets)[:kept])


def test_compiles_in_one_piece() -> None:
    rows, grad, offsets = drawn((256, 192), torch.bfloat16)
    torch._dynamo.reset()
    results = []
    for backend in (None, "aot_eager", "inductor"):
        experts = GroupedExperts(len(COUNTS), 256, 192, dtype=torch.bfloat16, device="cuda", seed=4)
        if backend is not None:
            experts.compile(fullgraph=True, backend=backend)
        results.append(run(experts, rows, offsets, grad))
    kept = sum(COUNTS)
    for eager, same, near in zip(*results, strict=True):
        extent = slice(0, kept) if eager.dim() == 2 else slice(None)
        assert_bit_equal(same[extent], eager[extent])
        torch.testing.assert_close(near[extent], eager[extent], rtol=0.05, atol=0.05)
