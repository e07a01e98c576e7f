"""The kernels of the symmetric backend as a GPU runs them, waiting and telling by themselves, in the interpreter.

There the programs of a launch run one after the other. So those that wait for each other within a launch are one here,
and those that tell come before those that wait. Those that push therefore end before anybody has arranged, and never
help to spread (`have_come` says no): that runs on GPUs only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import crossdock as cd
from crossdock.backends.base import Call, Link, Received, TransportFault, TransportSpec, Weights
from crossdock.backends.local import LocalTransport
from crossdock.group.fingerprint import CallFacts
from crossdock.group.members import Members
from crossdock.testing import assert_bit_equal
from tests.conftest import Ranks

pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")

from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder

from crossdock.backends.symmetric import SymmetricBackend
from crossdock.backends.symmetric.plan import Plan
from crossdock.backends.symmetric.transport import SymmetricTransport
from crossdock.kernels import dispatch, scalars, signal
from crossdock.kernels.blocks import Tile
from crossdock.kernels.signal import (
    ABORT,
    ABORTED,
    ARRIVALS,
    BAD_IDS,
    BEGUN,
    DESK_BEGUN,
    DESK_CALL,
    DESK_CODE,
    DESK_ENDED,
    ENDED,
    GIVEN_UP,
    LAST_TARGET,
    NUM_SENT,
    READ,
    ROUND,
    ROUND_SHIFT,
    STAGING,
)
from crossdock.ledger import DeviceLedger, Entry
from crossdock.memory.block import Block
from crossdock.memory.workspace import Workspace
from crossdock.types import OnOverflow
from tests.kernels.symmetric_ranks import together

TOP_K, HIDDEN, MAX_TOKENS, EXPERTS = 3, 24, 70, 4
CPU = torch.device("cpu")


@contextmanager
def as_on_a_gpu(*, alone: bool = False, small: bool = False) -> Iterator[None]:
    """Kernels that wait and tell, several programs a launch wherever none waits for a later one, several chunks.

    With `alone` one program does it all, with `small` that of the kernels for small batches.
    """
    programs = {"push": 3, "spread": 1, "give": 4, "take": 5, "weigh": 3}
    if alone:
        programs = {"push": 1, "spread": 0, "give": 1, "take": 0, "weigh": 1}
    tiles: dict[str, Any] = {name: Tile(4, 16, number, 2) for name, number in programs.items()}
    plan_of = Plan.of

    def plan(cls: type[Plan], spec: TransportSpec, device: torch.device) -> Plan:
        return plan_of(spec, device)._replace(
            chunk_len=16, arrangers=1, small=int(small), others=1 if alone else 64, **tiles
        )

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(signal.Board, "fused", property(lambda board: True))
        monkeypatch.setattr(Plan, "of", classmethod(plan))
        monkeypatch.setattr(scalars, "_MAX_PROGRAMS", 1)
        monkeypatch.setattr(scalars, "_CUDA_BLOCK", 16)
        monkeypatch.setattr(dispatch, "routing_block", lambda *_: 8)
        yield


@pytest.fixture
def fused() -> Iterator[None]:
    with as_on_a_gpu():
        yield


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every word that kernels tell, as its address and what it becomes, in order."""
    words: list[tuple[int, int]] = []
    original = InterpreterBuilder.create_atomic_rmw

    def noting(builder: Any, operation: Any, ptr: Any, value: Any, mask: Any, *order: Any) -> Any:
        if operation == ir.ATOMIC_OP.XCHG:
            known = mask.data.astype(bool)
            words.extend(zip(ptr.data[known].tolist(), value.data[known].tolist(), strict=True))
        return original(builder, operation, ptr, value, mask, *order)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", noting)
    return words


# -- one rank ---------------------------------------------------------------------------------------------------------


def _call(number: int, operation: str = "dispatch", bound: int = -1) -> Call:
    facts = CallFacts(number, operation, "", num_tokens_per_rank=bound)
    return Call(facts=facts, words=tuple(facts.words()), verify=lambda words: None)


