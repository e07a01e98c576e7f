"""The symmetric backend between real ranks of a CPU: its kernels in the interpreter, over shared memory."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.backends import symmetric
from crossdock.backends.base import Call, GroupFacts, TransportSpec
from crossdock.group.fingerprint import CallFacts
from crossdock.testing import PoolRunner, conformance_cells, run_cell, start_ranks, traits_of
from tests.conftest import Ranks
from tests.faults.play import Account, observe, step
from tests.faults.test_disagreement import DIFFERENCES
from tests.memory.shared_files import shared_files

pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")

from crossdock.backends.symmetric import transport as symmetric_transport
from crossdock.kernels import combine, dispatch, move, publish, scalars, small_combine, small_dispatch

NAME = "symmetric"
TIMEOUT_S = 2.0


def config(**changes: Any) -> cd.DispatcherConfig:
    settings: dict[str, Any] = {
        "num_experts": 8,
        "top_k": 2,
        "hidden_dim": 8,
        "dtype": torch.float32,
        "num_max_tokens_per_rank": 32,
        "timeout_s": 30.0,
    }
    return cd.DispatcherConfig(**(settings | changes))


def opened(**changes: Any) -> cd.TokenDispatcher:
    return cd.TokenDispatcher(config(**changes), backend=NAME)


# -- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", conformance_cells(3)[5:44:13], ids=str)
def test_some_of_the_conformance_suite_on_an_odd_number_of_ranks(ranks: Ranks, cell: Any):
    results = PoolRunner(ranks(3), NAME)(run_cell, cell, traits_of(NAME), timeout_s=100.0)
    failed = [result for rank in results for result in rank if result.status != "passed"]
    assert not failed, "\n".join(f"rank {f.rank}, {f.group}: {f.message}\n{f.detail}" for f in failed)


# -- memory -----------------------------------------------------------------------------------------------------------


def _spec(**changes: Any) -> TransportSpec:
    facts: dict[str, Any] = {
        "num_experts": 256,
        "top_k": 8,
        "hidden_dim": 7168,
        "dtype": torch.bfloat16,
        "num_max_tokens_per_rank": 4096,
        "expert_alignment": 1,
        "reduction": "fast",
        "num_sms": None,
        "timeout_s": 30.0,
        "rank": 0,
        "ep_size": 4,
    }
    return TransportSpec(**(facts | changes))


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_persistent_bytes_are_known_before_and_bounded(ep_size: int, reduction: Any):
    spec = _spec(ep_size=ep_size, reduction=reduction)
    rows = (1 + ep_size) * 4096 * 7168 * 2
    routing = 3 * ep_size * 4096 * 8 * 4  # ids, scores, and what goes home of these
    assert rows < symmetric.SymmetricBackend.workspace_bytes(spec) <= 1.01 * rows + routing


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_persistent_bytes_of_small_batches(ep_size: int, reduction: Any):
    """Two halves of what ranks push, there or back, beside what the general kernels need."""
    capacity = cd.RowCapacity.worst_case()
    spec = _spec(ep_size=ep_size, reduction=reduction, num_max_tokens_per_rank=512, row_capacity=capacity)
    rows = (1 + 3 * ep_size) * 512 * 7168 * 2
    routing = 7 * ep_size * 512 * 8 * 4  # as above, and two halves of places and scores
    assert rows < symmetric.SymmetricBackend.workspace_bytes(spec) <= 1.01 * rows + routing
    assert rows <= 4 * ep_size * 512 * 7168 * 2


def _addresses(rank: int) -> tuple[int, int, list[list[int]]]:
    with opened() as dispatcher:
        transport: Any = dispatcher._open.transport
        seen = [[int(a) for table in transport.workspace.table.values() for a in table]]
        for num_tokens in (5, 0, 32):
            step(dispatcher, num_tokens=num_tokens)
            seen.append([int(a) for table in transport.workspace.table.values() for a in table])
        return transport.workspace.num_bytes, symmetric.SymmetricBackend.workspace_bytes(transport.spec), seen


def test_storage_is_allocated_once_and_stays_where_it_is(ranks: Ranks):
    for allocated, told, (first, *later) in ranks(2).run(_addresses):
        assert allocated == told
        assert all(addresses == first for addresses in later)


Footprint = tuple[int, int, int, list[str]]


def _footprint() -> Footprint:
    mapped = Path("/proc/self/maps").read_text().count("memfd:crossdock")
    return mapped, len(os.listdir("/proc/self/fd")), threading.active_count(), shared_files()


def _open_again_and_again(rank: int) -> list[Footprint]:
    seen: list[Footprint] = []
    for number in range(201):
        with opened(row_capacity=cd.RowCapacity.worst_case() if number % 2 else cd.RowCapacity.exact()) as dispatcher:
            if number % 40 < 2:
                step(dispatcher)
        if number % 40 == 0:
            gc.collect()  # what the interpreter was given by earlier tests of these ranks
            seen.append(_settled(seen[0] if seen else None))
    return seen


def _settled(expected: Footprint | None) -> Footprint:
    """What is left once threads have ended that were answering a peer: at the latest after five seconds."""
    deadline = time.monotonic() + 5.0
    while True:
        footprint = _footprint()
        answering = any(thread.name == "crossdock-reply" for thread in threading.enumerate())
        if time.monotonic() > deadline or not (answering or (expected and footprint != expected)):
            return footprint
        time.sleep(0.01)


def test_two_hundred_openings_leak_nothing(ranks: Ranks):
    for first, *later in ranks(2).run(_open_again_and_again, timeout_s=100.0):
        assert first[0] == 0
        assert later == [first] * len(later)


def _closed_twice(rank: int) -> list[int]:
    """Mappings of the workspace: while a captured graph may need it, and once the user says that it does not."""
    dispatcher = opened()
    step(dispatcher)
    dispatcher._open._use.captured = True  # as a capture does, which takes a GPU
    with pytest.warns(ResourceWarning, match="close\\(graphs_destroyed=True\\) frees it"):
        dispatcher.close()
    mapped = [_footprint()[0]]
    dispatcher.close(graphs_destroyed=True)
    gc.collect()
    return [*mapped, _footprint()[0]]


def test_what_graphs_may_need_is_freed_when_they_are_gone(ranks: Ranks):
    for kept, left in ranks(2).run(_closed_twice):
        assert kept > 0 and left == 0


# -- who is served ----------------------------------------------------------------------------------------------------


def _close_in_another_order(rank: int) -> list[float]:
    config = cd.DispatcherConfig(
        num_experts=4, top_k=1, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=4, timeout_s=10.0
    )
    opened = [cd.TokenDispatcher(config, backend="symmetric") for _ in range(3)]
    x, scores, ids = torch.ones(2, 8), torch.ones(2, 1), torch.tensor([[0], [3]])
    for number in ((0, 1, 2), (2, 0, 1))[rank][:2]:
        opened[number].close()
    left = opened[(2, 1)[rank]]
    left.close()
    with cd.TokenDispatcher(config, backend="symmetric") as again:
        routed = again.dispatch(x, scores, ids)
        return again.combine(routed.rows, routed.handle).detach()[:, 0].tolist()


def test_ranks_may_close_in_different_orders(ranks: Ranks):
    assert ranks(2).run(_close_in_another_order, timeout_s=40.0) == [[1.0, 1.0]] * 2


def test_refusals_in_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def why() -> str:
        with pytest.raises(cd.BackendUnavailable) as refusal:
            cd.TokenDispatcher(config(), backend=NAME)
        return str(refusal.value)

    assert "torch.distributed is not initialised" in why()
    group = cd.testing.LoopbackGroup(2).member(0)
    explained = {candidate.name: candidate for candidate in cd.explain(config(), group).candidates}
    assert explained[NAME].why_not == "it needs a torch.distributed group, not in_process"
    monkeypatch.setattr(symmetric, "find_spec", lambda name: None)
    backend = symmetric.SymmetricBackend()
    told = backend.refusal(_spec(), GroupFacts(0, 4, torch.device("cpu"), "gloo"))
    assert told is not None and "triton, which is not installed" in told


def _chosen(rank: int) -> tuple[str | None, list[str | None]]:
    explained = cd.explain(config())
    assert f"{NAME}   usable by name only: programs of a dispatch: 1 push, 1 arrange and spread" in str(explained)
    return explained.chosen, [c.why_not for c in explained.candidates if c.name == NAME]


def test_it_is_taken_only_by_name(ranks: Ranks):
    assert ranks(2).run(_chosen) == [("all_to_all", [None])] * 2


# -- calls that are refused, or differ --------------------------------------------------------------------------------


def _bad_ids(rank: int) -> str:
    """What a GPU's ids would do that no host has looked at: rank 1 brings two that name nobody."""
    with opened() as dispatcher:
        transport, facts = dispatcher._open.transport, CallFacts(0, "dispatch", "")
        call = Call(facts=facts, words=tuple(facts.words()), verify=lambda words: None)
        ids = torch.tensor([[0, 5], [8, -3]]) if rank == 1 else torch.tensor([[0, 5]])
        try:
            transport.dispatch(torch.ones(len(ids), 8), torch.ones(len(ids), 2), ids, None, call)
        except cd.InvalidInput as error:
            step(dispatcher)
            return str(error)
    return "taken"


