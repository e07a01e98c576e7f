"""The kernels that keep the ledger: in the interpreter against the ledger of a CPU, and compiled for a Hopper GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")

import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossdock.kernels import repeats, tail, tally
from crossdock.kernels.launch import wrapped
from crossdock.ledger import CAPACITY, DEMAND, ROWS, TOKENS_OF_PEAK, WANTED, DeviceLedger, Entry, HostLedger
from crossdock.permute import kept_within, padded_ends
from crossdock.types import OnOverflow

CPU = torch.device("cpu")


def entry(
    layer: str, wanted: list[int], capacity: int, alignment: int, bad_ids: int = 0, on_overflow: OnOverflow = "raise"
) -> Entry:
    counts = torch.tensor(wanted)
    ends = padded_ends(counts, alignment)
    kept, ends = (counts, ends) if capacity < 0 else kept_within(counts, ends, capacity)
    bad, ends = torch.tensor([0, bad_ids]), ends.to(torch.int32)
    return Entry(layer, sum(wanted), capacity, counts, kept, ends, bad, 1 + sum(wanted) // 2, on_overflow)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.lists(st.integers(0, 9), min_size=3, max_size=3),
            st.integers(-1, 24),
            st.sampled_from(["drop", "skip_step", "raise"]),
        ),
        max_size=6,
    ),
    st.sampled_from([1, 4]),
)
def test_the_device_writes_what_the_host_writes(
    dispatches: list[tuple[str, list[int], int, OnOverflow]], alignment: int
):
    host, device = HostLedger(alignment, 3, CPU), DeviceLedger(alignment, 3, CPU)
    for layer, wanted, capacity, on_overflow in dispatches:
        made = entry(layer, wanted, max(capacity, -1) or 4, alignment, on_overflow=on_overflow)
        assert device.enter(made).tolist() == host.enter(made).tolist() == made.expert_offsets[-1:].tolist()
    assert device.words().tolist() == host.words().tolist()
    assert device.trouble() == host.trouble()
    assert device.told() == host.told()
    assert device.overflowed.tolist() == host.overflowed.tolist()
    for _ in range(2):  # what was taken is gone, and the accounts stay
        assert device.take().tolist() == host.take().tolist()
    for layer in device.layers[:1]:
        device.forget_fill(layer)
        host.forget_fill(layer)
        assert int(device.words()[0, CAPACITY]) == 0
    assert device.layers == host.layers
    assert device.words().tolist() == host.words().tolist()


def test_what_a_guard_takes():
    for ledger in (HostLedger(1, 2, CPU), DeviceLedger(1, 2, CPU)):
        dispatches: list[tuple[str, int, OnOverflow]] = [("a", 9, "skip_step"), ("b", 3, "raise"), ("a", 12, "drop")]
        for layer, wanted, policy in dispatches:
            ledger.enter(entry(layer, [wanted, 0], 4, 1, on_overflow=policy))  # per 5, 2 and 7 tokens
        of_a, of_b = -(-9 * TOKENS_OF_PEAK // 5), 3 * TOKENS_OF_PEAK // 2
        assert ledger.take().tolist() == [1, of_a, 0, of_a, of_b]
        assert ledger.take().tolist() == [0, 0, 0, 0, 0]


def test_the_example_of_the_kernel():
    ledger = DeviceLedger(2, 2, CPU)
    assert ledger.enter(entry("moe", [3, 2], 4, 2)).tolist() == [4]
    (words,) = ledger.words().tolist()
    assert (words[WANTED], words[ROWS], words[DEMAND], words[CAPACITY]) == (5, 3, 6, 4)
    assert ledger.trouble()[:4] == (1, "moe", 6, 4)
    assert ledger.overflowed.tolist() == [1.0]


def test_bad_ids_are_told():
    ledger = DeviceLedger(1, 2, CPU)
    for num_bad in (0, 2, 3):
        ledger.enter(entry("moe", [1, 1], 8, 1, num_bad))
    assert ledger.told() == (0, 5, 0)
    assert ledger.trouble().bad_ids == 5


def test_more_layers_than_a_page_has():
    ledger = DeviceLedger(1, 1, CPU)
    for number in range(130):
        ledger.enter(entry(f"layer {number}", [number], -1, 1))
    assert ledger.layers == [f"layer {number}" for number in range(130)]
    assert ledger.words()[:, ROWS].tolist() == list(range(130))


@pytest.mark.parametrize(
    ("ids", "repeats"),
    [([[3, 3], [1, 2], [-1, -1]], 1), ([[0, 1, 0], [2, 2, 2]], 2), ([[5]], 0), ([[1, 0]] * 300 + [[4, 4]] * 2, 2)],
    ids=["the example", "three slots", "one slot", "three programs"],
)
def test_tokens_that_name_an_expert_twice(ids: list[list[int]], repeats: int):
    ledger = DeviceLedger(1, 6, CPU)
    ledger.note_repeats(torch.tensor(ids))
    assert ledger.trouble().repeats == ledger.told()[2] == repeats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("end", [0, 3, 5, 9])
def test_the_tail_is_zeroed(dtype: torch.dtype, end: int):
    rows, scores = torch.ones(9, 40, dtype=dtype), torch.ones(9)
    rows[end:], scores[end:] = float("nan"), float("nan")
    tail.launch_zero_tail(torch.tensor([end]), rows, scores)
    for values in (rows[:, 0], rows[:, 39], scores):
        assert values.tolist() == [1.0] * end + [0.0] * (9 - end)


_TYPES = {
    **dict.fromkeys(("offsets_ptr",), "*i32"),
    **dict.fromkeys(("overflowed_ptr", "scores_ptr"), "*fp32"),
    "rows_ptr": "*bf16",
}
_CASES: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (tally.tally_kernel, {"EXPERT_BLOCK": 64, "EP_BLOCK": 8}),
    (repeats.count_repeats_kernel, {"TOP_K": 8, "WORD": 5, "BLOCK": 128}),
    (tail.zero_tail_kernel, {"SCORED": True, "BLOCK_ROWS": 4, "BLOCK_COLS": 1024}),
]


@pytest.mark.parametrize("ones", [False, True], ids=["any integers", "every integer is 1"])
@pytest.mark.parametrize(("kernel", "constants"), _CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_compiles_for_hopper(kernel: Callable[..., None], constants: dict[str, Any], ones: bool):
    names = [name for name in inspect.signature(kernel).parameters if name not in constants]
    types = {name: _TYPES.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in names}
    if ones:
        constants = constants | {name: 1 for name in names if not name.endswith("_ptr")}
        types = {name: kind for name, kind in types.items() if name.endswith("_ptr")}
    source = ASTSource(
        wrapped(kernel, "cuda", (tally.tally,)), {**types, **dict.fromkeys(constants, "constexpr")}, constants
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert ".local" not in compiled.asm["ptx"], "registers spill into memory"
