"""Small batches: one kernel for a dispatch and one for a combine give the bits of the general kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

import crossdock as cd
from crossdock.backends.base import Call, Link, Received, TransportFault, TransportSpec, Weights
from crossdock.backends.symmetric.buffers import buffers_of
from crossdock.backends.symmetric.transport import SymmetricLayout, SymmetricTransport
from crossdock.group.fingerprint import CallFacts
from crossdock.group.members import Members
from crossdock.kernels.signal import (
    ARRIVED_SMALL,
    BROUGHT,
    DESK_BEGUN,
    DESK_CODE,
    DESK_ENDED,
    DIFFERS,
    GIVEN_UP,
    INBOX,
    LEFT,
    ROUND,
    Board,
)
from crossdock.kernels.small import fits_small, places_of, spread
from crossdock.memory.block import Block
from crossdock.memory.workspace import Workspace, place_buffers
from crossdock.testing import assert_bit_equal
from crossdock.types import RowCapacity
from tests.conftest import Ranks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_DRAWN = settings().max_examples // 3  # a case launches dozens of kernels, each of them interpreted


# -- ranks in one process ---------------------------------------------------------------------------------------------


class Blocks(Block):
    """All ranks' memory, in one process."""

    def __init__(self, blocks: Sequence[torch.Tensor]) -> None:
        self._blocks = blocks

    def of_rank(self, rank: int) -> torch.Tensor:
        return self._blocks[rank]

    def close(self) -> None:
        """Nothing is mapped."""


def spec_of(ep_size: int, **changes: Any) -> TransportSpec:
    facts: dict[str, Any] = {
        "num_experts": 2 * ep_size, "top_k": 2, "hidden_dim": 8, "dtype": torch.float32, "num_max_tokens_per_rank": 8,
        "expert_alignment": 1, "reduction": "fast", "num_sms": None, "timeout_s": 20.0, "rank": 0, "ep_size": ep_size,
        "row_capacity": RowCapacity.worst_case(),
    }  # fmt: skip
    return TransportSpec(**(facts | changes))


class Team:
    """Transports of all ranks of a group, a thread each. What their memory holds at first is never right."""

    def __init__(self, spec: TransportSpec) -> None:
        num_bytes = place_buffers(buffers_of(spec))[1]
        blocks = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(spec.ep_size)]

        def opened(buffers: Any, members: Members, *_: Any) -> Workspace:
            return Workspace(buffers, Blocks(blocks), range(spec.ep_size), members.rank)

        self.ranks: list[SymmetricTransport] = []
        self.calls = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Workspace, "open", opened)
            for number in range(spec.ep_size):
                members = Members(number, tuple(range(spec.ep_size)), CPU, "none")
                link = Link(members=members, store_prefix="", on_expiry=lambda _: None)
                own = TransportSpec(**{**vars(spec), "rank": number})
                self.ranks.append(SymmetricTransport(own, link, CPU))
        for rank in self.ranks:
            for name, buffer in rank.workspace.own.items():
                if name not in ("signals", "notes"):
                    buffer.fill_(3)

    def take(self, *, small: bool) -> None:
        """Which kernels serve from now on."""
        for rank in self.ranks:
            rank.plan = rank.plan._replace(small=int(small))

    def run(self, act: Callable[[SymmetricTransport, Call], Any], operation: str, bound: int = -1) -> list[Any]:
        """What `act` gives on every rank."""
        facts = CallFacts(self.calls, operation, "", num_tokens_per_rank=bound)
        self.calls += 1
        call = Call(facts=facts, words=tuple(facts.words()), verify=lambda words: None)
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(lambda rank: act(rank, call), self.ranks))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class Batch(NamedTuple):
    """What ranks bring, by rank: `[T, D]`, `[T, K]` float32, `[T, K]`."""

    x: list[torch.Tensor]
    scores: list[torch.Tensor]
    ids: list[torch.Tensor]

    @classmethod
    def of(cls, spec: TransportSpec, num_tokens: Sequence[int], seed: int = 0, bad_ids: bool = False) -> Batch:
        draw, top_k = torch.Generator().manual_seed(seed), spec.top_k
        first, end = (-3, spec.num_experts + 3) if bad_ids else (-1, spec.num_experts)
        return cls(
            [torch.randn(tokens, spec.hidden_dim, generator=draw).to(spec.dtype) for tokens in num_tokens],
            [torch.randn(tokens, top_k, generator=draw) for tokens in num_tokens],
            [torch.randint(first, end, (tokens, top_k), generator=draw) for tokens in num_tokens],
        )


