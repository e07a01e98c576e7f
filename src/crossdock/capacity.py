"""Where `num_max_tokens_per_rank` comes from: the trainer's batch or the serving scheduler's limit.

    for_pretraining(local_batch_size=2, seq_len=4097, context_parallel_degree=2, tensor_parallel_degree=4)
        -> 2 * ceil(4097 / 8) = 1026
    for_vllm(max_num_batched_tokens=8192, tensor_parallel_degree=8).num_max_tokens_per_rank
        -> ceil(8192 / 8) = 1024

The formulas are those of torchtitan's token dispatchers (pytorch/torchtitan, pull request 3970).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import ConfigError
from .types import check_positive_int


@dataclass(frozen=True, kw_only=True)
class ServingCapacity:
    """What a scheduler's limit means for a dispatcher.

    Attributes:
        num_max_tokens_per_rank: tokens, for `DispatcherConfig`.
        capture_sizes: the graph capture sizes (batched tokens) that the limit allows, in the order given.
        dropped_capture_sizes: those above the limit, in the order given: no batch can ever have that many tokens.
    """

    num_max_tokens_per_rank: int
    capture_sizes: tuple[int, ...] = ()
    dropped_capture_sizes: tuple[int, ...] = ()


def for_pretraining(
    local_batch_size: int,
    seq_len: int,
    context_parallel_degree: int = 1,
    tensor_parallel_degree: int = 1,
) -> int:
    """The most tokens one rank brings to a dispatch in pretraining.

    Args:
        local_batch_size: sequences of one micro-batch on one data-parallel rank.
        seq_len: tokens of a sequence.
        context_parallel_degree: ranks that share a sequence by context parallelism.
        tensor_parallel_degree: ranks that share it further by sequence sharding in tensor parallelism.

    Returns:
        `local_batch_size * ceil(seq_len / (context_parallel_degree * tensor_parallel_degree))`; the ceiling keeps the
        rank with the longest shard within bounds when the sequence does not divide.

    Raises:
        ConfigError: an argument that is not a positive integer.
    """
    _check_positive(local_batch_size=local_batch_size, seq_len=seq_len)
    return local_batch_size * _ceil_div(seq_len, _num_shards(context_parallel_degree, tensor_parallel_degree))


def for_vllm(
    max_num_batched_tokens: int,
    context_parallel_degree: int = 1,
    tensor_parallel_degree: int = 1,
    capture_sizes: Iterable[int] = (),
) -> ServingCapacity:
    """The most tokens one rank brings to a dispatch in a vLLM server, and the graph sizes it may capture.

    The scheduler's `max_num_batched_tokens` bounds every batch, so persistent storage is sized from it. A worker that
    only decodes should set `max_num_batched_tokens` from its decode workload (about the number of concurrent requests,
    times one plus the speculative tokens of each) rather than keep the default, which is meant for prefill and would
    size the storage many times too large.

    Args:
        max_num_batched_tokens: the scheduler's limit, in tokens of a batch.
        context_parallel_degree: ranks that share a batch's tokens by context parallelism.
        tensor_parallel_degree: ranks that share them further in tensor parallelism.
        capture_sizes: CUDA graph sizes in batched tokens; those above `max_num_batched_tokens` are filtered out.

    Returns:
        A record with `ceil(max_num_batched_tokens / (context_parallel_degree * tensor_parallel_degree))` tokens, the
        capture sizes kept and those dropped.

    Raises:
        ConfigError: an argument that is not a positive integer.
    """
    _check_positive(max_num_batched_tokens=max_num_batched_tokens)
    sizes = tuple(capture_sizes)
    for size in sizes:
        _check_positive(capture_size=size)
    shards = _num_shards(context_parallel_degree, tensor_parallel_degree)
    return ServingCapacity(
        num_max_tokens_per_rank=_ceil_div(max_num_batched_tokens, shards),
        capture_sizes=tuple(size for size in sizes if size <= max_num_batched_tokens),
        dropped_capture_sizes=tuple(size for size in sizes if size > max_num_batched_tokens),
    )


def resolve(configured: int | None, required: int) -> int:
    """The `num_max_tokens_per_rank` to use: the explicit setting if there is one, checked against what is needed.

    Args:
        configured: the user's setting in tokens; None takes `required`.
        required: tokens, from `for_pretraining` or `for_vllm`.

    Raises:
        ConfigError: `configured` is not a positive integer, or smaller than `required`.
    """
    _check_positive(required=required)
    if configured is None:
        return required
    _check_positive(num_max_tokens_per_rank=configured)
    if configured < required:
        raise ConfigError(
            f"num_max_tokens_per_rank ({configured}) is smaller than the {required} tokens that this workload brings"
            f" to a rank; raise it to at least {required}, or leave it out"
        )
    return configured


def _num_shards(context_parallel_degree: int, tensor_parallel_degree: int) -> int:
    _check_positive(
        context_parallel_degree=context_parallel_degree,
        tensor_parallel_degree=tensor_parallel_degree,
    )
    return context_parallel_degree * tensor_parallel_degree


def _check_positive(**values: object) -> None:
    for name, value in values.items():
        check_positive_int(name, value)


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