def test_ids_outside_the_range_are_refused_by_all_and_the_next_call_works(ranks: Ranks):
    told = ranks(2).run(_bad_ids)
    assert told == [told[0]] * 2 and "2 on rank 1; no row was moved" in told[0]


def _differs(rank: int, act: Callable[[cd.TokenDispatcher, bool], None], settings: dict[str, Any]) -> Account:
    dispatcher = opened(timeout_s=20.0, **settings)
    step(dispatcher)
    return observe(dispatcher, lambda: act(dispatcher, rank == 1))


_SMALL = {"row_capacity": cd.RowCapacity.worst_case()}


@pytest.mark.parametrize("settings", [{}, pytest.param(_SMALL, marks=pytest.mark.full)], ids=["general", "small"])
@pytest.mark.parametrize("act", DIFFERENCES, ids=lambda act: act.__name__)
def test_ranks_that_differ_tell_each_other_in_what(
    ranks: Ranks, act: Callable[[cd.TokenDispatcher, bool], None], settings: dict[str, Any]
):
    for account in ranks(2).run(_differs, act, settings):
        assert (account.error, account.ranks) == ("ContractViolation", (1,)), account
        assert account.repeats and account.took_s < 10.0, account
        assert all(words in account.message for words in DIFFERENCES[act]), account


