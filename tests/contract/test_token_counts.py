"""Token counts that are zero, uneven or unaligned, and ranks that receive nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import crossdock as cd
from crossdock.testing import Problem, Seat, assert_bit_equal
from crossdock.testing.solving import Outcome, solve
from tests.contract.conftest import On, every_backend
from tests.contract.trials import (
    checked,
    checked_steps,
    exact_steps,
    integers,
    make_config,
    problem,
    random_ids,
    with_config,
)

DTYPES = (torch.bfloat16, torch.float32)


@every_backend(4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_without_rows_take_part_in_every_step(on: On, backend: str, ep_size: int, dtype: torch.dtype):
    config = make_config(8, 1, 64, dtype=dtype)
    targets = [[0] if step == 25 else [0, 1, 2, 3] for step in range(50)]
    steps = [
        integers(problem(config, random_ids((8,) * 4, 1, 8, seed=step, among=among)), seed=step)
        for step, among in enumerate(targets)
    ]
    for outcomes in on(backend, 4)(exact_steps, steps)[2:]:
        assert all(outcome.rows.shape == (0, 64) for outcome in outcomes)
        assert all(outcome.tokens_per_expert.tolist() == [0, 0] for outcome in outcomes)


@every_backend(4)
@pytest.mark.parametrize("empty", range(4))
def test_a_rank_without_tokens_still_receives(on: On, backend: str, ep_size: int, empty: int):
    num_tokens = [8, 3, 8, 8]
    num_tokens[empty] = 0
    ids = random_ids(num_tokens, 2, 8, seed=empty)
    for part in ids:
        part[:2, 0] = 2 * empty  # its first expert has work
        part[:2, 1] = 7 - 2 * empty
    trial = problem(make_config(8, 2, 64, dtype=torch.bfloat16), ids)
    outcome = on(backend, 4)(checked, trial)[empty]
    assert outcome.out.shape == outcome.grad_x.shape == (0, 64)
    assert outcome.grad_scores.shape == (0, 2)
    assert int(outcome.tokens_per_expert[0]) >= 4


@every_backend(1, 2)
def test_everybody_empty_looks_like_any_other_call(on: On, backend: str, ep_size: int):
    config = make_config(4, 2, 32)
    counts = [[0] * ep_size, [4, 0][:ep_size], [0] * ep_size]
    steps = [problem(config, random_ids(num_tokens, 2, 4)) for num_tokens in counts]
    for outcomes in on(backend, ep_size)(checked_steps, steps):
        kinds = [
            [(t.dtype, t.dim()) for t in (o.rows, o.scores, o.tokens_per_expert, o.expert_offsets)] for o in outcomes
        ]
        assert kinds[0] == kinds[1] == kinds[2]
        assert outcomes[0].tokens_per_expert.tolist() == [0] * (4 // ep_size)


@every_backend(2)
@pytest.mark.parametrize("alignment", (1, 16))
def test_a_cold_rank_gets_its_tokens_back(on: On, backend: str, ep_size: int, alignment: int):
    config = make_config(4, 2, 64, dtype=torch.bfloat16, expert_alignment=alignment)
    cold = problem(config, random_ids((8, 8), 2, 4, among=(0, 1)))
    normal = [problem(config, random_ids((8, 8), 2, 4, seed=step), seed=step) for step in (1, 2, 3)]
    outcomes = on(backend, 2)(checked_steps, [cold, *normal])[1]
    assert outcomes[0].rows.shape[0] == 0
    assert outcomes[0].out.shape == (8, 64)


def padded(trial: Problem, to: int) -> Problem:
    """The same tokens in a batch padded by hand, with tokens that go nowhere."""

    def pad(parts: tuple[torch.Tensor, ...], value: float) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat([part, part.new_full((to - len(part), part.shape[1]), value)]) for part in parts)

    return trial.replace(
        x=pad(trial.x, 3),
        topk_scores=pad(trial.topk_scores, 9),
        topk_expert_ids=pad(trial.topk_expert_ids, -1),
        grad_out=pad(trial.grad_out, 5),
    )


@every_backend(2)
@pytest.mark.parametrize("num_tokens", [(5, 5), (6, 6), (8, 3), (13, 7), (1, 0), (4, 4)], ids=str)
def test_uneven_counts_equal_a_run_padded_by_hand(on: On, backend: str, ep_size: int, num_tokens: tuple[int, int]):
    config = make_config(4, 2, 64, dtype=torch.bfloat16)
    trial = problem(config, random_ids(num_tokens, 2, 4), experts="identity")
    for rank, (ragged, even) in enumerate(
        zip(*(on(backend, 2)(checked, t) for t in (trial, padded(trial, 16))), strict=True)
    ):
        assert_bit_equal(ragged.tokens_per_expert, even.tokens_per_expert)
        assert_bit_equal(ragged.rows, even.rows)
        for name in ("out", "grad_x", "grad_scores"):
            assert_bit_equal(getattr(ragged, name), getattr(even, name)[: num_tokens[rank]], name)


@every_backend(2)
def test_one_rank_receives_far_more_than_it_sends(on: On, backend: str, ep_size: int):
    trial = problem(make_config(2, 1, 64, dtype=torch.bfloat16), [[[0]] * 3, [[0]] * 29])
    first, second = on(backend, 2)(checked, trial)
    assert (first.tokens_per_expert.tolist(), second.tokens_per_expert.tolist()) == ([32], [0])


def in_chunks(seat: Seat, whole: Problem, size: int) -> list[Outcome]:
    starts = range(0, max(whole.num_tokens), size)
    names = ("x", "topk_scores", "topk_expert_ids", "grad_out")
    chunks = [
        whole.replace(**{name: tuple(part[start : start + size] for part in getattr(whole, name)) for name in names})
        for start in starts
    ]
    with seat.open(whole.config) as dispatcher:
        return [solve(dispatcher, chunk, seat.rank, seat.device) for chunk in chunks]


@pytest.mark.parametrize("backend", ["loopback", "all_to_all"])
def test_chunks_in_which_a_rank_runs_dry(on: On, backend: str):
    num_tokens = (500, 200, 256)
    trial = problem(make_config(6, 2, 32, num_max_tokens_per_rank=500), random_ids(num_tokens, 2, 6))
    whole = on(backend, 3)(checked, trial)
    for one, parts in zip(whole, on(backend, 3)(in_chunks, trial, 256), strict=True):
        for name in ("out", "grad_x", "grad_scores"):
            assert_bit_equal(torch.cat([getattr(part, name) for part in parts]), getattr(one, name), name)
        assert_bit_equal(
            sum((part.tokens_per_expert for part in parts), torch.zeros(2, dtype=torch.int64)), one.tokens_per_expert
        )


@every_backend(2)
def test_nothing_but_real_tokens_is_counted(on: On, backend: str, ep_size: int):
    config = make_config(4, 2, 64, num_max_tokens_per_rank=16)
    trial = problem(config, random_ids((5, 5), 2, 4)).replace(strided=True)
    outcomes = on(backend, 2)(checked, trial)
    assert sum(int(outcome.tokens_per_expert.sum()) for outcome in outcomes) == 20
    assert sum(outcome.rows.shape[0] for outcome in outcomes) == 20


def with_bound(seat: Seat, trial: Problem, bound: int | None) -> torch.Tensor:
    with seat.open(trial.config) as dispatcher:
        x, scores, ids = (part[seat.rank] for part in (trial.x, trial.topk_scores, trial.topk_expert_ids))
        routed = dispatcher.dispatch(x, scores, ids, num_tokens_per_rank=bound)
        return dispatcher.combine(routed.rows, routed.handle).detach()


@every_backend()
def test_the_bound_of_a_call_changes_nothing(on: On, backend: str, ep_size: int):
    num_tokens = (7, 2, 0, 5)[:ep_size]
    trial = with_config(problem(make_config(4, 2), random_ids(num_tokens, 2, 4)), num_max_tokens_per_rank=32)
    run = partial(on(backend, ep_size), with_bound, trial)
    for outs in zip(run(None), run(7), run(32), strict=True):
        assert_bit_equal(outs[1], outs[0])
        assert_bit_equal(outs[2], outs[0])


def equal_counts(seat: Seat, config: cd.DispatcherConfig) -> cd.DispatcherStats:
    with seat.open(config) as dispatcher:
        for step in range(3):
            solve(dispatcher, problem(config, random_ids((8,) * seat.size, 2, 4, seed=step)), seat.rank, seat.device)
        return dispatcher.stats()


@every_backend(2)
def test_declaring_equal_counts_costs_nothing(on: On, backend: str, ep_size: int):
    plain, declared = (
        on(backend, 2)(equal_counts, make_config(4, 2, 64, equal_token_counts=equal)) for equal in (False, True)
    )
    assert plain == declared
    assert plain[0].calls == 12
