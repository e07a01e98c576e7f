"""Ranks with different numbers of tokens against the same tokens padded to equal numbers: the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from crossdock import DispatcherConfig, TokenDispatcher
from crossdock.nn import GroupedExperts
from crossdock.routing import softmax_topk

from .claims import Claim, Comparison, on_ranks
from .parallel import device_of_rank
from .settings import Job

# Token counts and lengths on which other dispatchers aborted or mixed up tokens (NeMo Automodel, issue 3641).
COUNTS = ((8, 3), (6, 6), (5, 3), (13, 7))
LENGTHS = (71, 47, 97, 60, 76, 46, 44, 72, 41, 47)
_PADDED_TO_MULTIPLE_OF = 4
_RATE = 0.5


@dataclass(frozen=True, eq=False)
class Tokens:
    """One rank's input to an MoE layer's dispatch, and the gradient that comes back.

    Attributes:
        x: `[T, hidden_dim]`.
        topk_scores: `[T, top_k]`.
        topk_expert_ids: `[T, top_k]`.
        grad_out: `[T, hidden_dim]`.
    """

    x: Tensor
    topk_scores: Tensor
    topk_expert_ids: Tensor
    grad_out: Tensor

    def padded(self, num_tokens: int) -> Tokens:
        """With padding tokens behind it that go to no expert; whatever reads one makes a NaN that shows."""
        more = num_tokens - len(self.x)
        return Tokens(
            pad(self.x, (0, 0, 0, more), value=torch.nan),
            pad(self.topk_scores, (0, 0, 0, more)),
            pad(self.topk_expert_ids, (0, 0, 0, more), value=-1),
            pad(self.grad_out, (0, 0, 0, more), value=torch.nan),
        )


def prove_ragged(rank: int, job: Job) -> list[Claim]:
    """Single layers with unequal counts, then a training whose lengths change at each step and from rank to rank."""
    num_ranks, device = dist.get_world_size(), device_of_rank()
    counts, lengths = Comparison(), Comparison()
    config = job.sizes.dispatcher_config(job.num_sequences, "exact")
    with TokenDispatcher(config, backend=job.backend) as dispatcher:
        for number, by_rank in enumerate(COUNTS):
            for experts in (None, _experts(job, dispatcher)):
                here = [by_rank[r % len(by_rank)] for r in range(num_ranks)]
                _compare_step(counts, dispatcher, (experts, experts), here, 7000 * job.seed + number)
        both = _experts(job, dispatcher), _experts(job, dispatcher)
        for step in range(len(LENGTHS)):
            here = [LENGTHS[(step + r) % len(LENGTHS)] for r in range(num_ranks)]
            _compare_step(lengths, dispatcher, both, here, 7000 * job.seed + 100 + step)
            _descend(*both)
    where, padding = on_ranks(num_ranks, device), "the equal run whose padding tokens route to -1, forward and backward"
    return [
        counts.claim(
            "ranks may bring any number of tokens: " + ", ".join(" & ".join(map(str, pair)) for pair in COUNTS),
            f"against {padding}; identity and SwiGLU experts on {where}",
        ),
        lengths.claim(
            "lengths may change at every step: " + ", ".join(map(str, LENGTHS)),
            f"{len(LENGTHS)} training steps against {padding}; the next rank one length ahead, {where}",
        ),
    ]


def _experts(job: Job, dispatcher: TokenDispatcher) -> GroupedExperts:
    first = dispatcher.ep_rank * dispatcher.num_local_experts
    sizes = job.sizes
    return GroupedExperts(
        dispatcher.num_local_experts, sizes.hidden_dim, sizes.ffn_dim, seed=job.seed, first_expert_id=first
    ).to(device_of_rank())


def _compare_step(
    comparison: Comparison,
    dispatcher: TokenDispatcher,
    experts: tuple[GroupedExperts | None, GroupedExperts | None],
    counts: list[int],
    seed: int,
) -> None:
    """Run the tokens as they are, then padded, and compare all that comes of it on this rank."""
    mine = counts[dispatcher.ep_rank]
    tokens = draw_tokens(dispatcher.config, mine, seed + 31 * dispatcher.ep_rank)
    equal = -(-max(counts) // _PADDED_TO_MULTIPLE_OF) * _PADDED_TO_MULTIPLE_OF
    ragged = _forward_and_backward(dispatcher, experts[0], tokens, None)
    padded = _forward_and_backward(dispatcher, experts[1], tokens.padded(equal), equal)
    where = f"counts {counts}:"
    for name in ("out", "dx", "dscores"):
        comparison.add(f"{where} {name}", ragged.pop(name), padded[name][:mine])
        padding = padded.pop(name)[mine:]
        comparison.add(f"{where} {name} of padding", padding, torch.zeros_like(padding))
    comparison.add_all(where, ragged, padded)


def draw_tokens(config: DispatcherConfig, num_tokens: int, seed: int) -> Tokens:
    """Random tokens that are routed as a softmax router would."""
    generator, device = torch.Generator().manual_seed(seed), device_of_rank()
    x, grad_out = torch.randn(2, num_tokens, config.hidden_dim, generator=generator).unbind()
    routing = softmax_topk(torch.randn(num_tokens, config.num_experts, generator=generator), config.top_k)
    return Tokens(x.to(device), routing.topk_scores.to(device), routing.topk_expert_ids.to(device), grad_out.to(device))


def _forward_and_backward(
    dispatcher: TokenDispatcher, experts: GroupedExperts | None, tokens: Tokens, num_tokens_per_rank: int | None
) -> dict[str, Tensor]:
    """Rows, outputs and all gradients; `experts=None` is the identity. The experts keep their gradients."""
    x, scores = tokens.x.clone().requires_grad_(), tokens.topk_scores.clone().requires_grad_()
    layer = dispatcher.layer("ragged")
    routed = layer.dispatch(x, scores, tokens.topk_expert_ids, num_tokens_per_rank=num_tokens_per_rank)
    rows = routed.rows if experts is None else experts(routed.rows, routed.expert_offsets)
    out = layer.combine(rows, routed.handle)
    parameters = {} if experts is None else dict(experts.named_parameters())
    inputs = {"x": x, "scores": scores, "rows": routed.rows, **parameters}
    grads = torch.autograd.grad(out, list(inputs.values()), tokens.grad_out)
    for parameter, grad in zip(parameters.values(), grads[3:], strict=True):
        parameter.grad = grad
    gradients = {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}
    return {"out": out.detach(), "rows": routed.rows.detach(), **gradients}


@torch.no_grad()
def _descend(*models: GroupedExperts) -> None:
    """One step of plain gradient descent on each."""
    for model in models:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=_RATE / max(LENGTHS))
