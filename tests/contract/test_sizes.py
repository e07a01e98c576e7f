"""Sizes: many tokens, odd widths, many slots, group sizes that are no power of two, padding of groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm

import crossdock as cd
from crossdock.group.members import resolve_members
from crossdock.select import make_spec
from crossdock.testing import LoopbackGroup, Seat
from tests.contract.conftest import BACKENDS, On, every_backend
from tests.contract.trials import checked, exact_steps, integers, make_config, problem, random_ids, refused


def alternating(seat: Seat, num_tokens: int) -> tuple[int, list[int]]:
    """Send every second token to each of two experts; return the number of wrong elements, and the counts."""
    config = make_config(2, 1, 8, dtype=torch.bfloat16, num_max_tokens_per_rank=num_tokens)
    token = torch.arange(num_tokens)
    x = (token % 251 + 1).to(torch.bfloat16).unsqueeze(1).repeat(1, 8).requires_grad_()
    ids = (token % 2).unsqueeze(1)
    with seat.open(config) as dispatcher:
        routed = dispatcher.dispatch(x, torch.ones(num_tokens, 1), ids)
        out = dispatcher.combine(routed.rows * (seat.rank + 1), routed.handle)
        out.backward(torch.ones_like(out))
    assert x.grad is not None
    factor = (ids + 1).to(torch.bfloat16)
    wrong = (out.detach() != x.detach() * factor).sum() + (x.grad != factor).sum()
    return int(wrong), routed.tokens_per_expert.tolist()


def large() -> Iterator[Any]:
    """Every backend with every number; in the interpreter each takes ten seconds or twenty."""
    for backend, ep_sizes in BACKENDS.items():
        for num_tokens in (65_535, 65_536, 65_544) if 2 in ep_sizes else ():
            yield pytest.param(backend, num_tokens, marks=pytest.mark.full if backend == "symmetric" else ())


@pytest.mark.parametrize(("backend", "num_tokens"), list(large()))
def test_more_tokens_than_16_bits_count(on: On, backend: str, num_tokens: int):
    halves = [2 * ((num_tokens + 1) // 2), 2 * (num_tokens // 2)]
    assert on(backend, 2)(alternating, num_tokens) == [(0, [halves[0]]), (0, [halves[1]])]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_maximum_must_be_positive(limit: int):
    with pytest.raises(cd.ConfigError, match=f"num_max_tokens_per_rank must be a positive integer, got {limit}"):
        make_config(2, 1, num_max_tokens_per_rank=limit)


def opened_for_two_million(seat: Seat) -> tuple[int, float]:
    """Of a backend that keeps no storage for the most tokens there may be: its storage, and what comes of three."""
    config = make_config(4, 2, 7168, dtype=torch.bfloat16, num_max_tokens_per_rank=2**21)
    with seat.open(config) as dispatcher:
        routed = dispatcher.dispatch(
            torch.ones(3, 7168, dtype=torch.bfloat16), torch.ones(3, 2), torch.ones(3, 2).long()
        )
        out = dispatcher.combine(routed.rows, routed.handle)
        return dispatcher.workspace_bytes, float(out.detach().mean())


@pytest.mark.parametrize(("backend", "ep_size"), [("local", 1), ("loopback", 2), ("all_to_all", 2)])
def test_an_absurd_maximum_is_nothing_where_no_storage_is_made_for_it(on: On, backend: str, ep_size: int):
    assert on(backend, ep_size)(opened_for_two_million) == [(0, 2.0)] * ep_size


def refused_for_all(seat: Seat) -> tuple[str, int]:
    """The message, and by how many kB the process's address space has grown at its largest."""
    config, before = make_config(4, 2, 7168, num_max_tokens_per_rank=2**31 - 1), most_mapped_kb()
    return refused(lambda: seat.open(config), cd.BackendUnavailable), most_mapped_kb() - before


