"""The MoE layer: against a dense float64 loop, EP 1 against EP 2 and 4 to the bit, compiled, masked, and empty."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossdock as cd
from crossdock import routing
from crossdock.nn import GroupedExperts, MoE, MoEResult
from crossdock.nn import moe as moe_module
from crossdock.routing import Routing
from crossdock.testing import Seat, ThreadRunner, assert_bit_equal, assert_within_baseline
from tests.conftest import Ranks

NUM_EXPERTS, TOP_K, HIDDEN_DIM, FFN_DIM = 8, 3, 64, 48

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
every_placement = pytest.mark.parametrize("score_placement", ["after", "inside"])


def config(dtype: torch.dtype = torch.float32, **settings: Any) -> cd.DispatcherConfig:
    return cd.DispatcherConfig(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_dim=HIDDEN_DIM,
        dtype=dtype,
        num_max_tokens_per_rank=128,
        **{"reduction": "exact", "timeout_s": 20.0, **settings},
    )


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_moe(dispatcher: cd.TokenDispatcher, **settings: Any) -> MoE:
    dtype, num_local = dispatcher.config.dtype, dispatcher.num_local_experts
    router = nn.Linear(HIDDEN_DIM, NUM_EXPERTS, bias=False)
    nn.init.normal_(router.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    first = dispatcher.ep_rank * num_local
    experts = GroupedExperts(num_local, HIDDEN_DIM, FFN_DIM, dtype=dtype, seed=2, first_expert_id=first)
    settings.setdefault("routing", functools.partial(routing.softmax_topk, top_k=TOP_K))
    return MoE(dispatcher.layer("moe"), router, experts, **settings)


def swiglu(rows: Tensor, experts: list[Tensor], expert: int) -> Tensor:
    gate, up, down = (weights[expert] for weights in experts)
    return (nn.functional.silu(rows @ gate) * (rows @ up)) @ down


def dense(moe: MoE, x: Tensor, ids: Tensor, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of x, router and experts, token by token and slot by slot, with experts in `dtype`."""
    at_least_float32 = torch.promote_types(dtype, torch.float32)
    x = x.detach().to(dtype).requires_grad_()
    router = moe.router.weight.detach().to(at_least_float32).requires_grad_()
    weights = [weight.detach().to(dtype).requires_grad_() for weight in moe.experts.parameters()]
    probabilities = (x.to(at_least_float32) @ router.T).softmax(-1)
    outputs = []
    for token, chosen in enumerate(ids.tolist()):
        scores = probabilities[token, chosen]
        total = torch.zeros(HIDDEN_DIM, dtype=at_least_float32)
        for score, expert in zip(scores / scores.sum(), chosen, strict=True):
            total = total + score * swiglu(x[token], weights, expert).to(at_least_float32)
        outputs.append(total.to(dtype))
    out = torch.stack(outputs)
    return [out.detach(), *torch.autograd.grad(out, [x, router, *weights], grad.to(dtype))]


@every_dtype
@every_placement
@pytest.mark.parametrize("expert_alignment", [1, 16])
def test_forward_and_gradients_against_a_dense_loop(
    dtype: torch.dtype, score_placement: str, expert_alignment: int
) -> None:
    x, grad = (random(20, HIDDEN_DIM, dtype=dtype, seed=seed) for seed in (3, 4))
    with cd.TokenDispatcher(config(dtype, expert_alignment=expert_alignment), backend="local") as dispatcher:
        moe = make_moe(dispatcher, score_placement=score_placement)
        x.requires_grad_()
        found = moe(x, return_routing=True)
        found.out.backward(grad)
    ids = found.routing.topk_expert_ids
    gradients = [x.grad, *(parameter.grad for parameter in moe.parameters())]
    truth, baseline = (dense(moe, x, ids, grad, kind) for kind in (torch.float64, dtype))
    names = ["out", "x", "router", "gate_proj", "up_proj", "down_proj"]
    for name, result, true, base in zip(names, [found.out, *gradients], truth, baseline, strict=True):
        # Scores inside the experts cost one more rounding, of the inner row.
        factor = 4.0 if score_placement == "inside" else 2.0
        assert result is not None
        assert_within_baseline(result, true, base.to(result.dtype), factor=factor, what=name)


@dataclass(frozen=True)
class Step:
    """What one forward and backward of a rank gave."""

    out: Tensor
    x_grad: Tensor
    scores_grad: Tensor
    weight_grads: list[Tensor]