def _spec(**changes: Any) -> TransportSpec:
    facts: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_dim": HIDDEN,
        "dtype": torch.bfloat16,
        "num_max_tokens_per_rank": MAX_TOKENS,
        "expert_alignment": 1,
        "reduction": "fast",
        "num_sms": None,
        "timeout_s": 20.0,
        "rank": 0,
        "ep_size": 1,
    }
    return TransportSpec(**(facts | changes))


def _opened(spec: TransportSpec) -> SymmetricTransport:
    link = Link(members=Members(0, (0,), CPU, "none"), store_prefix="", on_expiry=lambda _: None)
    return SymmetricTransport(spec, link, CPU)


def _assert_settled(transport: SymmetricTransport, rounds: dict[int, int], call: int) -> None:
    """Every counter is back at zero, every round is counted and read, and the host sees that nothing waits."""
    board = transport.rounds.board
    state, desk = board.state.tolist(), board.desk.tolist()
    assert {place: state[place] for place in rounds} == rounds
    assert not any(state[ARRIVALS:]) and not any(state[place] for place in (BAD_IDS, NUM_SENT, GIVEN_UP))
    assert state[BEGUN] == state[ENDED] == desk[DESK_BEGUN] == desk[DESK_ENDED] > 0
    assert (desk[DESK_CODE], desk[DESK_CALL]) == (0, call)
    assert board.signals[READ].tolist() == [rounds[ROUND] << ROUND_SHIFT]