def most_mapped_kb() -> int:
    return int(re.findall(r"^VmPeak:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[0])


def test_a_maximum_that_no_memory_can_hold_is_refused_before_anything_is_allocated(on: On):
    pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")
    from crossdock.backends.symmetric.buffers import workspace_bytes

    (first, first_kb), (second, second_kb) = on("symmetric", 2)(refused_for_all)
    assert max(first_kb, second_kb) < 1 << 20
    sizes = re.search(
        r"num_max_tokens_per_rank \(2147483647\) takes (\d+) bytes of shared memory on every rank, and there is room"
        r" for (\d+); set num_max_tokens_per_rank to (\d+) or less$",
        first,
    )
    assert first == second and sizes is not None, first
    num_bytes, limit, most = map(int, sizes.groups())

    def bytes_of(tokens: int) -> int:
        config = make_config(4, 2, 7168, num_max_tokens_per_rank=tokens)
        return workspace_bytes(make_spec(config, resolve_members(LoopbackGroup(2).member(0), None)))

    assert bytes_of(most) <= limit < bytes_of(most + 1) and bytes_of(2**31 - 1) == num_bytes


@pytest.mark.parametrize(
    ("capacity", "tokens", "most"),
    [
        (cd.RowCapacity.worst_case(), 2**30, 2**29 - 1),
        (cd.RowCapacity.worst_case(0.25), 2**31 - 1, 2**31 - 4),
        (cd.RowCapacity.balanced(8.0), 2**28, 2**27 - 1),
    ],
    ids=str,
)
def test_more_rows_than_an_offset_counts_are_refused(capacity: cd.RowCapacity, tokens: int, most: int):
    group = LoopbackGroup(2).member(0)
    told = f"above 2147483647, the largest offset; num_max_tokens_per_rank may be {most} at most$"
    with pytest.raises(cd.ConfigError, match=told):
        cd.TokenDispatcher(make_config(4, 2, 8, row_capacity=capacity, num_max_tokens_per_rank=tokens), group)
    assert cd.explain(make_config(4, 2, 8, row_capacity=capacity, num_max_tokens_per_rank=most), group).chosen
    with pytest.raises(cd.ConfigError, match=r"^rows num_rows must be at most 2147483647, got 2147483648$"):
        cd.RowCapacity.rows(2**31)


@every_backend(2)
@pytest.mark.parametrize("limit", [1, 100, 672, 1000])
def test_any_maximum_is_a_good_one(on: On, backend: str, ep_size: int, limit: int):
    config = make_config(4, 2, 128, dtype=torch.bfloat16, num_max_tokens_per_rank=limit)
    steps = [problem(config, random_ids((n, n), 2, 4), experts="identity") for n in (min(8, limit), limit)]
    on(backend, 2)(exact_steps, [integers(step) for step in steps])


def test_a_token_above_the_maximum():
    with cd.TokenDispatcher(make_config(4, 2, num_max_tokens_per_rank=5)) as dispatcher:
        message = refused(
            lambda: dispatcher.dispatch(torch.ones(6, 16), torch.ones(6, 2), torch.zeros(6, 2, dtype=torch.int64))
        )
        assert message == "x has 6 tokens, above num_max_tokens_per_rank (5)"


@every_backend(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden_dim", [1, 8, 24, 100, 130, 1000, 1536, 3584])
def test_rows_of_any_width(on: On, backend: str, ep_size: int, hidden_dim: int, dtype: torch.dtype):
    config = make_config(4, 2, hidden_dim, dtype=dtype)
    columns = torch.arange(hidden_dim).to(dtype)
    trial = problem(config, random_ids((7, 7), 2, 4)).replace(x=(columns.repeat(7, 1),) * 2)
    on(backend, 2)(checked, trial)


@every_backend(2)
@pytest.mark.parametrize("top_k", [9, 11, 12, 16, 32])
def test_many_slots(on: On, backend: str, ep_size: int, top_k: int):
    config = make_config(32, top_k, 128, dtype=torch.bfloat16)
    on(backend, 2)(checked, problem(config, random_ids((4, 4), top_k, 32)))


def opened_with(seat: Seat, num_experts: int) -> str:
    message = refused(lambda: seat.open(make_config(num_experts, 1)), cd.ConfigError)
    checked(seat, problem(make_config(4, 2), random_ids((3,) * seat.size, 2, 4)))
    return message


@every_backend(2)
@pytest.mark.parametrize("num_experts", [5, 1])
def test_experts_must_divide_over_the_group(on: On, backend: str, ep_size: int, num_experts: int):
    messages = on(backend, 2)(opened_with, num_experts)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"num_experts ({num_experts}) must be divisible by the EP group's size (2)")


@pytest.mark.parametrize(
    ("num_experts", "top_k", "sentence"),
    [
        (0, 1, "num_experts must be a positive integer, got 0"),
        (4, 0, "top_k must be a positive integer, got 0"),
        (4, 5, "top_k (5) must not exceed num_experts (4)"),
    ],
)
def test_impossible_numbers_of_experts(num_experts: int, top_k: int, sentence: str):
    with pytest.raises(cd.ConfigError) as refusal:
        make_config(num_experts, top_k)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("backend", "ep_size", "num_experts"),
    [(backend, *sizes) for backend in ("loopback", "all_to_all") for sizes in ((3, 9), (3, 3), (6, 12))],
)
def test_group_sizes_that_are_no_power_of_two(on: On, backend: str, ep_size: int, num_experts: int):
    config = make_config(num_experts, 2, 64)
    steps = [problem(config, random_ids((7,) * ep_size, 2, num_experts, seed=step)) for step in range(20)]
    on(backend, ep_size)(exact_steps, [integers(trial, seed=step) for step, trial in enumerate(steps)])


PADDED = [
    ([0, 1, 8, 9, 0, 16], [0, 8, 16, 32, 32, 48]),
    ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
    ([0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 0, 8]),
]


@every_backend(1)
@pytest.mark.parametrize(("counts", "offsets"), PADDED, ids=["some", "none", "last"])
def test_padding_of_groups(on: On, backend: str, ep_size: int, counts: list[int], offsets: list[int]):
    config = make_config(6, 1, 32, dtype=torch.bfloat16, expert_alignment=8)
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(counts)).unsqueeze(1)
    (outcome,) = on(backend, 1)(checked, problem(config, [ids]))
    assert outcome.tokens_per_expert.tolist() == counts
    assert outcome.expert_offsets.tolist() == offsets
    assert outcome.rows.shape[0] == offsets[-1]
    weights = torch.ones(6, 32, 16, dtype=torch.bfloat16)
    assert grouped_mm(outcome.rows, weights, offs=outcome.expert_offsets).shape == (offsets[-1], 16)


