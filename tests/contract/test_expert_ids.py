"""Expert ids: none, repeated, skewed, of other dtypes."""

from __future__ import annotations

import pytest
import torch

import crossdock as cd
from crossdock.testing import Problem, Seat, assert_bit_equal
from crossdock.testing.solving import Outcome, solve
from tests.contract.conftest import On, every_backend
from tests.contract.trials import checked, checked_steps, make_config, position_code, problem, random_ids, refused


@every_backend(2)
def test_slots_without_an_expert_shift_nothing(on: On, backend: str, ep_size: int):
    ids = [[0, -1], [-1, 2], [3, 1], [-1, -1]]
    scores = torch.tensor([[0.5, 9], [9, 0.25], [0.125, 1], [9, 9]])
    x = torch.arange(1.0, 5).unsqueeze(1).repeat(1, 16)
    trial = problem(make_config(4, 2), [ids, ids]).replace(
        x=(x, x), topk_scores=(scores, scores), grad_out=(torch.ones_like(x),) * 2
    )
    for outcome in on(backend, 2)(checked, trial):
        assert outcome.out[:, 0].tolist() == [0.5, 1.5, 7.5, 0]
        assert outcome.tokens_per_expert.tolist() == [2, 2]
        assert outcome.grad_scores.tolist() == [[16, 0], [0, 96], [192, 96], [0, 0]]


@every_backend(1, 2)
def test_the_first_call_may_name_no_expert_at_all(on: On, backend: str, ep_size: int):
    config = make_config(8, 4, 32)
    nobody = problem(config, [torch.full((16, 4), -1)] * ep_size)
    then = problem(config, random_ids((16,) * ep_size, 4, 8))
    for outcomes in on(backend, ep_size)(checked_steps, [nobody, then]):
        assert not outcomes[0].tokens_per_expert.any()
        for tensor in (outcomes[0].out, outcomes[0].grad_x, outcomes[0].grad_scores):
            assert not tensor.any()


@every_backend(1, 2)
def test_an_expert_named_twice_counts_twice(on: On, backend: str, ep_size: int):
    x = torch.tensor([[1.0] * 8, [2.0] * 8])
    scores = torch.tensor([[0.25, 0.5], [1, 1]])
    trial = problem(make_config(4, 2, 8), [[[1, 1], [0, 2]]] * ep_size).replace(
        x=(x,) * ep_size, topk_scores=(scores,) * ep_size, grad_out=(torch.ones_like(x),) * ep_size
    )
    for outcome in on(backend, ep_size)(checked, trial):
        assert outcome.out[:, 0].tolist() == [1.5, 8]
        assert outcome.grad_scores[0].tolist() == [16, 16]
        assert outcome.grad_x[0].tolist() == [1.5] * 8


def with_wrong_ids(seat: Seat, config: cd.DispatcherConfig) -> list[str]:
    right = problem(config, random_ids((3,) * seat.size, 1, 4))
    messages = []
    with seat.open(config) as dispatcher:
        for wrong in (4, 7, -2, 2**31):
            ids = right.topk_expert_ids[seat.rank].clone()
            ids[1, 0] = wrong
            arguments = (right.x[seat.rank], right.topk_scores[seat.rank], ids)
            messages.append(refused(lambda arguments=arguments: dispatcher.dispatch(*arguments)))  # type: ignore[misc]
        solve(dispatcher, right, seat.rank, seat.device)
    return messages


@every_backend(1, 2)
def test_ids_out_of_range_are_refused_with_the_number(on: On, backend: str, ep_size: int):
    for messages in on(backend, ep_size)(with_wrong_ids, make_config(4, 1)):
        for wrong, message in zip((4, 7, -2, 2**31), messages, strict=True):
            assert f"topk_expert_ids[1, 0] is {wrong}, outside -1..3" in message


def with_ids_as(seat: Seat, trial: Problem, kind: str) -> torch.Tensor:
    ids = trial.topk_expert_ids[seat.rank]
    if kind == "view":
        ids = ids.repeat_interleave(2, dim=1)[:, ::2]
        assert not ids.is_contiguous()
    else:
        ids = ids.to(getattr(torch, kind))
    with seat.open(trial.config) as dispatcher:
        arguments = (trial.x[seat.rank], trial.topk_scores[seat.rank], ids)
        if kind in ("uint8", "int16"):
            assert kind in refused(lambda: dispatcher.dispatch(*arguments))
            return torch.zeros(0)
        routed = dispatcher.dispatch(*arguments)
        return dispatcher.combine(routed.rows, routed.handle).detach()


@every_backend(2)
def test_dtypes_of_ids(on: On, backend: str, ep_size: int):
    trial = problem(make_config(8, 2, 32), random_ids((8, 8), 2, 8))
    by_kind = {kind: on(backend, 2)(with_ids_as, trial, kind) for kind in ("int64", "int32", "view", "uint8", "int16")}
    for rank in range(2):
        assert_bit_equal(by_kind["int32"][rank], by_kind["int64"][rank])
        assert_bit_equal(by_kind["view"][rank], by_kind["int64"][rank])


