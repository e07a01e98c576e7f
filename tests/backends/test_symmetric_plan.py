"""How many programs share the work on a GPU: of sizes alone, so that none is needed to tell."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")

from crossdock.backends.base import TransportSpec
from crossdock.backends.symmetric import plan
from crossdock.backends.symmetric.plan import Plan
from crossdock.kernels.signal import NUM_CHUNKS

PROCESSORS = 132


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "_processors", lambda device: PROCESSORS)


def plan_of(num_sms: int | None, *, ep_size: int = 2, num_tokens: int = 4096) -> Plan:
    spec = TransportSpec(
        num_experts=8 * ep_size,
        top_k=8,
        hidden_dim=2048,
        dtype=torch.bfloat16,
        num_max_tokens_per_rank=num_tokens,
        expert_alignment=1,
        reduction="fast",
        num_sms=num_sms,
        timeout_s=10.0,
        rank=0,
        ep_size=ep_size,
    )
    return Plan.of(spec, torch.device("cuda"))


def programs(of: Plan) -> tuple[int, int]:
    """Of a dispatch and of a combine, at most."""
    return of.push.max_programs + of.spread.max_programs, of.give.max_programs + of.take.max_programs


@pytest.mark.parametrize("num_sms", [2, 3, 4, 5, 7, 32, 131])
def test_no_more_programs_move_data_than_asked(num_sms: int):
    asked = plan_of(num_sms)
    assert programs(asked) == (num_sms, num_sms) and asked.others == num_sms
    assert asked.arrangers <= asked.spread.max_programs
    assert min(tile.max_programs for tile in (asked.push, asked.spread, asked.give, asked.take)) >= 1


@pytest.mark.parametrize("num_sms", [133, 266, 400])
def test_programs_that_wait_for_each_other_fit_however_many_are_allowed(num_sms: int):
    assert programs(plan_of(num_sms)) == (PROCESSORS, PROCESSORS)


def test_one_program_does_all():
    assert programs(plan_of(1)) == (1, 1) and plan_of(1).arrangers == 1
    assert str(plan_of(1)).startswith("one program does a whole dispatch or combine")


@pytest.mark.parametrize(("ep_size", "pushers"), [(1, 1), (2, PROCESSORS), (8, PROCESSORS)])
def test_programs_that_wait_for_each_other_fit_the_device_at_once(ep_size: int, pushers: int):
    measured = plan_of(None, ep_size=ep_size)
    assert measured.push.max_programs == pushers
    assert programs(measured) == (2 * PROCESSORS, 4 * PROCESSORS)
    assert measured.arrangers <= measured.spread.max_programs


@pytest.mark.parametrize("num_tokens", [1, 64, 512, 513, 4096, 4097, 100_000])
@pytest.mark.parametrize("num_sms", [None, 32])
def test_chunks_hold_all_tokens_and_end_where_tiles_do(num_sms: int | None, num_tokens: int):
    planned = plan_of(num_sms, num_tokens=num_tokens)
    assert planned.chunk_len % 64 == 0 and NUM_CHUNKS == 8
    assert num_tokens <= NUM_CHUNKS * planned.chunk_len < num_tokens + NUM_CHUNKS * 64
    assert planned.chunk_len % planned.push.rows == 0
