"""What was made in inference mode and is used in grad mode: refused, before any communication, where it is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.testing import Seat
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, refused

OF_A_HANDLE = (
    "this handle (layer 'moe') was made in inference mode, and a combine in grad mode keeps it for its backward:"
    " dispatch under torch.no_grad(), or combine outside of grad mode"
)
OF_ROWS = (
    "rows were made in inference mode, and a combine in grad mode with apply_scores=True keeps them for its backward:"
    " pass a clone made outside of inference mode, or combine outside of grad mode"
)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(24.0).view(3, 8), torch.ones(3, 2), torch.tensor([[0, 1], [3, -1], [1, 2]])


def mixed(seat: Seat) -> None:
    with seat.open(make_config(4, 2, 8)) as dispatcher:
        layer = dispatcher.layer("moe")
        with torch.inference_mode():
            routed = layer.dispatch(*inputs())
        calls = dispatcher.stats().calls
        rows = routed.rows.clone().requires_grad_()
        for apply_scores in (True, False):
            assert refused(lambda a=apply_scores: layer.combine(rows, routed.handle, apply_scores=a)) == OF_A_HANDLE  # type: ignore[misc]
        assert dispatcher.stats().calls == calls, "nothing has been communicated"
        expected = torch.tensor([2.0, 1.0, 2.0]).unsqueeze(1) * inputs()[0]
        for mode in (torch.no_grad, torch.inference_mode):  # and it is as good as before
            with mode():
                assert torch.equal(layer.combine(routed.rows, routed.handle), expected)

        with torch.no_grad():  # this is the way
            there = layer.dispatch(*inputs())
        kept = there.rows.clone().requires_grad_()
        layer.combine(kept, there.handle).sum().backward()
        assert kept.grad is not None and bool((kept.grad[: int(there.expert_offsets[-1])] == 1).all())

        again = layer.dispatch(*inputs())
        with torch.inference_mode():
            made = again.rows * 1
        calls = dispatcher.stats().calls
        assert refused(lambda: layer.combine(made, again.handle)) == OF_ROWS
        assert dispatcher.stats().calls == calls
        for out in (layer.combine(made, again.handle, apply_scores=False), layer.combine(made.clone(), again.handle)):
            assert torch.equal(out, expected)


@every_backend(1, 2)
def test_what_inference_mode_has_made_is_not_saved(on: On, backend: str, ep_size: int):
    on(backend, ep_size)(mixed)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_whole_call_in_inference_mode_is_as_good_as_any(compiled: bool):
    with cd.TokenDispatcher(make_config(4, 2, 8)) as dispatcher:

        def pair(x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            routed = dispatcher.dispatch(x, scores, ids)
            return dispatcher.combine(routed.rows, routed.handle)

        run: Callable[..., Any] = torch.compile(pair, fullgraph=True, backend="aot_eager") if compiled else pair
        x, scores, ids = inputs()
        with torch.inference_mode():
            assert torch.equal(run(x, scores, ids), torch.tensor([2.0, 1.0, 2.0]).unsqueeze(1) * x)
        x.requires_grad_()
        run(x, scores, ids).sum().backward()  # and so is one in grad mode after it
        assert x.grad is not None and x.grad[:, 0].tolist() == [2.0, 1.0, 2.0]
