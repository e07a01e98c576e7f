"""Everything that crosses the wire in a forward and a backward, to the byte, as docs/contract.md adds it up."""

from __future__ import annotations

import pytest
import torch

import crossdock as cd
from crossdock.testing import Problem, Seat
from tests.contract.conftest import On
from tests.contract.trials import make_config, problem, random_ids

TOP_K, HIDDEN_DIM, NUM_EXPERTS = 6, 24, 8


def sent_of(seat: Seat, trial: Problem) -> list[int]:
    """Bytes sent so far: after dispatch, after combine, and after the backward of both."""
    rank, sent = seat.rank, []
    x = trial.x[rank].clone().requires_grad_()
    with seat.open(trial.config) as dispatcher:
        routed = dispatcher.dispatch(x, trial.topk_scores[rank].requires_grad_(), trial.topk_expert_ids[rank])
        sent.append(dispatcher.stats().sent_bytes)
        rows = routed.rows if trial.apply_scores else routed.rows * routed.scores.to(x.dtype).unsqueeze(1)
        out = dispatcher.combine(rows, routed.handle, apply_scores=trial.apply_scores)
        sent.append(dispatcher.stats().sent_bytes)
        out.sum().backward()
        sent.append(dispatcher.stats().sent_bytes)
    return sent


def by_the_formula(trial: Problem, rank: int) -> list[int]:
    """The same, of what the ids say and the table in docs/contract.md."""
    experts = trial.num_local_experts
    header, row = 8 * (17 + experts), HIDDEN_DIM * trial.config.dtype.itemsize
    fast, may_drop = trial.config.reduction == "fast", trial.config.row_capacity.kind != "exact"
    totals = [0, 0, 0]
    for peer in set(range(trial.ep_size)) - {rank}:
        there = [(ids // experts == peer).sum(1) for ids in trial.topk_expert_ids]  # slots of each token for the peer
        here = [(ids // experts == rank).sum(1) for ids in trial.topk_expert_ids]
        n, home_n, home_m = (int(x) for x in ((there[rank] > 0).sum(), (here[peer] > 0).sum(), here[peer].sum()))
        home = row * (home_n if fast else home_m)
        kept = 0 if fast or not may_drop else home_n * TOP_K  # a byte a slot: whether its row has found room
        dispatch, combine = header + 8 * n * TOP_K + n * row + kept, header + home
        combine_backward = header + n * row + (4 * home_n * TOP_K if trial.apply_scores else 0)
        dispatch_backward = header + home + 4 * home_n * TOP_K
        calls = (dispatch, combine, combine_backward + dispatch_backward)
        totals = [total + sum(calls[: number + 1]) for number, total in enumerate(totals)]
    return totals


@pytest.mark.parametrize("capacity", [cd.RowCapacity.exact(), cd.RowCapacity.worst_case()], ids=str)
@pytest.mark.parametrize("apply_scores", [True, False], ids=["scores after", "scores inside"])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("backend", "ep_size"), [("loopback", 4), ("all_to_all", 4)])
def test_all_bytes_are_those_of_the_formula(
    on: On,
    backend: str,
    ep_size: int,
    dtype: torch.dtype,
    reduction: str,
    apply_scores: bool,
    capacity: cd.RowCapacity,
):
    ids = random_ids((13, 7, 0, 9)[:ep_size], TOP_K, NUM_EXPERTS)
    for part in ids:
        part[::3, 2] = -1
    config = make_config(NUM_EXPERTS, TOP_K, HIDDEN_DIM, reduction=reduction, dtype=dtype, row_capacity=capacity)
    trial = problem(config, ids, apply_scores=apply_scores)
    wanted = [by_the_formula(trial, rank) for rank in range(ep_size)]
    assert on(backend, ep_size)(sent_of, trial) == wanted
