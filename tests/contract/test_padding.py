"""Padding rows inside groups, and experts that have only some, or no, rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crossdock.nn import GroupedExperts
from crossdock.testing import Problem, Seat
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, problem, with_config

COUNTS = [5, 0, 33, 1, 2, 0, 0, 7]
DTYPES = (torch.bfloat16, torch.float32)


def dirty_memory(*shape: int) -> None:
    """Leave NaN where the next tensors of this size may land."""
    del [torch.full(shape, float("nan")) for _ in range(8)][:]


def grouped_mlp(seat: Seat, trial: Problem) -> dict[str, Tensor]:
    config, rank = trial.config, seat.rank
    num_local = config.num_experts // seat.size
    experts = GroupedExperts(
        num_local, config.hidden_dim, 16, dtype=config.dtype, seed=0, first_expert_id=rank * num_local
    )
    dirty_memory(512, config.hidden_dim)
    with seat.open(config) as dispatcher:
        routed = dispatcher.dispatch(trial.x[rank], trial.topk_scores[rank], trial.topk_expert_ids[rank])
        y = experts(routed.rows, routed.expert_offsets)
        y.retain_grad()
        out = dispatcher.combine(y, routed.handle)
        out.backward(trial.grad_out[rank])
    assert y.grad is not None
    padding = ~routed.row_valid
    assert not routed.rows[padding].any() and not y.grad[padding].any(), "padding rows are not zero"
    gradients = {name: weight.grad for name, weight in experts.named_parameters() if weight.grad is not None}
    return {"out": out.detach(), **gradients}


@every_backend(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_stay_out_of_weight_gradients(on: On, backend: str, ep_size: int, dtype: torch.dtype):
    ids = torch.repeat_interleave(torch.arange(8), torch.tensor(COUNTS)).unsqueeze(1)
    plain = problem(make_config(8, 1, 32, dtype=dtype), [ids[::2], ids[1::2]])
    runs = [on(backend, 2)(grouped_mlp, trial) for trial in (plain, with_config(plain, expert_alignment=32))]
    # A product of other shape may add in another order, so a weight's gradient (and an output) is near, not equal.
    tolerance = 2.0**-7 if dtype is torch.bfloat16 else 1e-5
    for unpadded, padded in zip(*runs, strict=True):
        for name, tensor in padded.items():
            torch.testing.assert_close(tensor, unpadded[name], rtol=tolerance, atol=tolerance)


def busy_then_idle(seat: Seat, busy: Problem, idle: Problem) -> None:
    grouped_mlp(seat, busy)
    gradients = grouped_mlp(seat, idle)
    counts = torch.bincount(torch.cat(idle.topk_expert_ids).flatten().clamp(min=0), minlength=8)
    if not (torch.cat(idle.topk_expert_ids) >= 0).any():
        counts = torch.zeros(8, dtype=torch.int64)
    for name in set(gradients) - {"out"}:
        for local in range(8 // seat.size):
            gradient = gradients[name][local]
            assert gradient.isfinite().all()
            if not counts[seat.rank * (8 // seat.size) + local]:
                assert not gradient.any(), f"{name} of idle expert {local}"


@every_backend(2)
@pytest.mark.parametrize("ids", [[[1], [1], [3], [1]], [[-1]] * 4], ids=["some", "none"])
def test_idle_experts_after_busy_ones(on: On, backend: str, ep_size: int, ids: list[list[int]]):
    config = make_config(8, 1, 32)
    busy = problem(config, [torch.arange(8).unsqueeze(1)] * 2)
    on(backend, 2)(busy_then_idle, busy, problem(config, [ids, ids]))