@every_backend(4)
@pytest.mark.parametrize(("ids", "counts"), [([5], [0, 256]), ([4, 5], [256, 256])], ids=["one", "two"])
def test_all_tokens_of_all_ranks_to_one_rank(on: On, backend: str, ep_size: int, ids: list[int], counts: list[int]):
    config = make_config(8, len(ids), 64, dtype=torch.bfloat16)
    outcomes = on(backend, 4)(checked, problem(config, [[ids] * 64] * 4))
    assert [outcome.tokens_per_expert.tolist() for outcome in outcomes] == [[0, 0], [0, 0], counts, [0, 0]]


@every_backend(4, further=True)
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 7), (12, 7), (4, 4), (20, 6)])
def test_more_slots_than_local_experts(on: On, backend: str, ep_size: int, num_experts: int, top_k: int):
    config = make_config(num_experts, top_k, 48, dtype=torch.bfloat16)
    outcomes = on(backend, 4)(checked, problem(config, random_ids((5,) * 4, top_k, num_experts)))
    if num_experts == top_k:
        assert [outcome.rows.shape[0] for outcome in outcomes] == [20] * 4


@every_backend(2)
def test_counts_are_the_histogram_and_rows_lie_with_their_expert(on: On, backend: str, ep_size: int):
    config = make_config(8, 4, 64, expert_alignment=16)
    ids = random_ids((33, 33), 4, 8)
    for part in ids:
        part[torch.rand(part.shape, generator=torch.Generator().manual_seed(7)) < 0.3] = -1
    x = tuple((100.0 * rank + torch.arange(33.0) + 1).unsqueeze(1).repeat(1, 64) for rank in range(2))
    for rank, outcome in enumerate(on(backend, 2)(checked, problem(config, ids).replace(x=x))):
        ends = [0, *outcome.expert_offsets.tolist()]
        assert ends[-1] == outcome.rows.shape[0]
        for local in range(4):
            expert = 4 * rank + local
            named = [100 * r + t + 1 for r in range(2) for t in range(33) if expert in ids[r][t].tolist()]
            rows = outcome.rows[ends[local] : ends[local + 1], 0].tolist()
            assert int(outcome.tokens_per_expert[local]) == len(named)
            assert rows == named + [0.0] * (len(rows) - len(named))


def rows_and_bytes(seat: Seat, trial: Problem) -> tuple[Outcome, cd.DispatcherStats]:
    with seat.open(trial.config) as dispatcher:
        return solve(dispatcher, trial, seat.rank, seat.device), dispatcher.stats()


@every_backend(4)
def test_slots_without_an_expert_do_not_travel(on: On, backend: str, ep_size: int):
    config = make_config(8, 2, 64)
    ids = random_ids((32,) * 4, 2, 8, among=range(2, 8))
    for part in ids:
        part[16:] = -1
    results = on(backend, 4)(rows_and_bytes, problem(config, ids))
    assert results[0][0].rows.shape[0] == 0
    assert sum(outcome.rows.shape[0] for outcome, _ in results) == 128
    away = [sum(len({i // 2 for i in token if i >= 0} - {rank}) for token in ids[rank].tolist()) for rank in range(4)]
    back = [
        sum(sum(1 for t in ids[r].tolist() if rank in {i // 2 for i in t if i >= 0}) for r in range(4) if r != rank)
        for rank in range(4)
    ]
    for rank, (_, stats) in enumerate(results):  # there and back, forward and backward: two of each
        assert stats.sent_rows_bytes == 2 * (away[rank] + back[rank]) * 64 * 4


@every_backend(2)
def test_a_token_without_routes_is_zero_even_after_large_values(on: On, backend: str, ep_size: int):
    config = make_config(4, 2, 32)
    large = problem(config, random_ids((8, 8), 2, 4))
    large = large.replace(x=tuple(part * 1e3 for part in large.x))
    ids = random_ids((8, 8), 2, 4, seed=1)
    for part in ids:
        part[3] = part[5] = -1
    for outcomes in on(backend, 2)(checked_steps, [large, problem(config, ids, seed=1)]):
        assert not outcomes[1].out[[3, 5]].any()
        assert not outcomes[1].grad_x[[3, 5]].any()


@every_backend(2)
def test_the_order_of_rows(on: On, backend: str, ep_size: int):
    config = make_config(4, 1, 2)
    ids = [[[2], [0], [2], [1]], [[0], [3], [0], [2]]]
    trial = problem(config, ids).replace(x=position_code(config, (4, 4)))
    for _ in range(4 if backend == "symmetric" else 20):  # whose kernels are interpreted
        first, second = on(backend, 2)(checked, trial)
        assert first.rows[:, 0].tolist() == [2, 17, 19, 4]
        assert second.rows[:, 0].tolist() == [1, 3, 20, 18]
