"""A compiled program makes the same calls in the same order as the plain one, and layers share one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from crossdock import DispatcherConfig, LayerView, TokenDispatcher
from crossdock.errors import ContractViolation

NUM_LAYERS = 12


@pytest.fixture
def dispatcher() -> Iterator[TokenDispatcher]:
    config = DispatcherConfig(num_experts=4, top_k=2, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=64)
    torch._dynamo.reset()
    with TokenDispatcher(config) as opened:
        yield opened


def _inputs(num_tokens: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 8, generator=generator, requires_grad=True)
    return x, torch.rand(num_tokens, 2, generator=generator), torch.randint(-1, 4, (num_tokens, 2), generator=generator)


def _calls_of(dispatcher: TokenDispatcher, program: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operation and layer of every call that the forward and the backward of `program` make."""
    calls: list[str] = []
    call = dispatcher._open.session.call

    def noting(facts):
        calls.append(f"{facts.operation} {facts.layer}")
        return call(facts)

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher._open.session, "call", noting)
        program().backward()
    return calls


def _two_independent_layers(dispatcher: TokenDispatcher) -> Callable[..., Tensor]:
    first, second = dispatcher.layer("first"), dispatcher.layer("second")

    def program(x: Tensor, y: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        a, b = first.dispatch(x, scores, ids), second.dispatch(y, scores, ids)
        late = second.combine(b.rows * 3, b.handle)
        return first.combine(a.rows * 2, a.handle).sum() + late.sum()

    return program


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_calls_on_independent_data_keep_their_order(dispatcher: TokenDispatcher, backend, monkeypatch):
    program = _two_independent_layers(dispatcher)
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    x, scores, ids = _inputs()
    y = x.detach().clone().requires_grad_()
    plain = _calls_of(dispatcher, lambda: program(x, y, scores, ids), monkeypatch)
    assert _calls_of(dispatcher, lambda: compiled(x, y, scores, ids), monkeypatch) == plain
    assert len(plain) == 8


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_backward_that_nobody_needs_still_runs(dispatcher: TokenDispatcher, backend, monkeypatch):
    layer = dispatcher.layer("only")

    def program(x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        routed = layer.dispatch(x, scores, ids)
        return layer.combine(routed.rows * 2, routed.handle).sum()

    x, scores, ids = _inputs()
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    calls = _calls_of(dispatcher, lambda: compiled(x.detach(), scores, ids), monkeypatch)
    assert calls == ["dispatch only", "combine only", "combine_backward only", "dispatch_backward only"]


def test_layers_compiled_one_by_one_share_a_graph(dispatcher: TokenDispatcher):
    def program(layer: LayerView, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        routed = layer.dispatch(x, scores, ids)
        return layer.combine(routed.rows * 2, routed.handle)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for number in range(NUM_LAYERS):
        compiled(dispatcher.layer(f"blocks.{number}.moe"), *_inputs()).sum().backward()
    assert counters["stats"]["unique_graphs"] == before + 1


def test_second_derivative_is_refused(dispatcher: TokenDispatcher):
    layer = dispatcher.layer("only")
    x, scores, ids = _inputs()
    routed = layer.dispatch(x, scores, ids)
    out = layer.combine(routed.rows * routed.rows, routed.handle)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(ContractViolation, match="no second derivative"):
        grad.sum().backward()


def test_the_callers_histogram_compiles(dispatcher: TokenDispatcher):
    layer = dispatcher.layer("only")

    def program(x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        return layer.dispatch(x, scores, ids, counts).rows

    x, scores, ids = _inputs()
    counts = torch.bincount(ids[ids >= 0], minlength=4)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, scores, ids, counts), program(x, scores, ids, counts))