class Brought(NamedTuple):
    """What one rank gets of a dispatch, of a combine with scores and one without, and of the dispatch's backward."""

    received: Received
    weighed: torch.Tensor
    plain: torch.Tensor
    backward: tuple[torch.Tensor, torch.Tensor]

    def named(self) -> dict[str, torch.Tensor]:
        """All that is told, rows and scores as far as they are."""
        end, received = int(self.received.expert_offsets[-1]), self.received
        return {
            "rows": received.rows[:end], "scores": received.row_scores[:end], "kept": kept_scores_of(received)[:end],
            "tokens_per_expert": received.tokens_per_expert, "expert_offsets": received.expert_offsets,
            **SymmetricLayout(*received.layout)._asdict(), **received.demand._asdict(),
            "weighed": self.weighed, "plain": self.plain, "dx": self.backward[0], "ds": self.backward[1],
        }  # fmt: skip


def kept_scores_of(received: Received) -> torch.Tensor:
    """The second of both, which shares nothing with the first."""
    kept, scores = received.kept_scores, received.row_scores
    assert kept is not None and (not len(kept) or kept.data_ptr() != scores.data_ptr())
    return kept


def bring(team: Team, batch: Batch, num_rows: int, bound: int) -> list[Brought]:
    """A dispatch, two combines, and the backward of the dispatch on every rank."""

    def dispatch(rank: SymmetricTransport, call: Call) -> Received:
        own = rank.spec.rank
        return rank.dispatch(batch.x[own], batch.scores[own], batch.ids[own], num_rows, call)

    received = team.run(dispatch, "dispatch", bound)

    def combine(rank: SymmetricTransport, call: Call, *, weighed: bool) -> torch.Tensor:
        got, scores = received[rank.spec.rank], batch.scores[rank.spec.rank]
        weights = Weights(scores, got.row_scores) if weighed else None
        return rank.rows_home(got.rows, weights, got.layout, call)

    weighed = team.run(lambda rank, call: combine(rank, call, weighed=True), "combine")
    plain = team.run(lambda rank, call: combine(rank, call, weighed=False), "combine")

    def backward(rank: SymmetricTransport, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        got = received[rank.spec.rank]
        return rank.dispatch_backward(got.rows, got.row_scores, got.layout, call)

    grads = team.run(backward, "dispatch_backward")
    return [Brought(*parts) for parts in zip(received, weighed, plain, grads, strict=True)]


def assert_same(actual: Sequence[Brought], expected: Sequence[Brought]) -> None:
    for rank, (one, other) in enumerate(zip(actual, expected, strict=True)):
        for (name, value), wanted in zip(one.named().items(), other.named().values(), strict=True):
            assert_bit_equal(value, wanted, f"{name} of rank {rank}")


def sent(team: Team) -> list[int]:
    return [int(rank.sent().rows_bytes.sum()) for rank in team.ranks]


# -- the same bits ----------------------------------------------------------------------------------------------------


@settings(max_examples=NUM_DRAWN)
@given(
    ep_size=st.integers(1, 3), num_local=st.integers(1, 3), top_k=st.integers(1, 4), hidden=st.sampled_from([8, 40]),
    dtype=st.sampled_from(DTYPES), alignment=st.sampled_from([1, 4]), capacity=st.integers(0, 40),
    bad_ids=st.booleans(), int32=st.booleans(), order=st.permutations([True, False]), seed=st.integers(0, 99),
    data=st.data(),
)  # fmt: skip
def test_bits_are_those_of_the_general_kernels(
    ep_size, num_local, top_k, hidden, dtype, alignment, capacity, bad_ids, int32, order, seed, data
):
    bound = data.draw(st.integers(1, 8), "bound")
    num_tokens = [data.draw(st.integers(0, bound), f"tokens of rank {rank}") for rank in range(ep_size)]
    spec = spec_of(
        ep_size, num_experts=num_local * ep_size, top_k=top_k, hidden_dim=hidden, dtype=dtype,
        expert_alignment=alignment,
    )  # fmt: skip
    batch = Batch.of(spec, num_tokens, seed, bad_ids)
    if int32:
        batch = batch._replace(ids=[ids.int() for ids in batch.ids])
    team, brought, bytes_sent = Team(spec), {}, {}
    for small in order:
        team.take(small=small)
        before = sent(team)
        brought[small] = bring(team, batch, capacity, bound)
        bytes_sent[small] = [now - then for now, then in zip(sent(team), before, strict=True)]
    team.close()
    assert_same(brought[True], brought[False])
    assert bytes_sent[True] == bytes_sent[False]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.full) for d in DTYPES[::2])], ids=str
)
def test_more_tokens_than_a_tile_and_wider_rows_than_a_part(dtype):
    spec = spec_of(2, top_k=3, hidden_dim=1032, dtype=dtype, num_max_tokens_per_rank=130, expert_alignment=8)
    batch, team, brought = Batch.of(spec, (130, 67)), Team(spec), {}
    for small in (True, False):
        team.take(small=small)
        brought[small] = bring(team, batch, 400, 130)
    team.close()
    assert_same(brought[True], brought[False])


