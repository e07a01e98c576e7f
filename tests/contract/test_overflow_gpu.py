"""The guard on a GPU: nothing of a step waits for the device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import crossdock as cd
from tests.contract.overflow_trials import guarded_config
from tests.gpus import host_sync_is_an_error

pytestmark = pytest.mark.gpu(1)


def make_optimizer(kind: str, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    if kind == "fused AdamW":
        return torch.optim.AdamW([weight], lr=0.1, fused=True)
    return torch.optim.AdamW([weight], lr=0.1, capturable=True)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "GradScaler"])
@pytest.mark.parametrize(("kind", "settings"), [("fused AdamW", {}), ("AdamW", {"snapshot": True})])
def test_nothing_waits(kind: str, settings: dict[str, Any], scaled: bool):
    """Step 2 overflows and so does step 3, which was sized before anybody knew; step 4 fits."""
    if scaled and kind != "fused AdamW":
        pytest.skip("a GradScaler reads its own flag on the host for an optimizer without found_inf")
    device = torch.device("cuda", torch.cuda.current_device())
    with cd.TokenDispatcher(guarded_config(), device=device) as dispatcher:
        weight = torch.nn.Parameter(torch.ones(16, device=device))
        optimizer = make_optimizer(kind, weight)
        guard = cd.OverflowGuard(dispatcher, optimizer, **settings)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0) if scaled else None
        scores, ids = torch.ones(8, 2, device=device), torch.tensor([[0, 1]] * 8, device=device)
        seen = []

        def step(num_tokens: int) -> None:
            routed = dispatcher.dispatch(
                weight.expand(num_tokens, 16), scores[:num_tokens], ids[:num_tokens], num_tokens_per_rank=8
            )
            loss = dispatcher.combine(routed.rows, routed.handle).sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
            guard.step(scaler=scaler)
            if scaler is not None:
                scaler.update()
            seen.append(weight.detach().clone())

        for num_tokens in (4, 4):  # measures, compiles, makes the optimizer's state
            step(num_tokens)
        torch.cuda.synchronize()
        with host_sync_is_an_error():
            for num_tokens in (8, 8, 8, 4):
                step(num_tokens)
        changed = [not torch.equal(before, after) for before, after in pairwise(seen)]
        assert changed == [True, False, False, True, True]
        assert guard.stats() == cd.overflow.GuardStats(steps=6, skipped_steps=2, grown=1)


def test_a_step_is_queued_while_the_device_is_busy():
    """Of a step behind half a second of work on the device nothing is waited for."""
    device = torch.device("cuda", torch.cuda.current_device())
    with cd.TokenDispatcher(guarded_config(), device=device) as dispatcher:
        weight = torch.nn.Parameter(torch.ones(16, device=device))
        guard = cd.OverflowGuard(dispatcher, make_optimizer("fused AdamW", weight))
        scores, ids = torch.ones(8, 2, device=device), torch.tensor([[0, 1]] * 8, device=device)

        def step() -> None:
            routed = dispatcher.dispatch(weight.expand(8, 16), scores, ids)
            dispatcher.combine(routed.rows, routed.handle).sum().backward()
            guard.step()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)
        step()
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query(), "the host has waited for the device"
        torch.cuda.synchronize()
        assert guard.stats() == cd.overflow.GuardStats(steps=4)
