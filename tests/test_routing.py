"""Routers against a plain Python choice, their gradients, ties, NaNs and padding."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossdock import routing
from crossdock.errors import ConfigError, InvalidInput
from crossdock.routing import Routing

E = 8
grouped = functools.partial(routing.group_limited_topk, num_groups=4, num_limited_groups=2)
ROUTERS: dict[str, Callable[..., Routing]] = {
    "softmax": routing.softmax_topk,
    "sigmoid": routing.sigmoid_topk,
    "group_limited": grouped,
}
every_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())

# Few distinct values, so that ties are common.
values = st.sampled_from([-2.0, -0.0, 0.0, 0.5, 1.0, 3.0])
logits_rows = st.lists(st.lists(values, min_size=E, max_size=E), min_size=0, max_size=5)
biases = st.lists(st.sampled_from([-1.0, 0.0, 0.25]), min_size=E, max_size=E)


def as_logits(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, E)


def best(preference: Tensor, count: int) -> list[int]:
    """Indices of the largest values, the lower index first among equals, in plain Python."""
    numbers = preference.tolist()
    return sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:count]


@given(rows=logits_rows, top_k=st.integers(1, E), renormalize=st.booleans())
def test_softmax_topk_is_the_plain_choice(rows: list[list[float]], top_k: int, renormalize: bool) -> None:
    logits = as_logits(rows)
    found = routing.softmax_topk(logits, top_k, renormalize=renormalize)
    assert found.topk_expert_ids.dtype == torch.int64
    assert found.topk_scores.dtype == torch.float32
    for token, probabilities in enumerate(logits.softmax(-1)):
        ids = best(logits[token], top_k)
        assert found.topk_expert_ids[token].tolist() == ids
        scale = probabilities[ids].sum() if renormalize else 1.0
        torch.testing.assert_close(found.topk_scores[token], probabilities[ids] / scale)


@given(rows=logits_rows, bias=biases, top_k=st.integers(1, E))
def test_a_bias_selects_and_leaves_scores_alone(rows: list[list[float]], bias: list[float], top_k: int) -> None:
    logits = as_logits(rows)
    for router, affinity in ((routing.softmax_topk, logits.softmax(-1)), (routing.sigmoid_topk, logits.sigmoid())):
        found = router(logits, top_k, renormalize=False, bias=torch.tensor(bias))
        for token in range(len(rows)):
            ids = best(affinity[token] + torch.tensor(bias), top_k)
            assert found.topk_expert_ids[token].tolist() == ids
            assert torch.equal(found.topk_scores[token], affinity[token, ids])


@given(rows=logits_rows, bias=biases, top_k=st.integers(1, 4), limited=st.integers(2, 4))
def test_group_limited_uses_the_best_groups_only(
    rows: list[list[float]], bias: list[float], top_k: int, limited: int
) -> None:
    logits = as_logits(rows)
    found = grouped(logits, top_k, num_limited_groups=limited, bias=torch.tensor(bias), renormalize=False)
    for token, affinity in enumerate(logits.sigmoid()):
        preference = affinity + torch.tensor(bias)
        groups = best(preference.view(4, 2).sum(-1), limited)
        outside = torch.tensor([e // 2 not in groups for e in range(E)])
        ids = best(preference.masked_fill(outside, -math.inf), top_k)
        assert found.topk_expert_ids[token].tolist() == ids
        assert torch.equal(found.topk_scores[token], affinity[ids])


def test_group_score_is_the_sum_of_the_best_two_not_of_all() -> None:
    # Group 0 has the larger sum of four, group 1 the larger best two.
    affinity = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.9, 0.8, 0.01, 0.01]])
    found = routing.group_limited_topk(affinity.logit(), 2, num_groups=2, num_limited_groups=1)
    assert found.topk_expert_ids.tolist() == [[4, 5]]


def test_group_limited_with_groups_of_one_expert() -> None:
    logits = torch.arange(E, dtype=torch.float32).unsqueeze(0)
    found = routing.group_limited_topk(logits, 3, num_groups=E, num_limited_groups=3)
    assert found.topk_expert_ids.tolist() == [[7, 6, 5]]


def test_group_limited_keeps_to_its_groups_under_a_negative_bias() -> None:
    bias = torch.full((E,), -5.0)
    logits = torch.randn(16, E, generator=torch.Generator().manual_seed(0))
    plain, biased = grouped(logits, 4), grouped(logits, 4, bias=bias)
    assert torch.equal(plain.topk_expert_ids.sort().values, biased.topk_expert_ids.sort().values)


@every_router
def test_scores_add_up_to_the_scale_when_renormalised(router: Callable[..., Routing]) -> None:
    logits = torch.randn(32, E, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(router(logits, 3).topk_scores.sum(-1), torch.ones(32))
    if router is not routing.softmax_topk:
        torch.testing.assert_close(router(logits, 3, scale=2.5).topk_scores.sum(-1), torch.full((32,), 2.5))


@every_router
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_of_scores(router: Callable[..., Routing], renormalize: bool) -> None:
    logits = torch.randn(6, E, generator=torch.Generator().manual_seed(2), requires_grad=True)
    scores = router(logits, 3, renormalize=renormalize).topk_scores
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    (scores * weight).sum().backward()
    assert logits.grad is not None
    step = 1e-3  # central differences in float32; the choice must not flip within a step, hence distinct logits
    for token, expert in ((0, 0), (3, 5), (5, 7)):
        moved = []
        for sign in (1, -1):
            shifted = logits.detach().clone()
            shifted[token, expert] += sign * step
            moved.append((router(shifted, 3, renormalize=renormalize).topk_scores.double() * weight).sum())
        slope = float((moved[0] - moved[1]) / (2 * step))
        assert float(logits.grad[token, expert]) == pytest.approx(slope, abs=2e-4)


@every_router
def test_a_router_computes_in_float32(router: Callable[..., Routing]) -> None:
    logits = torch.randn(5, E, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(4))
    low, high = router(logits, 2), router(logits.float(), 2)
    assert torch.equal(low.topk_scores, high.topk_scores)
    assert torch.equal(low.topk_expert_ids, high.topk_expert_ids)


@every_router
def test_equal_logits_take_the_lowest_ids(router: Callable[..., Routing]) -> None:
    found = router(torch.zeros(300, E), 3)
    assert torch.equal(found.topk_expert_ids, torch.tensor([[0, 1, 2]]).expand(300, 3))


def test_softmax_tells_logits_apart_where_probabilities_underflow() -> None:
    logits = torch.tensor([[0.0, -200.0, -150.0, -300.0]])
    assert routing.softmax_topk(logits, 3).topk_expert_ids.tolist() == [[0, 2, 1]]


@every_router
def test_nan_logits_are_loud_and_stay_in_their_token(router: Callable[..., Routing]) -> None:
    logits = torch.randn(4, E, generator=torch.Generator().manual_seed(5))
    poisoned = logits.clone()
    poisoned[1, 6] = math.nan
    poisoned[2] = math.nan
    clean, found = router(logits, 3), router(poisoned, 3)
    assert found.topk_scores[1:3].isnan().all()
    assert torch.equal(found.topk_scores[[0, 3]], clean.topk_scores[[0, 3]])
    assert torch.equal(found.topk_expert_ids[[0, 3]], clean.topk_expert_ids[[0, 3]])
    for ids in found.topk_expert_ids.tolist():
        assert len(set(ids)) == 3 and all(0 <= expert < E for expert in ids)


def test_sigmoids_that_underflow_give_zeros_and_no_nan() -> None:
    logits = torch.full((2, E), -200.0, requires_grad=True)
    scores = routing.sigmoid_topk(logits, 2).topk_scores
    scores.sum().backward()
    assert torch.equal(scores, torch.zeros(2, 2))
    assert logits.grad is not None and logits.grad.isfinite().all()


@every_router
def test_padding_tokens_go_nowhere_and_take_no_gradient(router: Callable[..., Routing]) -> None:
    logits = torch.randn(4, E, generator=torch.Generator().manual_seed(6))
    logits[2] = math.nan  # what lies in a padding row must not matter
    logits.requires_grad_()
    mask = torch.tensor([True, True, False, True])
    found = router(logits, 2, token_mask=mask)
    assert found.topk_expert_ids[2].tolist() == [-1, -1]
    assert found.topk_scores[2].tolist() == [0.0, 0.0]
    found.topk_scores.square().sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad[2], torch.zeros(E))
    real = router(logits.detach()[mask], 2)
    assert torch.equal(found.topk_expert_ids[mask], real.topk_expert_ids)
    assert torch.equal(found.topk_scores.detach()[mask], real.topk_scores)


@every_router
def test_no_tokens(router: Callable[..., Routing]) -> None:
    found = router(torch.zeros(0, E, requires_grad=True), 3)
    assert found.topk_scores.shape == found.topk_expert_ids.shape == (0, 3)
    assert found.topk_scores.requires_grad


@given(num_tokens=st.integers(0, 40), top_k=st.integers(1, 6), num_experts=st.integers(1, 16))
def test_static_balanced_is_balanced(num_tokens: int, top_k: int, num_experts: int) -> None:
    found = routing.static_balanced(num_tokens, top_k, num_experts)
    flat = [slot % num_experts for slot in range(num_tokens * top_k)]
    assert found.topk_expert_ids.flatten().tolist() == flat
    counts = routing.count_tokens_per_expert(found.topk_expert_ids, num_experts).tolist()
    assert max(counts) - min(counts) <= 1
    assert found.topk_scores.shape == (num_tokens, top_k)
    assert torch.equal(found.topk_scores, torch.full((num_tokens, top_k), 1.0 / top_k))


def test_static_balanced_passes_scores_through() -> None:
    scores = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    found = routing.static_balanced(3, 2, 4, topk_scores=scores)
    assert torch.equal(found.topk_scores, scores.float())
    assert found.topk_scores.requires_grad


@given(ids=st.lists(st.integers(-1, E - 1), max_size=60))
def test_count_tokens_per_expert_ignores_empty_slots(ids: list[int]) -> None:
    for dtype in (torch.int32, torch.int64):
        counts = routing.count_tokens_per_expert(torch.tensor(ids, dtype=dtype), E)
        assert counts.tolist() == [ids.count(expert) for expert in range(E)]


def test_update_bias_moves_towards_balance_by_its_speed() -> None:
    bias = torch.tensor([0.5, 0.0, -0.5])
    assert routing.update_bias(bias, torch.tensor([7, 1, 4]), speed=0.25).tolist() == [0.25, 0.25, -0.5]
    assert bias.tolist() == [0.5, 0.0, -0.5]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_update_bias_balances_a_skewed_router(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(256, E, generator=generator) + torch.linspace(-1.5, 1.5, E)

    def spread(bias: Tensor) -> int:
        counts = routing.count_tokens_per_expert(routing.sigmoid_topk(logits, 2, bias=bias).topk_expert_ids, E)
        return int(counts.max() - counts.min())

    bias = torch.zeros(E)
    before = spread(bias)
    for _ in range(150):
        ids = routing.sigmoid_topk(logits, 2, bias=bias).topk_expert_ids
        bias = routing.update_bias(bias, routing.count_tokens_per_expert(ids, E), speed=0.01)
    assert spread(bias) < before / 3


def test_a_routing_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        routing.static_balanced(1, 1, 1).topk_scores = torch.zeros(1, 1)  # type: ignore[misc]


@every_router
def test_a_router_compiles_in_one_piece(router: Callable[..., Routing]) -> None:
    logits = torch.randn(7, E, generator=torch.Generator().manual_seed(7))
    mask = torch.arange(7) != 3

    def scores_and_ids(logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        found = router(logits, 3, token_mask=mask)
        return found.topk_scores, found.topk_expert_ids

    scores, ids = torch.compile(scores_and_ids, fullgraph=True, backend="aot_eager")(logits, mask)
    eager = router(logits, 3, token_mask=mask)
    assert torch.equal(scores, eager.topk_scores)
    assert torch.equal(ids, eager.topk_expert_ids)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda z: routing.softmax_topk(z, 9),
            ConfigError,
            r"top_k \(9\) must be from 1 to the number of experts \(8\)",
        ),
        (lambda z: routing.softmax_topk(z, 0), ConfigError, r"top_k \(0\) must be from 1"),
        (
            lambda z: routing.softmax_topk(z[0], 2),
            InvalidInput,
            r"logits must be floating point \[T, E\], got .* \[8\]",
        ),
        (lambda z: routing.softmax_topk(z.long(), 2), InvalidInput, "got torch.int64"),
        (lambda z: routing.sigmoid_topk(z, 2, bias=torch.zeros(7)), InvalidInput, r"bias must be \[8\], got \[7\]"),
        (
            lambda z: routing.sigmoid_topk(z, 2, token_mask=torch.ones(3, dtype=torch.bool)),
            InvalidInput,
            r"token_mask must be bool \[2\], got torch.bool \[3\]",
        ),
        (lambda z: grouped(z, 2, num_groups=3), ConfigError, r"num_groups \(3\) must divide .* \(8\)"),
        (lambda z: grouped(z, 2, num_limited_groups=5), ConfigError, r"num_limited_groups \(5\) .* num_groups \(4\)"),
        (lambda z: grouped(z, 5), ConfigError, r"top_k \(5\) must not exceed the 4 experts of 2 groups"),
        (lambda z: routing.static_balanced(-1, 2, 4), ConfigError, r"num_tokens \(-1\) must not be negative"),
        (
            lambda z: routing.static_balanced(3, 2, 4, topk_scores=z),
            InvalidInput,
            r"topk_scores must be \[3, 2\], got \[2, 8\]",
        ),
        (lambda z: routing.update_bias(z[0], torch.zeros(7).long(), 0.1), InvalidInput, r"bias \[8\] .* \[7\]"),
        (lambda z: routing.update_bias(z[0], z[0], 0.1), InvalidInput, "must hold integers, got torch.float32"),
    ],
)
def test_refusals(call: Callable[[Tensor], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.zeros(2, E))