def test_rows_that_are_not_where_a_vector_can_be_read():
    spec = spec_of(1, hidden_dim=16, dtype=torch.bfloat16)
    batch, team = Batch.of(spec, (5,)), Team(spec)
    expected = bring(team, batch, 12, 5)
    wide = torch.zeros(5, 2, 21, dtype=torch.bfloat16)
    wide[:, 1, 3:19] = batch.x[0]
    assert_same(bring(team, batch._replace(x=[wide[:, 1, 3:19]]), 12, 5), expected)
    across = batch.x[0].T.contiguous().T
    assert_same(bring(team, batch._replace(x=[across]), 12, 5), expected)
    team.close()


def test_rounds_of_both_kinds_may_follow_each_other_in_any_order():
    spec, kinds = spec_of(2, expert_alignment=2), (True, True, False, False, True, False, True)  # each behind each
    team, expected = Team(spec), Team(spec)
    expected.take(small=False)
    for step, small in enumerate(kinds):
        batch = Batch.of(spec, ((5 * step) % 9, (3 * step) % 9), step)
        team.take(small=small)
        assert_same(bring(team, batch, 24, 8), bring(expected, batch, 24, 8))
    for board in (rank.rounds.board for rank in team.ranks):
        assert 0 < int(board.state[INBOX]) < int(board.state[ROUND])
        assert board.signals[ARRIVED_SMALL].tolist() == [int(board.state[INBOX]) << 31] * 2
        assert int(board.desk[DESK_BEGUN]) == int(board.desk[DESK_ENDED])
    team.close()
    expected.close()


# -- worked examples --------------------------------------------------------------------------------------------------


def test_worked_example_of_dispatching():
    spec = spec_of(2, num_experts=2, top_k=1, num_max_tokens_per_rank=2)
    x = [torch.full((1, 8), 1.0), torch.tensor([[2.0], [3.0]]).repeat(1, 8)]
    batch = Batch(x, [torch.ones(1, 1), torch.ones(2, 1)], [torch.tensor([[0]]), torch.tensor([[1], [0]])])
    team = Team(spec)
    first, second = (one.received for one in bring(team, batch, 4, 2))
    inbox = team.ranks[0]._inbox
    assert inbox is not None
    assert inbox.counts[1].tolist() == [[1], [1]]  # the first round lies in the second half
    assert inbox.places[1, 0, :1].tolist() == [[0]] and inbox.places[1, 1].tolist() == [[-1], [0]]
    assert inbox.rows[1, 1, :, 0].tolist() == [3.0, 3.0]  # row 0 is not for this rank: it is what was there
    assert first.layout[0].tolist() == [[[0], [-1]], [[-1], [1]]]
    assert first.rows[:2, 0].tolist() == [1.0, 3.0] and second.rows[:1, 0].tolist() == [2.0]
    assert team.ranks[0].rounds.board.signals[BROUGHT : BROUGHT + 2].tolist() == [[0, 0], [1, 2]]
    team.close()


