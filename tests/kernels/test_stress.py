"""Helpers that dawdle: all that signal do, while they are asked to, and kernels with them compile for Hopper."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux only")

from crossdock.kernels import signal, small, small_combine, small_dispatch, stress
from crossdock.kernels.launch import wrapped
from crossdock.kernels.signal import ARRIVALS, CHUNKS, INBOX, NUM_CHUNKS
from crossdock.kernels.stress import DAWDLED, SLOWED, VISITS, delays
from crossdock.kernels.waits import launch_tell, launch_wait
from tests.kernels.symmetric_ranks import CALL, boards, together, word_of
from tests.kernels.test_small_compiles import _COMBINE, _DISPATCH, _WITH_SCALARS
from tests.kernels.test_small_compiles import compiled as compiled_small
from tests.kernels.test_symmetric_compiles import _parts_ways, cases, compiled

CPU = torch.device("cpu")
_ORDERED = re.compile(r'sem="(acquire|release|acq_rel)"|scope="sys"')


def _helpers() -> Iterator[Any]:
    """Every helper that any kernel names."""
    found = {helper for case in cases().values() for helper in case.helpers}
    found |= {*signal.SIGNALLING, *small.SMALL, *small_dispatch.HELPERS, *small_combine.HELPERS, signal.meet}
    yield from sorted(found, key=lambda helper: str(helper.__name__))


def test_every_helper_that_signals_has_a_slowed_twin():
    signalling = {helper.__name__ for helper in _helpers() if _ORDERED.search(inspect.getsource(helper))}
    assert signalling - {"tell_call"} == SLOWED.keys()  # behind `tell_call` a program arrives


def test_twins_take_what_they_stand_for_takes():
    originals = {helper.__name__: helper for helper in _helpers()}
    for name, twin in SLOWED.items():
        assert inspect.signature(twin) == inspect.signature(originals[name])
        assert getattr(stress, f"prompt_{name}") is originals[name]


def test_their_places_in_the_state_are_nobody_elses():
    assert INBOX < VISITS < DAWDLED < ARRIVALS


def _tell(board: signal.Board, times: int) -> tuple[int, int]:
    """Tell a round's chunks so often; then how many visits there were, and how many atomics dawdled."""
    for _ in range(times):
        launch_tell(board, CHUNKS, CALL.digest, begins=True)
    return int(board.state[VISITS]), int(board.state[DAWDLED])


def test_some_visits_dawdle_and_what_is_told_stays_the_same():
    ranks = boards(2)
    with delays(1):
        visits, dawdled = _tell(ranks[0], 15)
        assert visits == 15 * 2  # which round begins is told by `tell`, all chunks at once by the kernel itself
        assert visits < dawdled < 63 * visits / 3  # as long as one visit in four dawdles
        launch_wait(ranks[1], signal.READ, CALL.digest)  # which has pushed nothing yet
        assert int(ranks[1].state[VISITS]) > 0
    words = list(range(CHUNKS, CHUNKS + 2 * NUM_CHUNKS))
    latest = [15 if word >= CHUNKS + NUM_CHUNKS else 14 for word in words]
    for rank in ranks:
        assert rank.signals[words, 0].tolist() == [word_of(number) for number in latest]


def test_seeds_dawdle_differently_and_repeat():
    def dawdled(seed: int) -> int:
        ranks = boards(2)
        with delays(seed):
            return _tell(ranks[0], 4)[1]

    first, again, other = dawdled(1), dawdled(1), dawdled(2)
    assert first == again != other


def test_programs_that_meet_and_wait_do_so_with_delays():
    """Two ranks, each in a thread: one tells, the other waits."""
    ranks = boards(2)
    with delays(5):
        together(ranks, lambda board: launch_tell(board, CHUNKS, CALL.digest, begins=True))
        together(ranks, lambda board: launch_wait(board, CHUNKS, CALL.digest))
    assert all(int(board.state[VISITS]) >= 2 + 2 for board in ranks)


def test_afterwards_kernels_are_as_before():
    ranks = boards(2)
    case = cases()["tell chunks"]
    prompt = wrapped(case.kernel, "cpu", case.helpers)
    with pytest.raises(ZeroDivisionError), delays(1):
        assert "prompt_tell" in wrapped(case.kernel, "cpu", case.helpers).function.__globals__
        seen = _tell(ranks[0], 1)
        raise ZeroDivisionError
    after = wrapped(case.kernel, "cpu", case.helpers)
    assert after is not prompt and "prompt_tell" not in after.function.__globals__
    assert after.function.__globals__["tell"].__code__ is prompt.function.__globals__["tell"].__code__
    assert _tell(ranks[0], 2) == seen


# -- compiled ---------------------------------------------------------------------------------------------------------


def _loops(ptx: str) -> Iterator[list[str]]:
    """The body of every loop that ends with a jump back to its begin, without remarks."""
    lines = [line.strip() for line in ptx.splitlines()]
    lines = [line for line in lines if line and not line.startswith((".loc", "//", "$L__tmp"))]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L__BB")}
    for at, line in enumerate(lines):
        jump = re.search(r"bra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if jump and labels[jump[1]] < at:
            yield lines[labels[jump[1]] + 1 : at + 1]


def _assert_dawdles(ptx: str) -> None:
    """There are loops over one atomic, and nothing else decides about them."""
    assert ".local" not in ptx, "registers spill into memory"
    innermost = [body for body in _loops(ptx) if sum("bra" in line for line in body) == 1]
    dawdling = [body for body in innermost if any("atom.global.gpu.relaxed.add.u64" in line for line in body)]
    assert dawdling
    for body in dawdling:
        assert sum("atom." in line for line in body) == 1 and not _parts_ways(body)


_MORE = ("publish and count", "dispatch", "combine with scalars", "swap scalars")


@pytest.mark.parametrize(
    "name", ["tell chunks", "move rows", *(pytest.param(name, marks=pytest.mark.full) for name in _MORE)]
)
def test_slowed_kernels_compile_for_hopper(name: str):
    prompt = compiled(cases()[name])
    with delays(1):
        slow = compiled(cases()[name])
    assert "atom.global.gpu.relaxed.add.u64" in slow
    for order in ("sys.release.exch", "sys.acquire.add", "gpu.acq_rel.add", "gpu.acquire.add"):
        assert (f"atom.global.{order}" in slow) == (f"atom.global.{order}" in prompt)
    _assert_dawdles(slow)
    assert compiled(cases()[name]) == prompt


@pytest.mark.parametrize(
    ("kernel", "helpers", "constants"),
    [
        (small_dispatch.dispatch_small_kernel, small_dispatch.HELPERS, _DISPATCH),
        (small_combine.combine_small_kernel, small_combine.HELPERS, _COMBINE),
        (small_combine.combine_small_kernel, small_combine.HELPERS, _WITH_SCALARS),
    ],
    ids=["dispatch", "combine", "combine with scalars"],
)
def test_slowed_kernels_for_small_batches_compile_for_hopper(kernel, helpers, constants):
    tiles = {"PUSHED_ROWS": 4, "TAKEN_ROWS": 4, "BLOCK_COLS": 1024}
    with delays(1):
        ptx = compiled_small(kernel, helpers, constants | tiles, "bf16", 8)
    assert "atom.global.sys.acquire.add.u64" in ptx and "atom.global.sys.release.add.u64" in ptx
    _assert_dawdles(ptx)