# -- ranks that die, stop or leave ------------------------------------------------------------------------------------


def _step_for_ever(rank: int, begun: Path) -> Account:
    dispatcher = opened(num_experts=12, timeout_s=TIMEOUT_S)

    def work() -> None:
        while True:
            step(dispatcher)
            begun.touch()

    return observe(dispatcher, work)


@pytest.mark.parametrize("interrupt", ["kill", "pause"])
def test_a_rank_that_is_gone_ends_the_others_in_time(interrupt: str, tmp_path: Path):
    begun = tmp_path / "begun"
    with start_ranks(_step_for_ever, 3, begun) as started:
        deadline = time.monotonic() + 30.0
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        getattr(started, interrupt)(2)
        interrupted = time.monotonic()
        results = started.results(timeout_s=0.2)
        while any(result.silent for result in results[:2]) and time.monotonic() < interrupted + 20.0:
            results = started.results(timeout_s=0.2)
        took_s = time.monotonic() - interrupted
    for result in results[:2]:
        account = result.value
        assert account is not None, str(result)
        assert (account.error, account.ranks) == ("PeerTimeout", (2,)), account
        assert account.repeats and account.close_s <= TIMEOUT_S
    assert took_s < TIMEOUT_S + 5.0


def _one_stays_away(rank: int) -> Account:
    dispatcher = opened(timeout_s=TIMEOUT_S)
    step(dispatcher)
    if rank == 1:
        time.sleep(TIMEOUT_S + 2.0)
    return observe(dispatcher, lambda: step(dispatcher))


def test_a_rank_that_skips_a_call_is_given_up(ranks: Ranks):
    waiting, late = ranks(2).run(_one_stays_away)
    for account in (waiting, late):
        assert (account.error, account.ranks) == ("PeerTimeout", (1,)), account
        assert account.repeats and account.close_s <= TIMEOUT_S, account
    assert "call 2 (dispatch of layer 'blocks.7.moe')" in waiting.message
    assert TIMEOUT_S <= waiting.took_s < TIMEOUT_S + 5.0
    assert "this rank (1) is one of them: the others have given it up" in late.message and late.took_s < 1.0


