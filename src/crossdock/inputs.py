"""Refusing what a call cannot use, before any communication, in one sentence with the numbers in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from .errors import InvalidInput
from .types import Dispatched, DispatcherConfig, DispatchHandle

ID_DTYPES = (torch.int32, torch.int64)
SCORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dispatch(
    config: DispatcherConfig,
    device: torch.device | None,
    x: Tensor,
    topk_scores: Tensor,
    topk_expert_ids: Tensor,
    num_tokens_per_rank: int | None,
) -> None:
    """Shapes, dtypes, devices and bounds of one dispatch; nothing that would read a tensor's values."""
    for name, tensor in (("x", x), ("topk_scores", topk_scores), ("topk_expert_ids", topk_expert_ids)):
        check_is_strided(name, tensor)
    if x.dim() != 2 or x.shape[1] != config.hidden_dim:
        raise InvalidInput(f"x must be [num_tokens, hidden_dim={config.hidden_dim}], got {list(x.shape)}")
    if x.dtype != config.dtype:
        raise InvalidInput(f"x must be {config.dtype}, the dtype of this dispatcher, got {x.dtype}")
    for name, tensor in (("topk_scores", topk_scores), ("topk_expert_ids", topk_expert_ids)):
        if tuple(tensor.shape) != (x.shape[0], config.top_k):
            raise InvalidInput(
                f"{name} must be [num_tokens={x.shape[0]}, top_k={config.top_k}], got {list(tensor.shape)}"
            )
        if tensor.device != x.device:
            raise InvalidInput(f"{name} must be on the device of x ({x.device}), got {tensor.device}")
    if topk_expert_ids.dtype not in ID_DTYPES:
        raise InvalidInput(f"topk_expert_ids must be int32 or int64, got {topk_expert_ids.dtype}")
    if device is not None and x.device != device:
        raise InvalidInput(f"x must be on {device}, where this dispatcher was opened, got {x.device}")
    check_token_bounds(config, x.shape[0], num_tokens_per_rank)


def check_is_strided(name: str, tensor: Tensor) -> None:
    """A plain tensor: neither sparse nor nested."""
    if not isinstance(tensor, Tensor):
        raise InvalidInput(f"{name} must be a tensor, got {type(tensor).__name__}{_what_to_pass(tensor, 'rows')}")
    if tensor.layout != torch.strided:
        raise InvalidInput(f"{name} must be a strided tensor, got {tensor.layout}")


def check_is_handle(call: str, handle: DispatchHandle) -> None:
    """What a dispatch has returned as its `handle`, and not all of it."""
    if not isinstance(handle, DispatchHandle):
        told = f"{type(handle).__name__}{_what_to_pass(handle, 'handle')}"
        raise InvalidInput(f"{call} needs the handle of a dispatch, got {told}")


def _what_to_pass(given: object, wanted: str) -> str:
    return f": pass its .{wanted}" if isinstance(given, Dispatched) else ""