def test_worked_example_of_combining():
    spec = spec_of(2, num_experts=2, num_max_tokens_per_rank=1)
    none, own = torch.zeros(0, 2), torch.tensor([[0, 1]])
    batch = Batch([torch.zeros(0, 8), torch.ones(1, 8)], [none, torch.tensor([[2.0, 3.0]])], [none.long(), own])
    team = Team(spec)
    brought = bring(team, batch, 4, 1)

    def combine(rank: SymmetricTransport, call: Call) -> torch.Tensor:
        got, scores = brought[rank.spec.rank].received, batch.scores[rank.spec.rank]
        return rank.rows_home(got.rows, Weights(scores, got.row_scores), got.layout, call)

    def backward(rank: SymmetricTransport, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        got = brought[rank.spec.rank].received
        return rank.dispatch_backward(got.rows, torch.full((4,), 7.0 + rank.spec.rank), got.layout, call)

    inbox = team.ranks[1]._inbox
    assert inbox is not None
    _, weighed = team.run(combine, "combine")
    assert inbox.rows[1, :, 0, 0].tolist() == [2.0, 3.0] and weighed.tolist() == [[5.0] * 8]  # the fifth round
    _, (_, scalars) = team.run(backward, "dispatch_backward")
    assert (float(inbox.scores[0, 0, 0, 0]), float(inbox.scores[0, 1, 0, 1])) == (7.0, 8.0)
    assert scalars.tolist() == [[7.0, 8.0]]
    team.close()


def test_worked_example_of_sizes():
    assert places_of(1, 1) == 2 and places_of(512, 8) == 8192
    assert [spread(tokens, 7, 131, 8) for tokens in (1, 16, 64, 512)] == [1, 1, 4, 8]
    assert fits_small(512, 8, 7168, 64, 4)
    refused = [(513, 8, 7168, 64, 4), (512, 8, 7164, 64, 4), (512, 8, 7168, 1 << 20, 4), (512, 8, 7168, 64, 32)]
    assert not any(fits_small(*sizes) for sizes in refused)


# -- who is served ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "has_inbox"),
    [
        ({}, True), ({"num_max_tokens_per_rank": 512}, True), ({"num_max_tokens_per_rank": 513}, False),
        ({"row_capacity": RowCapacity.exact()}, False), ({"hidden_dim": 12}, False),
    ],
)  # fmt: skip
def test_the_inbox_is_paid_for_by_small_dispatchers_alone(changes, has_inbox):
    spec = spec_of(4, **changes)
    inbox = sum(buffer.num_bytes for buffer in buffers_of(spec) if buffer.name == "inbox_rows")
    assert inbox == has_inbox * 2 * 4 * spec.num_max_tokens_per_rank * spec.hidden_dim * 4


# -- one kernel -------------------------------------------------------------------------------------------------------


def test_one_kernel_that_waits_by_itself(monkeypatch):
    spec = spec_of(1, num_experts=3, top_k=3, hidden_dim=16, expert_alignment=4, num_max_tokens_per_rank=40)
    batch, team, general = Batch.of(spec, (37,), bad_ids=True), Team(spec), Team(spec)
    general.take(small=False)
    expected = bring(general, batch, 90, 40)
    general.close()
    monkeypatch.setattr(Board, "fused", property(lambda board: True))
    for _ in range(3):
        assert_same(bring(team, batch, 90, 40), expected)
    state, desk = team.ranks[0].rounds.board.state, team.ranks[0].rounds.board.desk
    assert int(state[INBOX]) == 12 and int(desk[DESK_BEGUN]) == int(desk[DESK_ENDED])
    team.close()


def test_outputs_of_a_call_that_is_given_up_are_nan_and_lead_nowhere(monkeypatch):
    spec = spec_of(1, expert_alignment=4)
    batch, team = Batch.of(spec, (8,)), Team(spec)
    monkeypatch.setattr(Board, "fused", property(lambda board: True))
    board = team.ranks[0].rounds.board
    good = bring(team, batch, 20, 8)[0]
    told = board.signals.clone()
    board.state[GIVEN_UP] = LEFT
    brought = bring(team, batch, 20, 8)[0]
    assert brought.received.rows.isnan().all() and brought.received.row_scores.isnan().all()
    assert kept_scores_of(brought.received).isnan().all()
    assert brought.weighed.isnan().all() and brought.plain.isnan().all()
    assert all(grad.isnan().all() for grad in brought.backward)
    assert brought.received.layout[0].tolist() == torch.full_like(good.received.layout[0], -1).tolist()
    assert brought.received.expert_offsets.tolist() == [0, 0] and not brought.received.demand.bad_ids.any()
    assert torch.equal(board.signals, told)  # nothing is told any more
    team.close()


# -- faults -----------------------------------------------------------------------------------------------------------