def _one_leaves(rank: int) -> Account:
    dispatcher = opened(timeout_s=30.0)
    step(dispatcher)
    if rank == 1:
        dispatcher.close()
        return Account()
    return observe(dispatcher, lambda: step(dispatcher))


def test_a_rank_that_closes_is_noticed_at_once(ranks: Ranks):
    account = ranks(2).run(_one_leaves)[0]
    assert (account.error, account.ranks) == ("PeerTimeout", (1,)), account
    assert "its dispatcher was closed" in account.message
    assert account.took_s < 8.0


# -- races ------------------------------------------------------------------------------------------------------------


@contextmanager
def _delayed(seed: int) -> Iterator[None]:
    """Let this rank fall behind at random, before and behind everything that it waits for or tells."""
    draw = random.Random(seed)

    def late(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **options: Any) -> Any:
            time.sleep(draw.choice((0.0, 0.0, 0.0, 0.001, 0.004)))
            result = act(*args, **options)
            time.sleep(draw.choice((0.0, 0.0, 0.0, 0.001, 0.004)))
            return result

        return acting

    modules = (combine, dispatch, move, publish, scalars, small_combine, small_dispatch, symmetric_transport)
    names = ("launch", "launch_wait", "launch_tell", "launch_wait_small")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module, name in itertools.product(modules, names):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, late(getattr(module, name)))
        yield


def _step_with_backward(dispatcher: cd.TokenDispatcher, generator: torch.Generator) -> None:
    """One layer forward and backward; small integers, so every sum is exact and known."""
    rank, top_k, num_experts = dispatcher.ep_rank, dispatcher.config.top_k, dispatcher.config.num_experts
    draws = [  # of all ranks, since every rank draws the same
        (int(torch.randint(0, 9, (1,), generator=generator)), int(torch.randint(0, 2**30, (1,), generator=generator)))
        for _ in range(dispatcher.ep_size)
    ]
    num_tokens, seed = draws[rank]
    own = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (num_tokens, 8), generator=own).float().requires_grad_()
    scores = torch.randint(1, 4, (num_tokens, top_k), generator=own).float().requires_grad_()
    ids = torch.randint(-1, num_experts, (num_tokens, top_k), generator=own)
    grad = torch.randint(-4, 5, (num_tokens, 8), generator=own).float()
    routed = dispatcher.dispatch(x, scores, ids)
    expert = torch.searchsorted(routed.expert_offsets, torch.arange(routed.rows.shape[0]), right=True)
    scale = (1 + rank * dispatcher.num_local_experts + expert).float().unsqueeze(1)
    out = dispatcher.combine(routed.rows * scale, routed.handle)
    out.backward(grad)
    factor = (ids + 1).float()  # 0 where there is no expert
    total = (scores.detach() * factor).sum(1, keepdim=True)
    assert torch.equal(out.detach(), total * x.detach())
    assert x.grad is not None and torch.equal(x.grad, total * grad)
    assert scores.grad is not None and torch.equal(scores.grad, factor * (x.detach() * grad).sum(1, keepdim=True))


def _race(rank: int, num_steps: int) -> int:
    generator = torch.Generator().manual_seed(7)
    with (
        _delayed(seed=rank),
        opened(timeout_s=60.0) as fast,
        opened(timeout_s=60.0, **_SMALL) as small,
        opened(timeout_s=60.0, reduction="exact", expert_alignment=4) as exact,
    ):
        for dispatcher in itertools.islice(itertools.cycle((fast, small, fast, exact)), num_steps):
            _step_with_backward(dispatcher, generator)
        return sum(dispatcher.stats().calls for dispatcher in (fast, small, exact))


@pytest.mark.timeout(1100)
@pytest.mark.full  # what dawdles in test_symmetric_stress.py comes to this as well
def test_ranks_that_fall_behind_at_random_change_no_bit(ranks: Ranks, full: bool):
    num_steps = 2500 if full else 32
    assert ranks(2).run(_race, num_steps, timeout_s=1000.0 if full else 100.0) == [4 * num_steps] * 2
