"""torch.compile of a layer while token counts change, and fake tensors without any ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import crossdock as cd
from crossdock.testing import Seat, assert_bit_equal
from tests.contract.conftest import On
from tests.contract.trials import make_config


class RoutedLayer(nn.Module):
    """Router, dispatch, experts, combine."""

    def __init__(self, dispatcher: cd.TokenDispatcher) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(32, 4)
        self.weight = nn.Parameter(torch.full((32,), 3.0))
        self._layer = dispatcher.layer("compiled")

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(2)
        routed = self._layer.dispatch(x, scores, ids)
        return self._layer.combine(routed.rows * self.weight, routed.handle)


def compiled_layer(seat: Seat) -> int:
    """Compare with eager for changing token counts; return how many graphs were compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    with seat.open(make_config(4, 2, 32)) as dispatcher:
        layer = RoutedLayer(dispatcher)
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        for num_tokens in (8, 12, 5, 9):
            x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(num_tokens)).requires_grad_()
            results = []
            for run in (layer, compiled):
                out = run(x)
                results.append((out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])))
            for mine, theirs in zip(results[1], results[0], strict=True):
                assert_bit_equal(mine, theirs, f"{num_tokens} tokens")
    return counter.frame_count


@pytest.mark.parametrize(("backend", "ep_size"), [("local", 1), ("all_to_all", 2)])
def test_a_layer_is_compiled_again_once_when_token_counts_change(on: On, backend: str, ep_size: int):
    assert all(frames <= 2 for frames in on(backend, ep_size)(compiled_layer))


@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize("alignment", [1, 8])
def test_fake_tensors_have_the_real_shapes(num_tokens: int, alignment: int):
    config = make_config(4, 2, 32, expert_alignment=alignment)
    with cd.TokenDispatcher(config) as dispatcher:
        real = dispatcher.dispatch(
            torch.ones(num_tokens, 32), torch.ones(num_tokens, 2), torch.ones(num_tokens, 2).long()
        )
        out = dispatcher.combine(real.rows, real.handle)
        shapes = torch.fx.experimental.symbolic_shapes.ShapeEnv()
        # The layer's name is a tensor that the dispatcher made, a real one.
        with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True), torch.no_grad():
            fake = dispatcher.dispatch(
                torch.ones(num_tokens, 32), torch.ones(num_tokens, 2), torch.ones(num_tokens, 2).long()
            )
            fake_out = dispatcher.combine(fake.rows, fake.handle)
    assert fake.rows.shape[1:] == real.rows.shape[1:] and fake.rows.dtype is real.rows.dtype
    assert fake.tokens_per_expert.shape == real.tokens_per_expert.shape
    assert fake.tokens_per_expert.dtype is real.tokens_per_expert.dtype
    assert fake.expert_offsets.dtype is real.expert_offsets.dtype
    assert fake.scores.dtype is real.scores.dtype and fake.scores.dim() == 1
    assert fake_out.shape == out.shape and fake_out.dtype is out.dtype