@every_backend(2)
@pytest.mark.parametrize(("alignment", "sizes"), [(32, [64, 0, 32, 160]), (128, [128, 0, 128, 256])])
def test_groups_of_44_at_alignment(on: On, backend: str, ep_size: int, alignment: int, sizes: list[int]):
    """Both ranks bring some of each group to rank 0, which has four experts; nothing goes to the other four."""
    counts = torch.tensor([44, 0, 1, 129])
    config = make_config(8, 1, 32, dtype=torch.bfloat16, expert_alignment=alignment, num_max_tokens_per_rank=256)
    named = torch.repeat_interleave(torch.arange(4), counts).unsqueeze(1)
    first, second = on(backend, 2)(checked, problem(config, [named[::2], named[1::2]]))
    assert first.tokens_per_expert.tolist() == counts.tolist()
    groups = first.rows.split(sizes)
    assert torch.diff(first.expert_offsets, prepend=torch.zeros(1, dtype=torch.int32)).tolist() == sizes
    for group, scores, count in zip(groups, first.scores.split(sizes), counts.tolist(), strict=True):
        assert not group[count:].any() and not scores[count:].any()
    assert second.tokens_per_expert.tolist() == second.expert_offsets.tolist() == [0, 0, 0, 0]


def test_a_mode_that_would_ask_for_an_alignment_is_refused_as_a_whole():
    with pytest.raises(cd.ConfigError, match=r"^quantization must be None: no quantised transport is offered yet"):
        make_config(4, 1, quantization="mxfp8", expert_alignment=16)


@every_backend(2)
@pytest.mark.parametrize("fields", [{}, {"expert_alignment": 1}, {"expert_alignment": 16}], ids=str)
def test_nothing_is_padded_unless_asked_for(on: On, backend: str, ep_size: int, fields: dict[str, int]):
    config = make_config(4, 1, 32, dtype=torch.bfloat16, **fields)
    outcomes = on(backend, 2)(checked, problem(config, random_ids((5, 5), 1, 4)))
    for outcome in outcomes:
        ends = outcome.expert_offsets
        if fields.get("expert_alignment") == 16:
            assert not (ends % 16).any()
        else:
            assert outcome.rows.shape[0] == int(outcome.tokens_per_expert.sum())
    assert sum(int(outcome.tokens_per_expert.sum()) for outcome in outcomes) == 10
