"""Capacities: the formulas, the capture sizes, and the words of every refusal."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock import capacity
from crossdock.errors import ConfigError

sizes = st.integers(1, 100_000)
degrees = st.integers(1, 64)


def test_pretraining_rounds_the_sequence_shard_up() -> None:
    assert capacity.for_pretraining(2, 4096) == 8192
    assert capacity.for_pretraining(2, 4097, context_parallel_degree=2, tensor_parallel_degree=4) == 2 * 513
    assert capacity.for_pretraining(3, 1, 8, 8) == 3


@given(batch=st.integers(1, 64), seq_len=sizes, cp=degrees, tp=degrees)
def test_pretraining_holds_the_longest_shard_and_no_more(batch: int, seq_len: int, cp: int, tp: int) -> None:
    rows = capacity.for_pretraining(batch, seq_len, cp, tp)
    longest = len(range(0, seq_len, cp * tp))  # tokens dealt out one by one: shard 0 gets most
    assert rows == batch * longest
    assert rows * cp * tp >= batch * seq_len


def test_vllm_rounds_up_and_filters_capture_sizes() -> None:
    found = capacity.for_vllm(1000, 2, 3, capture_sizes=[1, 512, 1000, 1001, 8])
    assert found.num_max_tokens_per_rank == 167
    assert found.capture_sizes == (1, 512, 1000, 8)
    assert found.dropped_capture_sizes == (1001,)


@given(limit=sizes, cp=degrees, tp=degrees, capture=st.lists(sizes, max_size=20))
def test_vllm_every_kept_graph_fits(limit: int, cp: int, tp: int, capture: list[int]) -> None:
    found = capacity.for_vllm(limit, cp, tp, capture)
    assert sorted(found.capture_sizes + found.dropped_capture_sizes) == sorted(capture)
    assert all(size <= found.num_max_tokens_per_rank * cp * tp for size in found.capture_sizes)
    assert all(size > limit for size in found.dropped_capture_sizes)
    assert found.num_max_tokens_per_rank * cp * tp - limit < cp * tp


def test_serving_capacity_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        capacity.for_vllm(8).num_max_tokens_per_rank = 9  # type: ignore[misc]


def test_decode_only_workers_are_told_what_to_set() -> None:
    assert "only decodes should set `max_num_batched_tokens` from its decode workload" in " ".join(
        (capacity.for_vllm.__doc__ or "").split()
    )


def test_resolve_takes_the_requirement_or_a_sufficient_setting() -> None:
    assert capacity.resolve(None, 1026) == 1026
    assert capacity.resolve(1026, 1026) == 1026
    assert capacity.resolve(4096, 1026) == 4096


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (0, "num_max_tokens_per_rank must be a positive integer, got 0"),
        (-3, "num_max_tokens_per_rank must be a positive integer, got -3"),
        (12.5, "num_max_tokens_per_rank must be a positive integer, got 12.5"),
        (True, "num_max_tokens_per_rank must be a positive integer, got True"),
        (1025, r"num_max_tokens_per_rank \(1025\) is smaller than the 1026 tokens .* raise it to at least 1026"),
    ],
)
def test_resolve_refuses(configured: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capacity.resolve(configured, 1026)


@pytest.mark.parametrize("name", ["local_batch_size", "seq_len", "context_parallel_degree", "tensor_parallel_degree"])
def test_pretraining_names_the_bad_argument(name: str) -> None:
    arguments = {"local_batch_size": 1, "seq_len": 8, name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be a positive integer, got 0"):
        capacity.for_pretraining(**arguments)


def test_vllm_names_the_bad_argument() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be a positive integer, got 0"):
        capacity.for_vllm(0)
    with pytest.raises(ConfigError, match="capture_size must be a positive integer, got -1"):
        capacity.for_vllm(8, capture_sizes=[4, -1])
