"""Ranks that call different things: a `ContractViolation` on every rank, at once, that names the ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.testing import RankPool
from tests.conftest import Ranks
from tests.faults.play import LAYER, Account, Batch, assert_named, config, experts, observe, reopen, step

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def routed_once(dispatcher: cd.TokenDispatcher, **options: Any) -> tuple[cd.Dispatched, torch.Tensor]:
    batch = Batch.of(dispatcher.ep_rank, 5)
    routed = dispatcher.layer(LAYER).dispatch(batch.x, batch.scores, batch.ids, **options)
    return routed, experts(dispatcher, routed)


def skips_combine(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    routed, rows = routed_once(dispatcher)
    if differs:
        routed_once(dispatcher)
    else:
        dispatcher.layer(LAYER).combine(rows, routed.handle)


def names_another_layer(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    step(dispatcher, layer="blocks.8.moe" if differs else LAYER)


def names_a_long_layer(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    step(dispatcher, layer="decoder." * 8 + ("b" if differs else "a"))


def bounds_otherwise(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    step(dispatcher, num_tokens_per_rank=16 if differs else 8)


def leaves_the_bound_out(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    step(dispatcher, num_tokens_per_rank=None if differs else 8)


def turns_grad_off(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    with torch.set_grad_enabled(not differs):
        step(dispatcher)


def turns_grad_off_between(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    routed, rows = routed_once(dispatcher)
    with torch.set_grad_enabled(not differs):
        dispatcher.layer(LAYER).combine(rows, routed.handle)


def leaves_scores_to_experts(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    step(dispatcher, apply_scores=not differs)


def is_a_step_ahead(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    routed, rows = routed_once(dispatcher)
    if not differs:
        dispatcher.layer(LAYER).combine(rows, routed.handle)
        routed_once(dispatcher)
    else:  # takes its second dispatch for the third call
        routed_once(dispatcher)


def runs_backward(dispatcher: cd.TokenDispatcher, differs: bool) -> None:
    routed, rows = routed_once(dispatcher)
    out = dispatcher.layer(LAYER).combine(rows, routed.handle)
    if differs:
        out.sum().backward()
    else:
        routed_once(dispatcher)


# What the ranks at fault do, the call in which it shows, and what the message says of it.
DIFFERENCES: dict[Callable[[cd.TokenDispatcher, bool], None], tuple[str, ...]] = {
    skips_combine: ("call 3 (combine of", "operation is combine on ranks", "dispatch on ranks"),
    is_a_step_ahead: ("call 3 (combine of", "operation is combine on ranks", "dispatch on ranks"),
    runs_backward: ("call 4 (dispatch of", "operation is dispatch on ranks", "combine_backward on ranks"),
    names_another_layer: ("call 2 (dispatch of", "layer is 'blocks.7.moe' on ranks", "'blocks.8.moe' on ranks"),
    names_a_long_layer: ("call 2 (dispatch of", "decoder.a' on ranks", "decoder.b' on ranks"),
    bounds_otherwise: ("call 2 (dispatch of", "num_tokens_per_rank is 8 on ranks", "16 on ranks"),
    leaves_the_bound_out: ("call 2 (dispatch of", "num_tokens_per_rank is 8 on ranks", "left out on ranks"),
    turns_grad_off: ("call 2 (dispatch of", "grad mode is enabled on ranks", "disabled on ranks"),
    turns_grad_off_between: ("call 3 (combine of", "grad mode is enabled on ranks", "disabled on ranks"),
    leaves_scores_to_experts: ("call 3 (combine of", "apply_scores is True on ranks", "False on ranks"),
}


def differing(rank: int, at_fault: tuple[int, ...], act: Callable[[cd.TokenDispatcher, bool], None]) -> Account:
    dispatcher = cd.TokenDispatcher(config())
    step(dispatcher)
    return reopen(observe(dispatcher, lambda: act(dispatcher, rank in at_fault)))


@pytest.mark.parametrize("at_fault", [(2,), (1, 3)], ids=str)
@pytest.mark.parametrize("act", DIFFERENCES, ids=lambda act: act.__name__)
def test_calls_that_differ(four: RankPool, act: Callable[[cd.TokenDispatcher, bool], None], at_fault: tuple[int, ...]):
    accounts = dict(enumerate(four.run(differing, at_fault, act)))
    assert_named(
        accounts,
        at_fault,
        "ContractViolation",
        LAYER[:6] if "long" not in act.__name__ else "decoder.",
        *DIFFERENCES[act],
        limit_s=5.0,
    )
    assert all(account.reopened for account in accounts.values())
    assert len({account.message for account in accounts.values()}) == 1


def test_two_ranks_that_differ_in_two_ways(four: RankPool):
    accounts = dict(enumerate(four.run(differing_each)))
    assert_named(
        accounts,
        (1, 2),
        "ContractViolation",
        "num_tokens_per_rank is 8 on ranks [0, 3], 16 on ranks [1], left out on ranks [2]",
        limit_s=5.0,
    )


def differing_each(rank: int) -> Account:
    dispatcher = cd.TokenDispatcher(config())
    bound = (8, 16, None, 8)[rank]
    return observe(dispatcher, lambda: step(dispatcher, num_tokens_per_rank=bound))


# -- equal_token_counts (B07), num_tokens_per_rank (B08) --------------------------------------------------------------


def declared_equal(rank: int, num_tokens: list[int], backend: str, settings: dict[str, Any]) -> Account:
    dispatcher = cd.TokenDispatcher(config(equal_token_counts=True, **settings), backend=backend)
    for _ in range(3):
        step(dispatcher, num_tokens=8)
    before = dispatcher.stats().sent_bytes
    step(dispatcher, num_tokens=8)
    assert dispatcher.stats().sent_bytes > before
    return reopen(observe(dispatcher, lambda: step(dispatcher, num_tokens=num_tokens[rank])))


def assert_declaration_named(accounts: list[Account], at_fault: tuple[int, ...]) -> None:
    told = ("equal_token_counts=True", "8 on ranks", "5 on ranks", LAYER, "call 8 (dispatch")
    assert_named(dict(enumerate(accounts)), at_fault, "ContractViolation", *told, limit_s=5.0)


@pytest.mark.parametrize("capacity", [cd.RowCapacity.exact(), cd.RowCapacity.worst_case(), cd.RowCapacity.rows(64)])
@pytest.mark.parametrize(("num_tokens", "at_fault"), [([8, 8, 8, 5], (3,)), ([8, 5, 4, 8], (1, 2))])
def test_counts_declared_equal_are_not(
    four: RankPool, num_tokens: list[int], at_fault: tuple[int, ...], capacity: cd.RowCapacity
):
    accounts = four.run(declared_equal, num_tokens, "all_to_all", {"row_capacity": capacity})
    assert_declaration_named(accounts, at_fault)


@pytest.mark.parametrize(
    ("capacity", "max_tokens"),
    [(cd.RowCapacity.exact(), 32), (cd.RowCapacity.worst_case(), 32), (cd.RowCapacity.worst_case(), 600)],
    ids=["exact", "small batches", "sync-free"],
)
def test_counts_declared_equal_are_not_on_symmetric(ranks: Ranks, capacity: cd.RowCapacity, max_tokens: int):
    settings = {"num_experts": 4, "row_capacity": capacity, "num_max_tokens_per_rank": max_tokens, "timeout_s": 20.0}
    assert_declaration_named(ranks(2).run(declared_equal, [8, 5], "symmetric", settings), (1,))


def mixed_bounds(rank: int) -> tuple[str, tuple[int, ...]]:
    with cd.TokenDispatcher(config()) as dispatcher:
        account = observe(
            dispatcher, lambda: step(dispatcher, num_tokens=8 - 3 * rank, num_tokens_per_rank=8 - 3 * rank)
        )
    with cd.TokenDispatcher(config()) as dispatcher:
        step(dispatcher, num_tokens=8 - 3 * rank, num_tokens_per_rank=8)
    return account.error, account.ranks


def test_bounds_of_two_ranks_differ_then_agree(ranks: Ranks):
    assert ranks(2).run(mixed_bounds) == [("ContractViolation", (1,))] * 2


# -- a call that one rank refuses (B76) -------------------------------------------------------------------------------


def refused_now_and_then(rank: int, at_fault: tuple[int, ...]) -> int:
    refusals = 0
    with cd.TokenDispatcher(config()) as dispatcher:
        for turn in range(7):
            if rank in at_fault and turn % 3 == 0:
                refusals += refuses(dispatcher, turn)
            step(dispatcher, num_tokens=turn)
        assert dispatcher.stats().calls == 14
    return refusals


def refuses(dispatcher: cd.TokenDispatcher, turn: int) -> int:
    batch = Batch.of(dispatcher.ep_rank, 4)
    wrong_calls: tuple[Callable[[], object], ...] = (
        lambda: dispatcher.dispatch(batch.x[:3], batch.scores, batch.ids),
        lambda: dispatcher.dispatch(batch.x, batch.scores, batch.ids + 100),
        lambda: dispatcher.dispatch(batch.x, batch.scores, batch.ids, num_tokens_per_rank=3),
        lambda: dispatcher.dispatch(batch.x.double(), batch.scores, batch.ids),
    )
    for call in wrong_calls:
        with pytest.raises(cd.InvalidInput):
            call()
    return len(wrong_calls)


@pytest.mark.parametrize("at_fault", [(0,), (1, 3)], ids=str)
def test_a_refused_call_leaves_the_numbering_in_step(four: RankPool, at_fault: tuple[int, ...]):
    assert four.run(refused_now_and_then, at_fault) == [12 if rank in at_fault else 0 for rank in range(4)]