def check_before_casting(
    config: DispatcherConfig, x: Tensor, topk_scores: Tensor, topk_expert_ids: Tensor, num_tokens_per_rank: int | None
) -> None:
    """What the operator cannot see: it takes float32 scores, and -1 for a bound that was left out."""
    for name, tensor in (("x", x), ("topk_scores", topk_scores), ("topk_expert_ids", topk_expert_ids)):
        check_is_strided(name, tensor)
    refuse_forward_mode(x, topk_scores)
    if isinstance(num_tokens_per_rank, bool) or not isinstance(num_tokens_per_rank, (int, torch.SymInt, type(None))):
        raise InvalidInput(f"num_tokens_per_rank must be an integer or None, got {num_tokens_per_rank!r}")
    if topk_scores.dtype not in SCORE_DTYPES:
        raise InvalidInput(
            f"topk_scores must be float32 (or a float dtype that is cast to it), got {topk_scores.dtype}"
        )
    if num_tokens_per_rank is not None and num_tokens_per_rank < 0:
        limit = config.num_max_tokens_per_rank
        raise InvalidInput(
            f"num_tokens_per_rank ({num_tokens_per_rank}) must lie in 0..num_max_tokens_per_rank ({limit})"
        )


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Forward-mode derivatives would silently be zero: there is no rule for them."""
    if torch.compiler.is_compiling():
        return
    inside_transform = torch._C._functorch.peek_interpreter_stack() is not None
    if inside_transform or (fwAD._current_level >= 0 and any(fwAD.unpack_dual(t).tangent is not None for t in tensors)):
        raise InvalidInput(
            "dispatch and combine have no forward-mode derivative and do not run under torch.func transforms"
        )


def check_token_bounds(config: DispatcherConfig, num_tokens: int, num_tokens_per_rank: int | None) -> None:
    """`num_tokens <= num_tokens_per_rank <= num_max_tokens_per_rank`."""
    limit = config.num_max_tokens_per_rank
    if num_tokens_per_rank is not None:
        if not 0 <= num_tokens_per_rank <= limit:
            raise InvalidInput(
                f"num_tokens_per_rank ({num_tokens_per_rank}) must lie in 0..num_max_tokens_per_rank ({limit})"
            )
        if num_tokens > num_tokens_per_rank:
            raise InvalidInput(
                f"x has {num_tokens} tokens, above num_tokens_per_rank ({num_tokens_per_rank}) of this call"
            )
    if num_tokens > limit:
        raise InvalidInput(f"x has {num_tokens} tokens, above num_max_tokens_per_rank ({limit})")


def check_expert_ids(config: DispatcherConfig, topk_expert_ids: Tensor) -> None:
    """Every id in -1..num_experts-1. On a GPU reading them would wait for the device: transports count there."""
    if topk_expert_ids.is_cuda:
        return
    outside = (topk_expert_ids < -1) | (topk_expert_ids >= config.num_experts)
    if bool(outside.any()):
        token, slot = outside.nonzero()[0].tolist()
        raise InvalidInput(
            f"topk_expert_ids[{token}, {slot}] is {int(topk_expert_ids[token, slot])}, outside"
            f" -1..{config.num_experts - 1} ({int(outside.sum())} such ids)"
        )


def refuse_bad_ids(num_bad_by_rank: Sequence[int], num_experts: int) -> None:
    """What a device counted of ids outside -1..num_experts-1, where no host looked at them before."""
    if any(num_bad_by_rank):
        told = ", ".join(f"{num} on rank {rank}" for rank, num in enumerate(num_bad_by_rank) if num)
        raise InvalidInput(f"topk_expert_ids has ids outside -1..{num_experts - 1}: {told}; no row was moved")


def check_distinct_experts(config: DispatcherConfig, topk_expert_ids: Tensor) -> None:
    """What `distinct_experts=True` declares; on a GPU the device counts instead (see `ledger.py`)."""
    if not config.distinct_experts or topk_expert_ids.is_cuda:
        return
    ids = topk_expert_ids.sort(dim=1).values
    repeats = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(1)
    if bool(repeats.any()):
        token = int(repeats.nonzero()[0])
        raise InvalidInput(
            f"topk_expert_ids[{token}] is {topk_expert_ids[token].tolist()}, which names an expert twice, and"
            f" distinct_experts=True declares that no token does ({int(repeats.sum())} such tokens)"
        )


def refuse_late(num_bad: int, num_repeats: int, num_experts: int) -> None:
    """What a device counted in sync-free dispatches that have long gone on."""
    if num_bad:
        raise InvalidInput(
            f"topk_expert_ids had {num_bad} ids outside -1..{num_experts - 1} in earlier sync-free dispatches; they"
            " acted as -1"
        )
    if num_repeats:
        raise InvalidInput(
            f"{num_repeats} tokens of earlier dispatches named an expert twice, and distinct_experts=True declares that"
            " no token does"
        )


def check_local_counts(config: DispatcherConfig, topk_expert_ids: Tensor, counts: Tensor) -> None:
    """The caller's histogram of its own ids `[num_experts]` against the ids; on a GPU only its shape."""
    check_is_strided("num_local_tokens_per_expert", counts)
    if counts.dtype not in ID_DTYPES:
        raise InvalidInput(f"num_local_tokens_per_expert must be int32 or int64, got {counts.dtype}")
    if tuple(counts.shape) != (config.num_experts,):
        raise InvalidInput(
            f"num_local_tokens_per_expert must be [num_experts={config.num_experts}], got {list(counts.shape)}"
        )
    if topk_expert_ids.is_cuda:
        return
    named = topk_expert_ids[topk_expert_ids >= 0].reshape(-1).to(torch.int64)
    actual = torch.bincount(named, minlength=config.num_experts)
    wrong = (actual != counts.to(actual.dtype)).nonzero().flatten().tolist()
    if wrong:
        expert = wrong[0]
        raise InvalidInput(
            f"num_local_tokens_per_expert[{expert}] is {int(counts[expert])}, but topk_expert_ids names expert {expert}"
            f" {int(actual[expert])} times ({len(wrong)} experts differ)"
        )


def check_combine(config: DispatcherConfig, key: str, rows: Tensor, handle: DispatchHandle, apply_scores: bool) -> None:
    """A handle of this dispatcher and rows that fit it."""
    check_is_handle("combine", handle)
    check_is_strided("rows", rows)
    refuse_forward_mode(rows, handle.topk_scores)
    if not isinstance(apply_scores, bool):
        raise InvalidInput(f"apply_scores must be True or False, got {apply_scores!r}")
    if handle.dispatcher_key != key:
        raise InvalidInput(f"this handle (layer {handle.layer!r}) belongs to another dispatcher")
    if rows.dim() != 2 or tuple(rows.shape) != (handle.num_rows, config.hidden_dim):
        raise InvalidInput(
            f"rows must be [num_rows={handle.num_rows}, hidden_dim={config.hidden_dim}] as dispatched,"
            f" got {list(rows.shape)}"
        )
    if rows.dtype != config.dtype:
        raise InvalidInput(f"rows must be {config.dtype}, the dtype of this dispatcher, got {rows.dtype}")
    if rows.device != handle.row_scores.device:
        raise InvalidInput(f"rows must be on {handle.row_scores.device}, where they were dispatched, got {rows.device}")
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _refuse_of_inference_mode(rows if apply_scores else None, handle)


def _refuse_of_inference_mode(saved_rows: Tensor | None, handle: DispatchHandle) -> None:
    """What autograd cannot save for the backward of a combine."""
    if handle.row_scores.is_inference():
        raise InvalidInput(
            f"this handle (layer {handle.layer!r}) was made in inference mode, and a combine in grad mode keeps it for"
            " its backward: dispatch under torch.no_grad(), or combine outside of grad mode"
        )
    if saved_rows is not None and saved_rows.is_inference():
        raise InvalidInput(
            "rows were made in inference mode, and a combine in grad mode with apply_scores=True keeps them for its"
            " backward: pass a clone made outside of inference mode, or combine outside of grad mode"
        )
