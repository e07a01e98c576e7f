"""Routers: from logits `[T, E]` to the scores and expert ids that `dispatch` takes.

Every router works in float32, is differentiable in the logits through the scores, and is deterministic: of equal
candidates the lower expert id wins, on every device (`torch.topk` promises no order, so a stable sort chooses).

A logit that is NaN is never hidden: it sorts before every number, so its slot, and with renormalisation or a softmax
the whole token, gets a NaN score and the loss shows it. Ids stay distinct and within [0, E), and other tokens keep
their bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ConfigError, InvalidInput
from .permute import count_by_expert


@dataclass(frozen=True, eq=False)
class Routing:
    """What a router decided for T tokens.

    Attributes:
        topk_scores: `[T, top_k]` float32, differentiable.
        topk_expert_ids: `[T, top_k]` int64, global ids; -1 = no expert in this slot.
    """

    topk_scores: Tensor
    topk_expert_ids: Tensor


def softmax_topk(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    bias: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Routing:
    """Softmax over all experts, then the `top_k` largest logits.

        >>> softmax_topk(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), 2).topk_expert_ids
        tensor([[1, 2]])

    Args:
        logits: `[T, E]`, any floating dtype.
        top_k: slots of a token, at most E.
        renormalize: whether the scores of a token are divided by their sum.
        bias: `[E]`, added to the softmax for the selection only (see `update_bias`); scores stay unbiased.
        token_mask: `[T]` bool, False for padding tokens, whose ids become -1 and scores 0.

    Raises:
        ConfigError: `top_k` outside [1, E].
        InvalidInput: shapes or dtypes that do not fit.
    """
    logits = _checked(logits, top_k, bias, token_mask)
    probabilities = torch.softmax(logits, dim=-1)
    # Without a bias the logits decide: a softmax underflows, and would tie what the logits tell apart.
    preference = logits if bias is None else probabilities + bias
    return _routing(probabilities, _choose(preference, top_k), renormalize, 1.0, token_mask)


def sigmoid_topk(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Routing:
    """A sigmoid for each expert, then the `top_k` largest (DeepSeek-V3 without its groups).

    Args:
        logits: `[T, E]`, any floating dtype.
        top_k: slots of a token, at most E.
        renormalize: whether the scores of a token are divided by their sum.
        scale: factor on the scores, after renormalisation.
        bias: `[E]`, added for the selection only (see `update_bias`); scores stay unbiased.
        token_mask: `[T]` bool, False for padding tokens, whose ids become -1 and scores 0.

    Raises:
        ConfigError: `top_k` outside [1, E].
        InvalidInput: shapes or dtypes that do not fit.
    """
    affinity = torch.sigmoid(_checked(logits, top_k, bias, token_mask))
    preference = affinity if bias is None else affinity + bias
    return _routing(affinity, _choose(preference, top_k), renormalize, scale, token_mask)


def group_limited_topk(
    logits: Tensor,
    top_k: int,
    *,
    num_groups: int,
    num_limited_groups: int,
    renormalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Routing:
    """Sigmoid top-k within each token's best groups of experts (DeepSeek-V3).

    Expert e belongs to group `e // (E / num_groups)`. A group's score is the sum of its best two (biased) affinities;
    a token's experts come from its `num_limited_groups` best groups. With groups laid out as nodes, a token then
    reaches at most that many nodes.

    Args:
        logits: `[T, E]`, any floating dtype.
        top_k: slots of a token, at most the experts of `num_limited_groups` groups.
        num_groups: groups; E is a multiple of it.
        num_limited_groups: groups that a token may use.
        renormalize: whether the scores of a token are divided by their sum.
        scale: factor on the scores, after renormalisation.
        bias: `[E]`, added for the selection only (see `update_bias`); scores stay unbiased.
        token_mask: `[T]` bool, False for padding tokens, whose ids become -1 and scores 0.

    Raises:
        ConfigError: numbers of groups or slots that cannot work.
        InvalidInput: shapes or dtypes that do not fit.
    """
    affinity = torch.sigmoid(_checked(logits, top_k, bias, token_mask))
    _check_groups(affinity.shape[1], top_k, num_groups, num_limited_groups)
    preference = (affinity if bias is None else affinity + bias).detach()
    grouped = preference.reshape(logits.shape[0], num_groups, logits.shape[1] // num_groups)
    best_two = _sorted(grouped).values[..., :2].sum(-1)
    allowed = torch.zeros_like(best_two, dtype=torch.bool).scatter(1, _choose(best_two, num_limited_groups), True)
    # -inf and not 0: a bias can make every allowed preference negative.
    limited = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
    return _routing(affinity, _choose(limited, top_k), renormalize, scale, token_mask)


def static_balanced(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    *,
    device: torch.device | str | None = None,
    topk_scores: Tensor | None = None,
) -> Routing:
    """The balanced routing of benchmarks: slot k of token t goes to expert `(t * top_k + k) mod num_experts`.

    Args:
        num_tokens: T, may be 0.
        top_k: slots of a token.
        num_experts: E.
        device: where the result lives; that of `topk_scores` if these are given.
        topk_scores: `[T, top_k]` to pass through as float32; None gives every slot `1 / top_k`.

    Raises:
        ConfigError: a number that is negative or, but for `num_tokens`, 0.
        InvalidInput: `topk_scores` of another shape.
    """
    if num_tokens < 0 or top_k <= 0 or num_experts <= 0:
        raise ConfigError(
            f"num_tokens ({num_tokens}) must not be negative; top_k ({top_k}) and num_experts ({num_experts})"
            " must be positive"
        )
    if topk_scores is None:
        topk_scores = torch.full((num_tokens, top_k), 1.0 / top_k, device=device)
    elif topk_scores.shape != (num_tokens, top_k):
        raise InvalidInput(f"topk_scores must be [{num_tokens}, {top_k}], got {list(topk_scores.shape)}")
    slot = torch.arange(num_tokens * top_k, device=topk_scores.device).reshape(num_tokens, top_k)
    return Routing(topk_scores.float(), slot % num_experts)


def count_tokens_per_expert(topk_expert_ids: Tensor, num_experts: int) -> Tensor:
    """How many slots of this rank's tokens name each expert: `[num_experts]` int64; slots with id -1 count nowhere.

    Works without a host synchronisation. Sum it over the group before `update_bias`.
    """
    return count_by_expert(topk_expert_ids.long(), num_experts)


def update_bias(bias: Tensor, tokens_per_expert: Tensor, speed: float) -> Tensor:
    """The next selection bias of balancing without an auxiliary loss: `bias + speed * sign(mean load - load)`.

    The rule is DeepSeek-V3's (arXiv 2408.15664). Call it once per optimiser step, and copy the result into the buffer
    that the router reads. Loads are compared as integers, so ranks with the same counts get the same bits.

        >>> update_bias(torch.zeros(3), torch.tensor([4, 2, 0]), speed=0.5)
        tensor([-0.5000,  0.0000,  0.5000])

    Args:
        bias: `[E]` float32.
        tokens_per_expert: `[E]` integer: every expert's load, already summed over the group by the caller.
        speed: how far the bias moves in one step (0.001 in DeepSeek-V3).

    Raises:
        InvalidInput: shapes that differ, or counts that are not integers.
    """
    if bias.dim() != 1 or bias.shape != tokens_per_expert.shape:
        raise InvalidInput(
            f"bias {list(bias.shape)} and tokens_per_expert {list(tokens_per_expert.shape)} must both be [num_experts]"
        )
    if tokens_per_expert.is_floating_point():
        raise InvalidInput(f"tokens_per_expert must hold integers, got {tokens_per_expert.dtype}")
    load = tokens_per_expert.long()
    return bias.detach() + speed * torch.sign(load.sum() - load * load.numel()).to(bias.dtype)


def _routing(affinity: Tensor, ids: Tensor, renormalize: bool, scale: float, token_mask: Tensor | None) -> Routing:
    """Scores of the chosen experts `ids [T, top_k]` from `affinity [T, E]`, and the padding tokens taken out."""
    scores = affinity.gather(1, ids)
    if renormalize:
        # Sigmoids can all underflow to 0: such a token keeps zeros, and no 0 / 0.
        scores = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    if scale != 1.0:
        scores = scores * scale
    if token_mask is not None:
        padding = ~token_mask.unsqueeze(-1)
        scores, ids = scores.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)
    return Routing(scores, ids)


def _choose(preference: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row, largest first, the lower index first among equals."""
    return _sorted(preference.detach()).indices[..., :count]


