"""The MoE layer in capacity mode under torch.compile: bits of eager code, or the baseline rule where code is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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


def train(seat: Seat, way: str, capacity: cd.RowCapacity) -> dict[str, Tensor]:
    """Losses and gradients of a block by step, and its weights; the first step is eager, as a calibration has to be."""
    found: dict[str, Tensor] = {}
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
            found |= {f"loss of step {step}": loss.detach(), **gradients(block, f" in step {step}")}
            optimizer.step()
            optimizer.zero_grad()
        return found | {name: parameter.detach() for name, parameter in block.named_parameters()}


def gradients(block: torch.nn.Module, when: str = "") -> dict[str, Tensor]:
    found = {}
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        found[f"gradient of {name}{when}"] = parameter.grad
    return found


@pytest.fixture(scope="module")
def eager(ranks: Ranks) -> Callable[[int], list[dict[str, Tensor]]]:
    """Return a function of the number of ranks: what they get without a compiler, trained once."""
    return cache(lambda num_ranks: PoolRunner(ranks(num_ranks))(train, "eager", cd.RowCapacity.exact()))


@pytest.mark.parametrize(
    ("way", "num_ranks", "capacity"),
    [
        *((way, 2, capacity) for way in ("compiled", "recomputed") for capacity in CAPACITIES),
        ("recomputed", 4, CAPACITIES[0]),
        pytest.param("recomputed", 4, CAPACITIES[1], marks=pytest.mark.full),
        *(pytest.param("compiled", 4, capacity, marks=pytest.mark.full) for capacity in CAPACITIES),
    ],
    ids=str,
)
def test_a_compiled_block_trains_to_the_bits_of_eager_code(
    ranks: Ranks,
    eager: Callable[[int], list[dict[str, Tensor]]],
    capacity: cd.RowCapacity,
    way: str,
    num_ranks: int,
):
    by_rank = PoolRunner(ranks(num_ranks))(train, way, capacity)
    for wanted, actual in zip(eager(num_ranks), by_rank, strict=True):
        assert actual.keys() == wanted.keys()
        for name in wanted:
            assert_bit_equal(actual[name], wanted[name], name)


def drawn(rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens and the gradient of its output."""
    return batch_of(20, rank, 1), batch_of(20, rank, 2)


def inductor(seat: Seat, num_ranks: int) -> None:
    """Output and gradients, against float64 and against eager code."""
    capacity = cd.RowCapacity.worst_case()
    x, grad = drawn(seat.rank)
    with seat.open(config_of(capacity)) as dispatcher:
        block = Block(dispatcher, 0)
        eager = outputs(block, block, x, grad)
        compiled: Any = torch.compile(block, fullgraph=True)
        code = outputs(compiled, block, x, grad)
        truth = in_float64(block, seat.rank, num_ranks)
    assert truth.keys() == code.keys() == eager.keys()
    for name in truth:
        torch.testing.assert_close(eager[name], truth[name].float())  # or the rule below would allow anything
        assert_within_baseline(code[name], truth[name], eager[name], what=name)


def outputs(called: Callable[[Tensor], Tensor], block: Block, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = called(x)
    out.backward(grad)
    assert x.grad is not None
    found = {"out": out.detach(), "gradient of x": x.grad, **gradients(block)}
    block.zero_grad()
    return found


def in_float64(block: Block, rank: int, num_ranks: int) -> dict[str, Tensor]:
    """What `outputs` should be: experts get gradients from the tokens of all ranks, all else from this rank's."""
    of_ranks = [whole_in_float64(block, *drawn(source)) for source in range(num_ranks)]
    truth, num_local = of_ranks[rank], NUM_EXPERTS // num_ranks
    for name in [name for name in truth if ".experts." in name]:
        truth[name] = torch.stack([part[name] for part in of_ranks]).sum(0)[rank * num_local :][:num_local]
    return truth


def whole_in_float64(block: Block, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The block in plain torch with all experts here, and the experts chosen that float32 chose."""
    with torch.no_grad():
        ids = block.moe.router(x + block.dense(x).tanh()).topk(TOP_K).indices
    experts = GroupedExperts(NUM_EXPERTS, HIDDEN_DIM, FFN_DIM, seed=0)  # the same numbers as on the ranks
    weights = dict(block.named_parameters()) | {f"moe.experts.{name}": it for name, it in experts.named_parameters()}
    double = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    gate, up, down = (double[f"moe.experts.{name}_proj"] for name in ("gate", "up", "down"))

    x = x.double().requires_grad_()
    hidden = x + torch.nn.functional.linear(x, double["dense.weight"], double["dense.bias"]).tanh()
    scores = (hidden @ double["moe.router.weight"].T).softmax(-1).gather(1, ids)
    scores = scores / scores.sum(1, keepdim=True)
    inner = torch.einsum("td,tkdf->tkf", hidden, gate[ids])
    inner = torch.nn.functional.silu(inner) * torch.einsum("td,tkdf->tkf", hidden, up[ids])
    rows = torch.einsum("tkf,tkfd->tkd", inner, down[ids])
    out = hidden + (scores.unsqueeze(2) * rows).sum(1)
    out.backward(grad.double())
    assert x.grad is not None
    of_weights = {f"gradient of {name}": weight.grad for name, weight in double.items() if weight.grad is not None}
    return {"out": out.detach(), "gradient of x": x.grad, **of_weights}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_inductor_keeps_to_the_baseline_rule(ranks: Ranks, num_ranks: int):
    PoolRunner(ranks(num_ranks))(inductor, num_ranks, timeout_s=110.0)