def tokens_of(rank: int) -> int:
    return (13, 7, 0, 5)[rank]


def drawn(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A rank's x, scores, ids (with empty slots, and expert 3 left without rows) and gradient of the output."""
    shape, seed = (tokens_of(rank), TOP_K), 10 * rank
    ids = torch.randint(-1, NUM_EXPERTS, shape, generator=torch.Generator().manual_seed(seed))
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1))
    x, grad = (random(shape[0], HIDDEN_DIM, dtype=dtype, seed=seed + 2 + i) for i in range(2))
    return x, scores, ids.masked_fill(ids == 3, 4), grad


def one_step(dispatcher: cd.TokenDispatcher, ranks: list[int], placement: str, dtype: torch.dtype) -> Step:
    """One step on the tokens of some ranks, concatenated; the routing is given, since dense parts are not compared."""
    x, scores, ids, grad = (torch.cat(parts) for parts in zip(*(drawn(rank, dtype) for rank in ranks), strict=True))
    x.requires_grad_()
    scores.requires_grad_()
    moe = make_moe(dispatcher, routing=lambda logits: Routing(scores, ids), score_placement=placement)
    out = moe(x)
    out.backward(grad)
    assert x.grad is not None and scores.grad is not None
    weight_grads = [weight.grad for weight in moe.experts.parameters() if weight.grad is not None]
    return Step(out.detach(), x.grad, scores.grad, weight_grads)


def step_on_a_rank(rank: int, placement: str, dtype: torch.dtype, alignment: int) -> dict[str, Any]:
    with cd.TokenDispatcher(config(dtype, expert_alignment=alignment), backend="all_to_all") as dispatcher:
        step = one_step(dispatcher, [rank], placement, dtype)
    return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}


@every_dtype
@every_placement
@pytest.mark.parametrize(("ep_size", "alignment"), [(2, 1), (2, 16), (4, 16)])
def test_ep_1_and_sharded_experts_give_the_same_bits(
    ranks: Ranks, dtype: torch.dtype, score_placement: str, ep_size: int, alignment: int
) -> None:
    parts = ranks(ep_size).run(step_on_a_rank, score_placement, dtype, alignment)
    with cd.TokenDispatcher(config(dtype, expert_alignment=alignment), backend="local") as dispatcher:
        whole = one_step(dispatcher, list(range(ep_size)), score_placement, dtype)
    for name in ("out", "x_grad", "scores_grad"):
        assert_bit_equal(torch.cat([part[name] for part in parts]), getattr(whole, name), name)
    for index, weight in enumerate(whole.weight_grads):
        assert_bit_equal(torch.cat([part["weight_grads"][index] for part in parts]), weight, f"weight {index}")
        assert_bit_equal(weight[3], torch.zeros_like(weight[3]), "gradient of the expert without rows")


@every_dtype
@every_placement
def test_compiles_in_one_piece_with_the_same_bits(dtype: torch.dtype, score_placement: str) -> None:
    with cd.TokenDispatcher(config(dtype), backend="local") as dispatcher:
        eager, traced = (make_moe(dispatcher, score_placement=score_placement) for _ in range(2))
        torch._dynamo.reset()
        compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
        for num_tokens in (8, 12, 1, 0):
            results = []
            for call, module in ((eager, eager), (compiled, traced)):
                module.zero_grad()
                x = random(num_tokens, HIDDEN_DIM, dtype=dtype, seed=5).requires_grad_()
                out = call(x)
                out.square().sum().backward()
                results.append([out, x.grad, *(parameter.grad for parameter in module.parameters())])
            for expected, found in zip(*results, strict=True):
                assert_bit_equal(found, expected, f"{num_tokens} tokens")


def test_no_tokens() -> None:
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        moe = make_moe(dispatcher)
        out = moe(torch.zeros(2, 0, HIDDEN_DIM))
        assert out.shape == (2, 0, HIDDEN_DIM)
        out.sum().backward()
    for parameter in moe.parameters():
        assert parameter.grad is not None
        assert_bit_equal(parameter.grad, torch.zeros_like(parameter))


def test_leading_dimensions_and_strides_do_not_matter() -> None:
    x = random(HIDDEN_DIM, 6, seed=6).t()
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        moe = make_moe(dispatcher)
        assert_bit_equal(moe(x.reshape(2, 3, HIDDEN_DIM)), moe(x.contiguous()).reshape(2, 3, HIDDEN_DIM))
        assert_bit_equal(moe(x), moe(x.contiguous()))


