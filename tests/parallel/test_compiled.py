"""The MoE layer in capacity mode under torch.compile: bits of eager code, or the baseline rule where code is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import crossdock as cd
from crossdock import recompute
from crossdock.nn import GroupedExperts
from crossdock.testing import PoolRunner, Seat, assert_bit_equal, assert_within_baseline
from tests.conftest import Ranks
from tests.parallel.model import (
    FFN_DIM,
    HIDDEN_DIM,
    NUM_EXPERTS,
    TOP_K,
    Block,
    batch_of,
    config_of,
    optimizer_of,
    squares,
)

CAPACITIES = (cd.RowCapacity.worst_case(), cd.RowCapacity.calibrated(3.0))
LENGTHS = (24, 17, 40, 9)


def train(seat: Seat, way: str, capacity: cd.RowCapacity) -> list[Tensor]:
    """Losses and weights of one block; the first step is eager, as a calibration has to be."""
    losses: list[Tensor] = []
    with seat.open(config_of(capacity)) as dispatcher:
        block = Block(dispatcher, 0)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        optimizer = optimizer_of(block)
        for step, length in enumerate(LENGTHS):
            x = batch_of(length + seat.rank, step, seat.rank, 1)
            called = block if way == "eager" or step == 0 else compiled
            out = recompute.checkpoint(called, x) if way == "recomputed" else called(x)
            loss = squares(out, batch_of(length + seat.rank, step, seat.rank, 2))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach() for parameter in block.parameters())]


@pytest.fixture(scope="module")
def eager(ranks: Ranks) -> list[list[Tensor]]:
    return PoolRunner(ranks(2))(train, "eager", cd.RowCapacity.exact())


@pytest.mark.parametrize("way", ["compiled", "recomputed"])
@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
def test_a_compiled_block_trains_to_the_bits_of_eager_code(
    ranks: Ranks, eager: list[list[Tensor]], capacity: cd.RowCapacity, way: str
):
    for wanted, actual in zip(eager, PoolRunner(ranks(2))(train, way, capacity), strict=True):
        for number, (one, other) in enumerate(zip(actual, wanted, strict=True)):
            assert_bit_equal(one, other, f"loss or weight {number}")


def inductor(seat: Seat) -> None:
    """Output and gradients of what belongs to this rank's tokens, against float64 and against eager code."""
    capacity = cd.RowCapacity.worst_case()
    x, grad = batch_of(20, seat.rank, 1), batch_of(20, seat.rank, 2)
    with seat.open(config_of(capacity)) as dispatcher:
        block = Block(dispatcher, 0)
        eager = outputs(block, x, grad)
        compiled: Any = torch.compile(block, fullgraph=True)
        code = outputs(compiled, x, grad)
        truth = in_float64(block, x, grad)
    for name in truth:
        torch.testing.assert_close(eager[name], truth[name].float())  # or the rule below would allow anything
        assert_within_baseline(code[name], truth[name], eager[name], what=name)


def outputs(block: torch.nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = block(x)
    out.backward(grad)
    assert x.grad is not None
    return {"out": out.detach(), "gradient of x": x.grad}


def in_float64(block: Block, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The block in plain torch with all experts here, and the experts chosen that float32 chose."""
    experts = GroupedExperts(NUM_EXPERTS, HIDDEN_DIM, FFN_DIM, seed=0)  # the same numbers as on the ranks
    gate, up, down = (weights.detach().double() for weights in (experts.gate_proj, experts.up_proj, experts.down_proj))
    dense = (block.dense.weight.detach(), block.dense.bias.detach())
    with torch.no_grad():
        hidden = x + torch.nn.functional.linear(x, *dense).tanh()
        ids = block.moe.router(hidden).topk(TOP_K).indices

    x = x.double().requires_grad_()
    hidden = x + torch.nn.functional.linear(x, *(part.double() for part in dense)).tanh()
    scores = (hidden @ block.moe.router.weight.detach().double().T).softmax(-1).gather(1, ids)
    scores = scores / scores.sum(1, keepdim=True)
    inner = torch.einsum("td,tkdf->tkf", hidden, gate[ids])
    inner = torch.nn.functional.silu(inner) * torch.einsum("td,tkdf->tkf", hidden, up[ids])
    rows = torch.einsum("tkf,tkfd->tkd", inner, down[ids])
    out = hidden + (scores.unsqueeze(2) * rows).sum(1)
    out.backward(grad.double())
    assert x.grad is not None
    return {"out": out.detach(), "gradient of x": x.grad}


def test_inductor_keeps_to_the_baseline_rule(ranks: Ranks):
    PoolRunner(ranks(2))(inductor, timeout_s=110.0)
