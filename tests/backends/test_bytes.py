"""What goes over the wire, counted where tensors enter the transport, against the formula."""

from __future__ import annotations

import pytest
import torch

import crossdock as cd
from crossdock.testing import PoolRunner, Problem, Seat, ThreadRunner
from tests.conftest import Ranks
from tests.contract.trials import make_config, problem, random_ids


def stats_of(seat: Seat, trial: Problem) -> list[cd.DispatcherStats]:
    """Statistics after dispatch, after combine, and after the backward of both."""
    rank, seen = seat.rank, []
    x = trial.x[rank].clone().requires_grad_()
    with seat.open(trial.config) as dispatcher:
        routed = dispatcher.dispatch(x, trial.topk_scores[rank].requires_grad_(), trial.topk_expert_ids[rank])
        seen.append(dispatcher.stats())
        out = dispatcher.combine(routed.rows, routed.handle)
        seen.append(dispatcher.stats())
        out.sum().backward()
        seen.append(dispatcher.stats())
    return seen


def trial_of(ep_size: int, reduction: str, dtype: torch.dtype) -> Problem:
    num_tokens = (13, 7, 0, 9)[:ep_size]
    ids = random_ids(num_tokens, 6, 8)
    for part in ids:
        part[::3, 2] = -1
    return problem(make_config(8, 6, 24, reduction=reduction, dtype=dtype), ids)


def runner_of(ranks: Ranks, backend: str, ep_size: int) -> PoolRunner | ThreadRunner:
    return ThreadRunner(ep_size) if backend == "loopback" else PoolRunner(ranks(ep_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_rows_sent(ranks: Ranks, backend: str, ep_size: int, reduction: str, dtype: torch.dtype):
    """Out: a row for every token and other rank that wants it. Home: the same with `fast`, a row a slot otherwise."""
    trial = trial_of(ep_size, reduction, dtype)
    row_bytes, experts = 24 * dtype.itemsize, trial.num_local_experts
    homes = [[[i // experts for i in token if i >= 0] for token in part.tolist()] for part in trial.topk_expert_ids]
    for rank, (after_dispatch, after_combine, after_backward) in enumerate(
        runner_of(ranks, backend, ep_size)(stats_of, trial)
    ):
        out = sum(len(set(token) - {rank}) for token in homes[rank])
        others = [token for source in range(ep_size) if source != rank for token in homes[source]]
        home = sum(rank in token if reduction == "fast" else token.count(rank) for token in others)
        assert after_dispatch.sent_rows_bytes == out * row_bytes
        assert after_combine.sent_rows_bytes == (out + home) * row_bytes
        assert after_backward.sent_rows_bytes == 2 * (out + home) * row_bytes


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_everything_else_is_small(ranks: Ranks, backend: str):
    """Ids and scores ride with the tokens, 8 bytes a slot; score gradients go home as 4 bytes a slot."""
    trial = trial_of(2, "fast", torch.float32)
    homes = [[{i // 4 for i in token if i >= 0} for token in part.tolist()] for part in trial.topk_expert_ids]
    runner = runner_of(ranks, backend, 2)
    empty = trial.replace(topk_expert_ids=tuple(torch.full_like(part, -1) for part in trial.topk_expert_ids))
    headers = [[s.sent_bytes for s in stats] for stats in runner(stats_of, empty)]
    for rank, stats in enumerate(runner(stats_of, trial)):
        out = sum(1 - rank in token for token in homes[rank])
        home = sum(rank in token for token in homes[1 - rank])
        other = [s.sent_bytes - s.sent_rows_bytes - header for s, header in zip(stats, headers[rank], strict=True)]
        assert other[0] == out * 6 * 8
        assert other[1] == other[0]
        assert other[2] == other[1] + 2 * home * 6 * 4


@pytest.mark.parametrize(("backend", "ep_size"), [("loopback", 2), ("all_to_all", 2), ("all_to_all", 4)])
def test_one_host_sync_a_dispatch(ranks: Ranks, backend: str, ep_size: int):
    for stats in runner_of(ranks, backend, ep_size)(stats_of, trial_of(ep_size, "fast", torch.float32)):
        assert [s.host_syncs for s in stats] == [1, 1, 1]
        assert [s.calls for s in stats] == [1, 2, 4]
        assert stats[0].tokens == stats[-1].tokens