def test_padding_tokens_reach_no_expert() -> None:
    x = random(2, 4, HIDDEN_DIM, seed=7)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    garbage = x.masked_fill(~mask.unsqueeze(-1), 1e6).requires_grad_()
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        moe = make_moe(dispatcher)
        found = moe(garbage, token_mask=mask, return_routing=True)
        assert_bit_equal(found.out[~mask], torch.zeros(3, HIDDEN_DIM))
        assert int(found.tokens_per_expert.sum()) == 5 * TOP_K
        found.out.sum().backward()
    assert garbage.grad is not None
    assert_bit_equal(garbage.grad[~mask], torch.zeros(3, HIDDEN_DIM))


def test_the_routing_comes_back_when_asked_for() -> None:
    x = random(9, HIDDEN_DIM, seed=8)
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        moe = make_moe(dispatcher)
        found = moe(x, return_routing=True)
        assert isinstance(found, MoEResult)
        assert_bit_equal(moe(x), found.out)
    counted = routing.count_tokens_per_expert(found.routing.topk_expert_ids, NUM_EXPERTS)
    assert_bit_equal(found.tokens_per_expert, counted)  # one rank: its experts are all experts
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.out = x  # type: ignore[misc]


def test_num_tokens_per_rank_is_passed_on() -> None:
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        moe = make_moe(dispatcher)
        moe(random(5, HIDDEN_DIM, seed=9), num_tokens_per_rank=5)
        with pytest.raises(cd.InvalidInput, match="num_tokens_per_rank"):
            moe(random(5, HIDDEN_DIM, seed=9), num_tokens_per_rank=4)


def test_a_shared_expert_is_added_to_every_token() -> None:
    x = random(5, HIDDEN_DIM, seed=10)
    shared = nn.Linear(HIDDEN_DIM, HIDDEN_DIM)
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        alone, both = make_moe(dispatcher), make_moe(dispatcher, shared_expert=shared)
        assert_bit_equal(both(x), alone(x) + shared(x))
        both(x).sum().backward()
    assert shared.weight.grad is not None