def _sorted(values: Tensor) -> torch.return_types.sort:
    return torch.sort(values, dim=-1, descending=True, stable=True)


def _checked(logits: Tensor, top_k: int, bias: Tensor | None, token_mask: Tensor | None) -> Tensor:
    """The logits in float32; those of padding tokens are 0, so that garbage there reaches no gradient."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InvalidInput(f"logits must be floating point [T, E], got {logits.dtype} {list(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        raise ConfigError(f"top_k ({top_k}) must be from 1 to the number of experts ({logits.shape[1]})")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise InvalidInput(f"bias must be [{logits.shape[1]}], got {list(bias.shape)}")
    if token_mask is None:
        return logits.float()
    if token_mask.dtype != torch.bool or token_mask.shape != logits.shape[:1]:
        raise InvalidInput(
            f"token_mask must be bool [{logits.shape[0]}], got {token_mask.dtype} {list(token_mask.shape)}"
        )
    return logits.float().masked_fill(~token_mask.unsqueeze(-1), 0.0)


def _check_groups(num_experts: int, top_k: int, num_groups: int, num_limited_groups: int) -> None:
    if num_groups < 1 or num_experts % num_groups:
        raise ConfigError(f"num_groups ({num_groups}) must divide the number of experts ({num_experts})")
    if not 1 <= num_limited_groups <= num_groups:
        raise ConfigError(f"num_limited_groups ({num_limited_groups}) must be from 1 to num_groups ({num_groups})")
    reachable = num_experts // num_groups * num_limited_groups
    if top_k > reachable:
        raise ConfigError(
            f"top_k ({top_k}) must not exceed the {reachable} experts of {num_limited_groups} groups;"
            " raise num_limited_groups or lower top_k"
        )
