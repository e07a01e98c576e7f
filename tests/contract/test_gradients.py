"""Gradients of rows, scores and expert weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.nn import GroupedExperts
from crossdock.testing import Problem, Seat, assert_bit_equal
from tests.contract.conftest import On, every_backend
from tests.contract.trials import checked, integers, make_config, problem, random_ids


def with_ones(trial: Problem) -> Problem:
    return trial.replace(grad_out=tuple(torch.ones_like(part) for part in trial.grad_out))


@every_backend(1, 2)
def test_the_router_gets_its_gradient(on: On, backend: str, ep_size: int):
    trial = integers(problem(make_config(4, 2), random_ids((4,) * ep_size, 2, 4)))
    trial = with_ones(trial)
    for rank, outcome in enumerate(on(backend, ep_size)(checked, trial)):
        wanted = (trial.topk_expert_ids[rank] + 1) * trial.x[rank].sum(1, keepdim=True)
        assert torch.equal(outcome.grad_scores, wanted)


@every_backend(2)
def test_a_score_of_zero_has_a_gradient_and_a_missing_expert_has_none(on: On, backend: str, ep_size: int):
    ids = [[[0, 2], [1, 3], [3, 0], [2, 1], [0, -1], [-1, 3]]] * 2
    trial = integers(problem(make_config(4, 2), ids))
    zero = torch.tensor([[0.0, 1], [1, 0], [0, 0], [1, 1], [0, 1], [1, 0]])
    trial = trial.replace(topk_scores=(zero, zero))
    for rank, outcome in enumerate(on(backend, 2)(checked, trial)):
        dots = (trial.x[rank] * trial.grad_out[rank]).sum(1, keepdim=True)
        expert = trial.topk_expert_ids[rank]
        assert torch.equal(outcome.grad_scores, torch.where(expert < 0, 0, expert + 1) * dots)


def weight_gradients(seat: Seat, trial: Problem) -> Tensor:
    """Experts are one vector each; the loss is the sum of everything on all ranks."""
    config, rank = trial.config, seat.rank
    num_local = config.num_experts // seat.size
    weight = torch.ones(num_local, config.hidden_dim, requires_grad=True)
    with seat.open(config) as dispatcher:
        routed = dispatcher.dispatch(trial.x[rank], trial.topk_scores[rank], trial.topk_expert_ids[rank])
        expert = torch.repeat_interleave(torch.arange(num_local), routed.tokens_per_expert)
        dispatcher.combine(routed.rows * weight[expert], routed.handle).sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_weight_gradients_have_no_factor_of_the_group_size(on: On):
    config = make_config(4, 2, 8)
    whole = integers(problem(config, random_ids((8,), 2, 4)))

    def over(ep_size: int) -> Problem:
        names = ("x", "topk_scores", "topk_expert_ids", "grad_out")
        return whole.replace(**{name: getattr(whole, name)[0].chunk(ep_size) for name in names})

    (one,) = on("local", 1)(weight_gradients, over(1))
    for backend, ep_size in (("loopback", 2), ("loopback", 4), ("all_to_all", 2), ("all_to_all", 4)):
        assert_bit_equal(torch.cat(on(backend, ep_size)(weight_gradients, over(ep_size))), one, f"{backend} {ep_size}")


def swiglu_gradients(seat: Seat, trial: Problem) -> dict[str, Tensor]:
    config, rank = trial.config, seat.rank
    num_local = config.num_experts // seat.size
    experts = GroupedExperts(num_local, config.hidden_dim, 8, seed=0, first_expert_id=rank * num_local)
    with seat.open(config) as dispatcher:
        routed = dispatcher.dispatch(trial.x[rank], trial.topk_scores[rank], trial.topk_expert_ids[rank])
        dispatcher.combine(experts(routed.rows, routed.expert_offsets), routed.handle).sum().backward()
    return {name: weight.grad for name, weight in experts.named_parameters() if weight.grad is not None}


@every_backend(2)
@pytest.mark.parametrize("used", [(0, 4), (0,), ()], ids=str)
def test_unused_experts_get_gradients_of_zero(on: On, backend: str, ep_size: int, used: tuple[int, ...]):
    config = make_config(8, 1)
    ids = [torch.tensor([[used[token % len(used)] if used else -1] for token in range(4)])] * 2
    for rank, gradients in enumerate(on(backend, 2)(swiglu_gradients, problem(config, ids))):
        assert len(gradients) == 3
        for name, gradient in gradients.items():
            assert gradient.isfinite().all()
            for local in range(4):
                assert bool(gradient[local].any()) == (4 * rank + local in used), (name, local)


def bf16_ulp(values: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(values), torch.frexp(values)[1] - 8)


@every_backend(1, 2)
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_errors_do_not_grow_with_the_number_of_slots(on: On, backend: str, ep_size: int, top_k: int):
    num_tokens, hidden_dim = (16, 64) if backend == "symmetric" else (64, 256)  # whose kernels are interpreted
    config = make_config(16, top_k, hidden_dim, dtype=torch.bfloat16, reduction="exact")
    trial = problem(config, random_ids((num_tokens,) * ep_size, top_k, 16), experts="identity")
    generator = torch.Generator().manual_seed(0)
    scores = tuple(torch.randn(part.shape, generator=generator).softmax(1) for part in trial.topk_scores)
    trial = trial.replace(topk_scores=scores)
    for rank, outcome in enumerate(on(backend, ep_size)(checked, trial)):
        x, grad, score = trial.x[rank].double(), trial.grad_out[rank].double(), scores[rank].double()
        out = x * score.sum(1, keepdim=True)
        assert ((outcome.out.double() - out).abs() <= bf16_ulp(out) + 1e-4).all()
        # each slot's gradient row is rounded to bfloat16 on its way, as on every wire
        wanted = sum((score[:, k : k + 1] * grad).bfloat16().double() for k in range(top_k))
        assert isinstance(wanted, Tensor)
        assert ((outcome.grad_x.double() - wanted).abs() <= bf16_ulp(wanted) + 1e-4).all()
        dots = (x * grad).sum(1, keepdim=True).expand(-1, top_k)
        assert torch.allclose(outcome.grad_scores.double(), dots, rtol=1e-5, atol=1e-5)


def nine_and_ones(seat: Seat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    config = make_config(seat.size, 1, 2048, dtype=torch.bfloat16, num_max_tokens_per_rank=1)
    x = torch.ones(1, 2048, dtype=torch.bfloat16)
    x[0, 0] = 9
    scores = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    with seat.open(config) as dispatcher:
        routed = dispatcher.dispatch(x, scores, torch.zeros(1, 1, dtype=torch.int64))
        out = dispatcher.combine(routed.rows, routed.handle)
        out.backward(torch.ones_like(out))
    assert scores.grad is not None
    return scores.grad, out.detach()


@every_backend(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_score_gradients_are_added_up_in_float32(on: On, backend: str, ep_size: int, dtype: torch.dtype):
    for grad, _ in on(backend, ep_size)(nine_and_ones, dtype):
        assert grad.dtype is dtype
        assert grad.item() == torch.tensor(2056.0).to(dtype).item()


@every_backend(1, 2)
def test_scores_are_not_rounded_on_the_way(on: On, backend: str, ep_size: int):
    trial = problem(make_config(2, 1), [[[0]]] * ep_size, experts="identity")
    ones, tenth = torch.ones(1, 16), torch.tensor([[0.1]])
    trial = trial.replace(x=(ones,) * ep_size, topk_scores=(tenth,) * ep_size)
    for outcome in on(backend, ep_size)(checked, trial):
        assert outcome.out[0, 0].item() == tenth.item()


def views_of(name: str, generator: torch.Generator) -> Tensor:
    big = torch.randn(16, 32, generator=generator)
    views: dict[str, Tensor] = {
        "every second column": big[:6, ::2],
        "transposed": big[:, :6].t(),
        "expanded": big[0, :16].expand(6, 16),
    }
    return views[name]


def strided_everywhere(seat: Seat, name: str, strided: bool) -> list[Tensor]:
    """Inputs, experts' output and gradients of odd strides, or contiguous copies of them."""

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor if strided else tensor.contiguous()

    generator = torch.Generator().manual_seed(seat.rank)
    config = make_config(4, 2)
    x = laid_out(views_of(name, generator)).requires_grad_()
    scores = laid_out(torch.rand(6, 5, generator=generator)[:, :2])
    ids = random_ids((6,), 2, 4, seed=seat.rank)[0]
    results: list[Any] = []
    with seat.open(config) as dispatcher:
        for loss in (lambda y: y.sum(), lambda y: y.t().sum(), lambda y: y[::2].sum()):
            routed = dispatcher.dispatch(x, scores, laid_out(ids.t().contiguous().t()))
            rows = laid_out((routed.rows * 2).t().contiguous().t())
            out = dispatcher.combine(rows, routed.handle)
            (grad,) = torch.autograd.grad(loss(out), x)
            results += [out.detach(), grad]
    return results


@every_backend(2)
@pytest.mark.parametrize("name", ["every second column", "transposed", "expanded"])
def test_strides_change_nothing(on: On, backend: str, ep_size: int, name: str):
    odd, plain = (on(backend, 2)(strided_everywhere, name, strided) for strided in (True, False))
    for rank in range(2):
        for mine, theirs in zip(odd[rank], plain[rank], strict=True):
            assert_bit_equal(mine, theirs)