def _codes(team: Team, acts: Sequence[Callable[[SymmetricTransport, Call], Any]]) -> list[int]:
    """How each rank's wait ends when each does something else."""

    def act(rank: SymmetricTransport, call: Call) -> int:
        with pytest.raises((TransportFault, cd.ContractViolation)):
            acts[rank.spec.rank](rank, call)
        return int(rank.rounds.board.desk[DESK_CODE])

    return team.run(act, "dispatch", 4)


_OPERATIONS = ["dispatch", "combine", "combine_backward", "dispatch_backward"]


@pytest.mark.parametrize("other_small", [True, False])
@pytest.mark.parametrize(
    ("operation", "other"), [(a, b) for a in _OPERATIONS[:2] for b in _OPERATIONS if a != b], ids=str
)
def test_ranks_that_make_different_operations_both_find_out(operation, other, other_small):
    spec = spec_of(2, timeout_s=5.0)
    batch, team = Batch.of(spec, (4, 4)), Team(spec)
    received = bring(team, batch, 16, 4)
    team.ranks[1].plan = team.ranks[1].plan._replace(small=int(other_small))

    def act(rank: SymmetricTransport, call: Call, name: str) -> None:
        facts = CallFacts(call.facts.number, name, "")
        call = Call(facts=facts, words=tuple(facts.words()), verify=call.verify)
        got, own = received[rank.spec.rank].received, rank.spec.rank
        if name == "dispatch":
            rank.dispatch(batch.x[own], batch.scores[own], batch.ids[own], 16, call)
        elif name == "combine":
            rank.rows_home(got.rows, None, got.layout, call)
        elif name == "combine_backward":
            rank.rows_out(batch.x[own], got.layout, call)
        else:
            rank.dispatch_backward(got.rows, got.row_scores, got.layout, call)

    codes = _codes(team, (lambda rank, call: act(rank, call, operation), lambda rank, call: act(rank, call, other)))
    assert codes == [DIFFERS, DIFFERS]
    team.close()


def test_a_rank_that_left_is_noticed_and_one_that_is_late_is_not():
    spec = spec_of(2)
    batch, team = Batch.of(spec, (4, 4)), Team(spec)
    bring(team, batch, 16, 4)
    team.ranks[1].abandon()

    def dispatch(rank: SymmetricTransport, call: Call) -> None:
        rank.dispatch(batch.x[0], batch.scores[0], batch.ids[0], 16, call)

    team.ranks.pop()
    assert _codes(team, (dispatch,)) == [LEFT]
    team.close()


# -- between processes ------------------------------------------------------------------------------------------------


def _steps(rank: int, backend: str) -> list[torch.Tensor]:
    config = cd.DispatcherConfig(
        num_experts=8, top_k=3, hidden_dim=16, dtype=torch.bfloat16, num_max_tokens_per_rank=16, expert_alignment=2,
        row_capacity=cd.RowCapacity.worst_case(), timeout_s=30.0,
    )  # fmt: skip
    results = []
    with cd.TokenDispatcher(config, backend=backend) as dispatcher:
        for step in range(6):
            draw = torch.Generator().manual_seed(10 * step + rank)
            num_tokens = int(torch.randint(0, 17, (1,), generator=draw))
            x = torch.randn(num_tokens, 16, generator=draw).bfloat16().requires_grad_()
            scores = torch.rand(num_tokens, 3, generator=draw).requires_grad_()
            ids = torch.randint(-1, 8, (num_tokens, 3), generator=draw)
            routed = dispatcher.dispatch(x, scores, ids)
            valid = routed.row_valid.unsqueeze(1)
            out = dispatcher.combine(torch.where(valid, routed.rows * 2, 0), routed.handle)
            out.backward(torch.ones_like(out))
            end = int(routed.expert_offsets[-1])
            results += [
                routed.rows[:end].detach(),
                routed.scores[:end].detach(),
                routed.tokens_per_expert,
                out.detach(),
            ]
            assert x.grad is not None and scores.grad is not None
            results += [x.grad, scores.grad]
        if backend == "symmetric":
            moved: Any = dispatcher._open.transport
            assert int(moved.rounds.board.state[INBOX]) == 18  # dispatch, combine and dispatch's backward
    return results


def test_whole_steps_between_processes_have_the_bits_of_all_to_all(ranks: Ranks):
    both = zip(ranks(2).run(_steps, "symmetric"), ranks(2).run(_steps, "all_to_all"), strict=True)
    for rank, (ours, theirs) in enumerate(both):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_bit_equal(one, other, f"result {number} of rank {rank}")
