"""One mixture-of-experts layer, sharded over two ranks of this machine, forward and backward.

    python examples/moe_layer.py
    python examples/moe_layer.py --num-experts 64

Each rank holds half of the experts and has tokens of its own, a different number on each. The example prints where the
tokens went, and shows that sharding the experts changed no bit: a single rank with all experts computes the same.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import crossdock as cd
from crossdock.nn import GroupedExperts, MoE
from crossdock.routing import softmax_topk
from crossdock.testing import run_ranks

NUM_RANKS, TOKENS_OF_RANK = 2, (10, 6)
HIDDEN_DIM, FFN_DIM, TOP_K = 64, 128, 2


@dataclass(frozen=True)
class Result:
    """What one forward and backward gave."""

    out: Tensor
    x_grad: Tensor
    expert_grad: Tensor
    tokens_per_expert: list[int]
    sent_bytes: int


def tokens_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS_OF_RANK[rank], HIDDEN_DIM, generator=generator).requires_grad_()


def open_dispatcher(num_experts: int) -> cd.TokenDispatcher:
    config = cd.DispatcherConfig(
        num_experts=num_experts,
        top_k=TOP_K,
        hidden_dim=HIDDEN_DIM,
        dtype=torch.float32,
        num_max_tokens_per_rank=sum(TOKENS_OF_RANK),
        reduction="exact",  # the same bits for every number of ranks; "fast" sends fewer bytes
    )
    return cd.TokenDispatcher(config)  # over all ranks of torch.distributed if there are any, else this process alone


def build_layer(dispatcher: cd.TokenDispatcher) -> MoE:
    torch.manual_seed(0)
    router = nn.Linear(HIDDEN_DIM, dispatcher.config.num_experts, bias=False)  # the same on every rank
    experts = GroupedExperts(
        dispatcher.num_local_experts,
        HIDDEN_DIM,
        FFN_DIM,
        seed=0,  # with the id below: expert 5 starts with the same weights wherever it lives
        first_expert_id=dispatcher.ep_rank * dispatcher.num_local_experts,
    )
    return MoE(dispatcher.layer("moe"), router, experts, routing=functools.partial(softmax_topk, top_k=TOP_K))


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "no loss has come to it"
    return tensor.grad


def sharded(rank: int, num_experts: int) -> Result:
    """On each of the two ranks: its own tokens, half of the experts."""
    x = tokens_of(rank)
    with open_dispatcher(num_experts) as dispatcher:
        layer = build_layer(dispatcher)
        found = layer(x, return_routing=True)
        found.out.square().sum().backward()
        counts, sent = found.tokens_per_expert.tolist(), dispatcher.stats().sent_bytes
    return Result(found.out.detach(), grad_of(x), grad_of(layer.get_parameter("experts.down_proj")), counts, sent)


def alone(num_experts: int) -> Result:
    """On a single rank: the tokens of both, all experts. This is what `MoE` does inside, spelled out."""
    parts = [tokens_of(rank) for rank in range(NUM_RANKS)]
    with open_dispatcher(num_experts) as dispatcher:
        layer = build_layer(dispatcher)
        # Routed part by part, because a dense product may round differently in a larger batch.
        routings = [layer.routing(layer.router(part)) for part in parts]
        scores = torch.cat([routing.topk_scores for routing in routings])
        expert_ids = torch.cat([routing.topk_expert_ids for routing in routings])

        routed = dispatcher.dispatch(torch.cat(parts), scores, expert_ids)
        rows = layer.experts(routed.rows, routed.expert_offsets)
        out = dispatcher.combine(rows, routed.handle)

        out.square().sum().backward()
        counts, sent = routed.tokens_per_expert.tolist(), dispatcher.stats().sent_bytes
    x_grad = torch.cat([grad_of(part) for part in parts])
    return Result(out.detach(), x_grad, grad_of(layer.get_parameter("experts.down_proj")), counts, sent)


def same_bits(name: str, parts: list[Tensor], whole: Tensor) -> None:
    verdict = "same bits" if torch.equal(torch.cat(parts), whole) else "DIFFERENT"
    print(f"  {name:<28} {verdict}")
    if verdict != "same bits":
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-experts", type=int, default=8, help="over both ranks together; an even number")
    num_experts = parser.parse_args().num_experts
    if num_experts < TOP_K or num_experts % NUM_RANKS:
        parser.error(f"--num-experts must be even and at least {TOP_K}, got {num_experts}")

    ranks = run_ranks(sharded, NUM_RANKS, num_experts)
    for rank, result in enumerate(ranks):
        print(f"rank {rank}: {TOKENS_OF_RANK[rank]} tokens, {result.sent_bytes} bytes sent")
        print(f"  rows of its {len(result.tokens_per_expert)} experts: {result.tokens_per_expert}")

    single = alone(num_experts)
    print("two ranks against one rank with all experts:")
    same_bits("output", [result.out for result in ranks], single.out)
    same_bits("gradient of the tokens", [result.x_grad for result in ranks], single.x_grad)
    same_bits("gradient of expert weights", [result.expert_grad for result in ranks], single.expert_grad)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as the started ranks have: a CPU product's bits depend on the number of threads
    main()