def test_the_router_works_in_float32_under_autocast() -> None:
    x = random(5, HIDDEN_DIM, dtype=torch.bfloat16, seed=11)
    with cd.TokenDispatcher(config(torch.bfloat16), backend="local") as dispatcher:
        moe = make_moe(dispatcher)
        plain = moe(x, return_routing=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = moe(x, return_routing=True)
    assert_bit_equal(cast.routing.topk_scores, plain.routing.topk_scores)
    assert_bit_equal(cast.out, plain.out)


def test_the_dispatcher_is_no_part_of_the_state() -> None:
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        names = set(make_moe(dispatcher).state_dict())
    assert names == {"router.weight", "experts.gate_proj", "experts.up_proj", "experts.down_proj"}


def test_refusals() -> None:
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        with pytest.raises(cd.ConfigError, match="score_placement must be 'after' or 'inside', got 'before'"):
            make_moe(dispatcher, score_placement="before")
        with pytest.raises(cd.InvalidInput, match=r"x must be \[\.\.\., 64\], as the router takes, got \[3, 32\]"):
            make_moe(dispatcher)(torch.zeros(3, 32))


OTHER_SIZES: dict[str, tuple[nn.Linear, GroupedExperts]] = {
    "router.in_features (32) must be hidden_dim of its dispatcher (64)": (nn.Linear(32, 8), GroupedExperts(8, 64, 48)),
    "router.out_features (9) must be num_experts of its dispatcher (8)": (nn.Linear(64, 9), GroupedExperts(8, 64, 48)),
    "experts.hidden_dim (32) must be hidden_dim of its": (nn.Linear(64, 8), GroupedExperts(8, 32, 48)),
    "experts.num_local_experts (4) must be num_local_experts of": (nn.Linear(64, 8), GroupedExperts(4, 64, 48)),
}


@pytest.mark.parametrize("sentence", OTHER_SIZES)
def test_parts_of_other_sizes_are_refused_when_they_are_put_together(sentence: str) -> None:
    router, experts = OTHER_SIZES[sentence]
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        for layer in (dispatcher, dispatcher.layer("moe")):
            with pytest.raises(cd.ConfigError, match=re.escape(sentence)):
                MoE(layer, router, experts, routing=functools.partial(routing.softmax_topk, top_k=TOP_K))


def refused_seeds(seat: Seat) -> list[str]:
    sentences = []
    with seat.open(config()) as dispatcher:
        num_local, first = dispatcher.num_local_experts, dispatcher.ep_rank * dispatcher.num_local_experts
        for seed, first_expert_id in ((2, None), (2, 4), (None, None), (2, first)):
            experts = GroupedExperts(num_local, HIDDEN_DIM, FFN_DIM, seed=seed, first_expert_id=first_expert_id)
            try:
                MoE(dispatcher, nn.Linear(HIDDEN_DIM, NUM_EXPERTS), experts, routing=routing.softmax_topk)
            except cd.ConfigError as refusal:
                sentences.append(str(refusal))
    return sentences


def test_seeded_experts_that_would_be_those_of_another_rank_are_refused() -> None:
    same = "experts of seed 2 without first_expert_id are the same on all 2 ranks of their dispatcher: pass"
    other = "experts.first_expert_id (4) must be ep_rank * num_local_experts of its dispatcher (0)"
    found = ThreadRunner(2)(refused_seeds)
    assert [len(each) for each in found] == [2, 1]
    assert found[0][0].startswith(same) and found[1][0].startswith(same) and found[0][1] == other


# -- experts that wait for counts --------------------------------------------------------------------------------------

SOME_CAPACITIES = (cd.RowCapacity.worst_case(), cd.RowCapacity.calibrated(), cd.RowCapacity.rows(256))
WAITING = "would wait for its counts in every call, which row_capacity {} is there to avoid: change dtype or widths"


class Slow(nn.Module):
    """Experts of somebody else, without weights, that say of themselves whether they read counts on the host."""

    def __init__(self, reads_counts_on_host: object) -> None:
        super().__init__()
        self.reads_counts_on_host = reads_counts_on_host

    def forward(self, rows: Tensor, expert_offsets: Tensor, scores: Tensor | None) -> Tensor:
        return rows


@pytest.fixture
def cpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is treated as GPUs are; `GroupedExperts` reads its counts there in every dtype."""
    monkeypatch.setattr(moe_module, "_ASYNC_DEVICE_TYPES", frozenset({"cpu"}))


@pytest.mark.parametrize("capacity", ["exact", "worst_case", "balanced", "calibrated", "rows"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda", "meta"])
def test_only_reading_on_a_gpu_under_a_fixed_capacity_waits(device_type: str, capacity: str) -> None:
    waits = device_type == "cuda" and capacity != "exact"
    assert moe_module.waits_for_counts(device_type, capacity, True) == waits
    assert not moe_module.waits_for_counts(device_type, capacity, False)


@pytest.mark.parametrize("capacity", SOME_CAPACITIES, ids=str)
def test_experts_that_wait_are_refused_when_they_are_put_in(capacity: cd.RowCapacity, cpu_is_waited_for: None) -> None:
    with cd.TokenDispatcher(config(row_capacity=capacity), backend="local") as dispatcher:
        with pytest.raises(cd.ConfigError, match=re.escape(WAITING.format(capacity))) as refused:
            make_moe(dispatcher)
        assert str(refused.value).startswith("GroupedExperts (torch.float32) on cpu ")
    with cd.TokenDispatcher(config(), backend="local") as dispatcher:
        make_moe(dispatcher)(random(5, HIDDEN_DIM, seed=12))  # under exact() the dispatch waits anyway


def test_experts_that_are_moved_later_are_refused_in_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model is that is made on the CPU: here the CPU becomes a device that is waited for in between."""
    x = random(5, HIDDEN_DIM, seed=13)
    with cd.TokenDispatcher(config(row_capacity=cd.RowCapacity.worst_case()), backend="local") as dispatcher:
        moe = make_moe(dispatcher)
        before = moe(x)
        monkeypatch.setattr(moe_module, "_ASYNC_DEVICE_TYPES", frozenset({"cpu"}))
        calls = dispatcher.stats().calls
        with pytest.raises(cd.ConfigError, match=re.escape(WAITING.format("worst_case(1.0)"))):
            moe(x)
        assert dispatcher.stats().calls == calls  # it is refused before its peers are asked
        with monkeypatch.context() as patched:
            patched.setattr(GroupedExperts, "reads_counts_on_host", False)  # as on a GPU in another dtype
            assert_bit_equal(moe(x), before)
        assert_bit_equal(moe(x), before)  # admitted once, and not asked again


def test_a_compiler_refuses_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(5, HIDDEN_DIM, seed=14)
    with cd.TokenDispatcher(config(row_capacity=cd.RowCapacity.worst_case()), backend="local") as dispatcher:
        moe = make_moe(dispatcher)
        eager = moe(x)
        monkeypatch.setattr(moe_module, "_ASYNC_DEVICE_TYPES", frozenset({"cpu"}))
        torch._dynamo.reset()
        compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
        assert_bit_equal(compiled(x), eager)
        with pytest.raises(cd.ConfigError, match="would wait for its counts"):
            moe(x)


def test_experts_are_judged_in_the_dtype_in_which_they_run(cpu_is_waited_for: None) -> None:
    """Weights that are yet to be cast, as by `to` or by a trainer that keeps float32 beside, are left alone."""
    bfloat16 = config(torch.bfloat16, row_capacity=cd.RowCapacity.worst_case())
    with cd.TokenDispatcher(bfloat16, backend="local") as dispatcher:
        experts = GroupedExperts(NUM_EXPERTS, HIDDEN_DIM, FFN_DIM)  # float32
        router = nn.Linear(HIDDEN_DIM, NUM_EXPERTS)
        moe = MoE(dispatcher, router, experts, routing=functools.partial(routing.softmax_topk, top_k=TOP_K))
        moe.to(torch.bfloat16)
        with pytest.raises(cd.ConfigError, match=r"GroupedExperts \(torch.bfloat16\) on cpu would wait"):
            moe(random(5, HIDDEN_DIM, dtype=torch.bfloat16, seed=15))


@pytest.mark.parametrize("says", [True, False, None, "perhaps"])
def test_what_experts_of_others_say_counts(says: object, cpu_is_waited_for: None) -> None:
    x, experts = random(5, HIDDEN_DIM, seed=16), Slow(says)
    with cd.TokenDispatcher(config(row_capacity=cd.RowCapacity.worst_case()), backend="local") as dispatcher:
        router = nn.Linear(HIDDEN_DIM, NUM_EXPERTS)
        # Without weights nobody knows where they run, until they do.
        moe = MoE(dispatcher, router, experts, routing=functools.partial(routing.softmax_topk, top_k=TOP_K))
        if says is not True:
            assert moe(x).shape == x.shape
            return
        with pytest.raises(cd.ConfigError, match=r"Slow \(torch.float32\) on cpu would wait for its counts"):
            moe(x)


def test_another_layer_asks_again(cpu_is_waited_for: None) -> None:
    x = random(5, HIDDEN_DIM, seed=17)
    with (
        cd.TokenDispatcher(config(), backend="local") as waiting,
        cd.TokenDispatcher(config(row_capacity=cd.RowCapacity.worst_case()), backend="local") as free,
    ):
        moe = make_moe(waiting)
        moe(x)
        moe.layer = free.layer("moe")
        with pytest.raises(cd.ConfigError, match="would wait for its counts"):
            moe(x)


def balanced_by_bias(rank: int, num_steps: int) -> tuple[list[int], list[int]]:
    """Loads of all experts before and after some bias updates, with loads summed over the group."""
    with cd.TokenDispatcher(config(reduction="fast"), backend="all_to_all") as dispatcher:
        bias = torch.zeros(NUM_EXPERTS)
        moe = make_moe(dispatcher, routing=lambda logits: routing.sigmoid_topk(logits, TOP_K, bias=bias))
        x = random(64, HIDDEN_DIM, seed=100 + rank) + 0.5  # an offset that all tokens share makes favourites
        history = []
        for _ in range(num_steps):
            with torch.no_grad():
                found = moe(x, return_routing=True)
            load = routing.count_tokens_per_expert(found.routing.topk_expert_ids, NUM_EXPERTS)
            dist.all_reduce(load)
            history.append(load.tolist())
            bias.copy_(routing.update_bias(bias, load, speed=0.02))
    return history[0], history[-1]


def test_a_bias_balances_the_load_of_a_group(ranks: Ranks) -> None:
    (before, after), other = ranks(2).run(balanced_by_bias, 40)
    assert (before, after) == other
    assert sum(before) == sum(after) == 2 * 64 * TOP_K
    assert max(after) - min(after) < (max(before) - min(before)) / 2