def _problem(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    scores = torch.rand(num_tokens, TOP_K, generator=generator)
    return x, scores, torch.randint(-1, EXPERTS, (num_tokens, TOP_K), generator=generator)


@pytest.mark.parametrize(
    ("capacity", "alignment", "reduction"),
    [(None, 1, "fast"), (None, 8, "exact"), (400, 8, "fast"), (48, 8, "exact"), (48, 1, "fast")],
)
@pytest.mark.parametrize(
    "num_tokens", [0, pytest.param(7, marks=pytest.mark.full), 33, pytest.param(MAX_TOKENS, marks=pytest.mark.full)]
)
def test_one_rank_does_what_permuting_does(fused, told, num_tokens, capacity, alignment, reduction):
    _compare_with_permuting(num_tokens, capacity, alignment, reduction, told)


@pytest.mark.parametrize(("capacity", "reduction"), [(400, "fast"), (None, "exact")])
def test_so_does_one_program_alone(told, capacity, reduction):
    with as_on_a_gpu(alone=True):
        _compare_with_permuting(33, capacity, 8, reduction, told)


def _compare_with_permuting(
    num_tokens: int, capacity: int | None, alignment: int, reduction: str, told: list[tuple[int, int]]
) -> None:
    spec = _spec(expert_alignment=alignment, reduction=reduction)
    kind = cd.RowCapacity.exact() if capacity is None else cd.RowCapacity.rows(capacity)
    transport, local = _opened(spec), LocalTransport(dataclasses.replace(spec, row_capacity=kind))
    x, scores, ids = _problem(num_tokens, spec.dtype)
    # So few tokens that the columns of a row are shared among programs, or more places than tokens.
    bound = 7 if num_tokens == 7 else -1
    actual = transport.dispatch(x, scores, ids, capacity, _call(0, bound=bound))
    expected = local.dispatch(x, scores, ids, capacity, _call(0))
    _assert_settled(transport, {ROUND: 1, STAGING: 1}, call=0)
    filled = int(expected.expert_offsets[-1])
    for name in ("tokens_per_expert", "expert_offsets"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert torch.equal(actual.demand.wanted, expected.demand.wanted) and actual.demand.bad_ids.tolist() == [0]
    assert actual.rows.shape == expected.rows.shape
    assert_bit_equal(actual.rows[:filled], expected.rows[:filled], "rows")
    assert actual.kept_scores is not None
    for scores_of_rows in (actual.row_scores, actual.kept_scores):
        assert_bit_equal(scores_of_rows[:filled], expected.row_scores[:filled], "scores of rows")

    again = transport.rows_out(-x, actual.layout, _call(1, "combine_backward"))
    assert_bit_equal(again[:filled], local.rows_out(-x, expected.layout, _call(1))[:filled], "rows along the layout")
    home = transport.scalars_home(actual.row_scores, actual.layout, None)
    assert_bit_equal(home, local.scalars_home(expected.row_scores, expected.layout, None), "scalars")
    _assert_settled(transport, {ROUND: 3, STAGING: 3}, call=1)

    for number, weighted in ((2, True), (3, False)):
        weights = Weights(scores, actual.row_scores) if weighted else None
        out = transport.rows_home(actual.rows, weights, actual.layout, _call(number, "combine"))
        weights = Weights(scores, expected.row_scores) if weighted else None
        assert_bit_equal(out, local.rows_home(expected.rows, weights, expected.layout, _call(number)), "sums")
    both = transport.dispatch_backward(actual.rows, actual.row_scores, actual.layout, _call(4, "dispatch_backward"))
    for grads, wanted in zip(both, (out, home), strict=True):  # the last combine had no weights either
        assert_bit_equal(grads, wanted, "gradients")
    rounds = 3 if reduction == "fast" else 3 * TOP_K + 1
    _assert_settled(transport, {ROUND: 3 + rounds, STAGING: 3 + rounds}, call=4)
    # Whatever counts too few programs tells too early, and then once more.
    assert len(told) == len(set(told)) >= (3 + rounds) * 2
    transport.close()


def _assert_entered(transport: SymmetricTransport, limits: tuple[int, ...], bound: int) -> None:
    """What a kernel enters into an account is what a launch of its own enters for the same dispatches."""
    of_kernel, by_itself = (DeviceLedger(transport.spec.expert_alignment, EXPERTS, CPU) for _ in range(2))
    x, scores, ids = _problem(33, torch.bfloat16)
    ids[3, 1] = EXPERTS + 2
    policies: tuple[OnOverflow, ...] = ("raise", "skip_step", "drop")
    for number, capacity in enumerate(limits):
        layer, policy = f"layer {number % 2}", policies[number % 3]
        call = _call(number, bound=bound)._replace(account=of_kernel.account(layer, policy))
        got = transport.dispatch(x, scores, ids, capacity, call)
        counts = (got.demand.wanted, got.tokens_per_expert, got.expert_offsets, got.demand.bad_ids)
        end = by_itself.enter(Entry(layer, 33, capacity, *counts, bound, policy))
        assert got.rows_end is not None and got.rows_end.tolist() == end.tolist() == [int(got.expert_offsets[-1])]
    assert of_kernel.words().tolist() == by_itself.words().tolist()
    assert (of_kernel.trouble(), of_kernel.told()) == (by_itself.trouble(), by_itself.told())
    assert of_kernel.trouble().overflows == 1 and of_kernel.trouble().bad_ids == len(limits)
    assert of_kernel.overflowed.tolist() == by_itself.overflowed.tolist() == [1.0]


@pytest.mark.parametrize("small", [False, True], ids=["general", "small"])
def test_a_dispatch_is_entered_where_it_is_counted(small):
    capacity = cd.RowCapacity.worst_case()
    with as_on_a_gpu(small=small):
        transport = _opened(_spec(expert_alignment=8, row_capacity=capacity))
        assert (transport._small_inbox is not None) == small
        _assert_entered(transport, (48, 400, 48, 200, 400), bound=MAX_TOKENS)
        transport.close()


def test_ids_outside_the_range_are_counted_and_the_next_call_works(fused):
    transport = _opened(_spec())
    x, scores, ids = _problem(33, torch.bfloat16)
    ids[2, 1], ids[30, 0], ids[32, 2] = EXPERTS, -2, 2**40
    with pytest.raises(cd.InvalidInput, match="3 on rank 0; no row was moved"):
        transport.dispatch(x, scores, ids, None, _call(0))
    _assert_settled(transport, {ROUND: 1, STAGING: 1}, call=0)
    received = transport.dispatch(x, scores, ids, 200, _call(0))
    assert received.demand.bad_ids.tolist() == [3]
    assert int(received.tokens_per_expert.sum()) == int(((ids >= 0) & (ids < EXPERTS)).sum())
    _assert_settled(transport, {ROUND: 2, STAGING: 2}, call=0)
    assert transport.agree_max(27, _call(0)) == 27
    assert transport.dispatch(x, scores, ids.clamp(-1, EXPERTS - 1), None, _call(1)).demand.bad_ids.tolist() == [0]
    _assert_settled(transport, {ROUND: 4, STAGING: 4}, call=1)
    transport.close()


def _differ_with_little_room(rank: int) -> str:
    """Rank 1 combines where rank 0 dispatches: in the place of its routing stands what asks for too many rows."""
    config = cd.DispatcherConfig(
        num_experts=4, top_k=2, hidden_dim=HIDDEN, dtype=torch.float32, num_max_tokens_per_rank=600, timeout_s=10.0,
        row_capacity=cd.RowCapacity.balanced(1.0),
    )  # fmt: skip
    ids = torch.tensor([[0, 1]] * 8 + [[2, 3]] * 8)  # the first 8 tokens of either rank go to rank 0
    with as_on_a_gpu(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("crossdock.accounts.open_ledger", DeviceLedger)
        dispatcher = cd.TokenDispatcher(config, backend="symmetric")
        for _ in range(2):
            routed = dispatcher.dispatch(torch.ones(16, HIDDEN), torch.ones(16, 2), ids, num_tokens_per_rank=16)
        try:
            if rank == 0:
                dispatcher.dispatch(torch.ones(4, HIDDEN), torch.ones(4, 2), ids[6:10], num_tokens_per_rank=4)
            else:
                dispatcher.combine(routed.rows, routed.handle)
            dispatcher.check()
        except cd.CrossdockError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dispatcher.close()
    return "nothing was noticed"


def test_what_is_counted_behind_a_wait_that_was_given_up_is_no_overflow(ranks: Ranks):
    for told in ranks(2).run(_differ_with_little_room, timeout_s=60.0):
        assert told.startswith("ContractViolation: ranks [1] made another call"), told


# -- waits that are given up ------------------------------------------------------------------------------------------


class _BlockHere(Block):
    """The blocks of two ranks of this process."""

    def __init__(self, blocks: list[torch.Tensor]) -> None:
        self._blocks = blocks

    def of_rank(self, rank: int) -> torch.Tensor:
        return self._blocks[rank]

    def close(self) -> None:
        pass


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[SymmetricTransport], list[torch.Tensor]]]:
    """Transports of two ranks in this process, and the blocks of bytes that are all they share."""
    spec = _spec(ep_size=2)
    blocks = [torch.zeros(SymmetricBackend.workspace_bytes(spec), dtype=torch.uint8) for _ in range(2)]

    def open_here(buffers: Any, members: Members, *rest: Any) -> Workspace:
        return Workspace(buffers, _BlockHere(blocks), range(2), members.rank)

    monkeypatch.setattr(Workspace, "open", open_here)
    transports = [
        SymmetricTransport(
            _spec(ep_size=2, rank=rank),
            Link(members=Members(rank, (0, 1), CPU, "none"), store_prefix="", on_expiry=lambda _: None),
            CPU,
        )
        for rank in (0, 1)
    ]
    yield transports, blocks
    for transport in transports:
        transport.close()


def _floats(received: Received) -> list[torch.Tensor]:
    assert received.kept_scores is not None
    return [received.rows, received.row_scores, received.kept_scores]


def _tokens_of(there: Received) -> torch.Tensor:
    """As many rows as that dispatch had tokens."""
    return _problem(18, torch.bfloat16)[0][: there.layout[2].shape[0]]


_ACTS: dict[str, Callable[[SymmetricTransport, Received, Call], list[torch.Tensor]]] = {
    "dispatch": lambda at, there, call: _floats(at.dispatch(*_problem(18, torch.bfloat16), len(there.rows), call)),
    "rows_out": lambda at, there, call: [at.rows_out(_tokens_of(there), there.layout, call)],
    "rows_home": lambda at, there, call: [at.rows_home(there.rows, None, there.layout, call)],
    "scalars_home": lambda at, there, call: [at.scalars_home(there.row_scores, there.layout, call)],
    "dispatch_backward": lambda at, there, call: [
        *at.dispatch_backward(there.rows, there.row_scores, there.layout, call)
    ],
    "combine_backward": lambda at, there, call: [
        *at.combine_backward(_tokens_of(there), there.rows, there.row_scores, there.layout, call)
    ],
}


@pytest.mark.parametrize("name", ["rows_out", "rows_home", "scalars_home", "dispatch_backward", "combine_backward"])
def test_a_round_without_tokens_waits_for_all_ranks_too(pair, name):
    """Else a rank would run ahead of its peers, or never learn that they have made another call."""
    (own, peer), _ = pair
    nothing = torch.zeros(0, HIDDEN, dtype=torch.bfloat16), torch.zeros(0, TOP_K), torch.zeros(0, TOP_K).long()
    there, _ = together(
        [own.rounds.board, peer.rounds.board],
        lambda board: (own, peer)[board.rank].dispatch(*nothing, None, _call(0, bound=0)),
    )
    assert there.layout[0].shape == (2, 0, TOP_K)
    with as_on_a_gpu():
        own.plan = Plan.of(own.spec, CPU)
        own.rounds.board.state[ABORT] = 1  # or it would wait for ever
        if name == "rows_out":
            own.rows_out(nothing[0], there.layout, _call(1))
        else:
            _ACTS[name](own, there, _call(1))
    assert int(own.rounds.board.desk[DESK_CODE]) == ABORTED and int(own.rounds.board.state[LAST_TARGET]) == 2


@pytest.mark.parametrize("name", _ACTS)
def test_what_follows_a_wait_that_was_given_up_is_nan_and_touches_no_shared_memory(pair, name):
    """Rank 1 does not come to the second call; more of rank 0's calls are under way, as in a graph that is replayed."""
    (own, peer), blocks = pair
    there, _ = together(
        [own.rounds.board, peer.rounds.board],
        lambda board: (own, peer)[board.rank].dispatch(*_problem(18, torch.bfloat16), 150, _call(0)),
    )
    board = own.rounds.board
    board.state[BEGUN] = board.state[ENDED]  # which a CPU's waits do not count
    board.state[ABORT] = 1  # the watch's word, which it would set some time later
    with as_on_a_gpu():
        own.plan = Plan.of(own.spec, CPU)
        outputs = _ACTS[name](own, there, _call(1))
        state, desk = board.state.tolist(), board.desk.tolist()
        assert (state[GIVEN_UP], desk[DESK_CODE], desk[DESK_CALL]) == (ABORTED, ABORTED, 1)
        assert state[LAST_TARGET] == 2 and peer.workspace.own["signals"][READ, 0] == 1 << ROUND_SHIFT
        with pytest.raises(TransportFault, match="peers did not come within 20 s"):
            own.look()
        before = [block.clone() for block in blocks]
        own.rounds.look = lambda: None  # what is under way was launched before the host knew
        names = list(_ACTS)
        for later in (name, names[names.index(name) - 1]):
            outputs += _ACTS[later](own, there, _call(2))
    assert all(bool(out.isnan().all()) for out in outputs)
    assert [torch.equal(block, earlier) for block, earlier in zip(blocks, before, strict=True)] == [True, True]
    state, desk = board.state.tolist(), board.desk.tolist()
    assert state[BEGUN] == state[ENDED] == desk[DESK_BEGUN] == desk[DESK_ENDED] and not any(state[ARRIVALS:])


# -- two ranks --------------------------------------------------------------------------------------------------------

_CELLS: list[dict[str, Any]] = [
    {"dtype": torch.float32, "reduction": "fast"},
    {"dtype": torch.bfloat16, "reduction": "exact", "expert_alignment": 16},
    {"dtype": torch.bfloat16, "reduction": "fast", "row_capacity": cd.RowCapacity.worst_case()},
    {"dtype": torch.float16, "reduction": "exact", "expert_alignment": 4, "row_capacity": cd.RowCapacity.balanced(1.5)},
]


_LARGEST_TERM = 2.0**9  # of a score's gradient: a row's element, of a normal one doubled, times up to HIDDEN


class _Results(NamedTuple):
    """Of one step, behind the last offset cut off."""

    rows: torch.Tensor
    row_scores: torch.Tensor
    out: torch.Tensor
    grad_x: torch.Tensor
    grad_scores: torch.Tensor
    tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor

    def differing(self, other: _Results) -> list[str]:
        """Names of what has other bits; gradients of scores are dots, each added up in an order of its own."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in self._fields}
        ours, theirs = pairs.pop("grad_scores")
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=HIDDEN * 2.0**-24 * _LARGEST_TERM)
        return [name for name, (mine, its) in pairs.items() if mine.shape != its.shape or not torch.equal(mine, its)]


def _steps(config: cd.DispatcherConfig, backend: str, rank: int, counts: tuple[int, int]) -> list[_Results]:
    """Two steps, the second with the counts of the other rank."""
    found = []
    with cd.TokenDispatcher(config, backend=backend) as dispatcher:
        for number, num_tokens in enumerate((counts[rank], counts[1 - rank])):
            generator = torch.Generator().manual_seed(2 * number + rank)
            x = torch.randn(num_tokens, HIDDEN, generator=generator).to(config.dtype).requires_grad_()
            scores = torch.rand(num_tokens, TOP_K, generator=generator).requires_grad_()
            ids = torch.randint(-1, config.num_experts, scores.shape, generator=generator)
            routed = dispatcher.dispatch(x, scores, ids)
            out = dispatcher.combine(routed.rows * 2, routed.handle)
            grads = torch.autograd.grad((out.float() * torch.arange(HIDDEN)).sum(), (x, scores))
            filled = int(routed.expert_offsets[-1])
            parts = (routed.rows[:filled], routed.scores[:filled], out, *grads)
            results = (*parts, routed.tokens_per_expert, routed.expert_offsets)
            found.append(_Results(*(part.detach().clone() for part in results)))
    return found


def _compare(rank: int, cell: dict[str, Any], counts: tuple[int, int]) -> list[str]:
    config = cd.DispatcherConfig(
        num_experts=8,
        top_k=TOP_K,
        hidden_dim=HIDDEN,
        num_max_tokens_per_rank=40,
        timeout_s=30.0,
        on_overflow="drop",
        **cell,
    )
    expected = _steps(config, "all_to_all", rank, counts)
    with as_on_a_gpu():
        actual = _steps(config, "symmetric", rank, counts)
    return [name for got, wanted in zip(actual, expected, strict=True) for name in got.differing(wanted)]


# Tokens of both ranks: as many as there may be, more than a chunk holds, and none at all.
_COUNTS = [
    (_CELLS[0], (18, 9)),
    (_CELLS[1], (0, 18)),
    (_CELLS[2], (40, 17)),
    (_CELLS[2], (0, 18)),
    (_CELLS[3], (18, 9)),
]
_MORE_COUNTS = [*((cell, (40, 17)) for cell in (*_CELLS[:2], _CELLS[3])), *((cell, (0, 33)) for cell in _CELLS[1:3])]


@pytest.mark.parametrize(
    ("cell", "counts"),
    [*_COUNTS, *(pytest.param(*each, marks=pytest.mark.full) for each in (*_MORE_COUNTS, (_CELLS[2], (18, 9, 0, 33))))],
    ids=lambda value: "-".join(map(str, value.values() if isinstance(value, dict) else value)),
)
def test_ranks_give_the_bits_of_all_to_all(ranks: Ranks, cell: dict[str, Any], counts: tuple[int, ...]):
    assert not any(ranks(len(counts)).run(_compare, cell, counts, timeout_s=100.0))
