"""What every rank works out from the ids that all ranks send it is what plain tensor arithmetic works out."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

import triton.language as tl

from crossdock.kernels import dispatch
from crossdock.kernels.arrange import Groups, Routed, count_before, fit_groups
from crossdock.kernels.blocks import token_block
from crossdock.kernels.dispatch import Sizes, launch_count, launch_place
from crossdock.kernels.launch import launch
from crossdock.kernels.publish import Routing, launch_publish_routing
from crossdock.kernels.signal import BAD_IDS, NUM_SENT, STAGING, Board
from crossdock.permute import count_by_expert, drop_bad_ids, kept_within, map_slots_within, padded_ends
from tests.kernels.symmetric_ranks import CALL, boards, homes, random_ids, table_of

MAX_TOKENS = 40
CPU = torch.device("cpu")
_HELPERS = (count_before, fit_groups)


class Sent(NamedTuple):
    """What all ranks have pushed to each other.

    Attributes:
        ranks: their boards.
        ids: by receiver, `[ep_size, max_tokens, K]` int32.
        scores: by receiver, `[ep_size, max_tokens, K]` float32.
        routings: by sender.
    """

    ranks: list[Board]
    ids: list[torch.Tensor]
    scores: list[torch.Tensor]
    routings: list[Routing]

    @property
    def homes(self) -> list[torch.Tensor]:
        """By sender, `[T, K]` int32."""
        return [routing.home_of_slot for routing in self.routings]

    @property
    def num_sent(self) -> list[int]:
        """By sender, rows that others will get."""
        return [int(routing.num_sent) for routing in self.routings]


def send(ids: list[torch.Tensor], scores: list[torch.Tensor], num_local: int, *, max_tokens: int = MAX_TOKENS) -> Sent:
    """Every rank pushes its routing to all; nothing right stands where nobody pushes."""
    ep_size, top_k = len(ids), ids[0].shape[1]
    ranks, place = boards(ep_size), (ep_size, max_tokens, top_k)
    all_ids = [torch.full(place, 3, dtype=torch.int32) for _ in ranks]
    all_scores = [torch.full(place, 9.0) for _ in ranks]
    tables, routings = (table_of(all_ids), table_of(all_scores)), []
    for board in ranks:
        routing = Routing(
            ids[board.rank], scores[board.rank], *tables, max_tokens, num_local * ep_size, torch.full((1,), 100),
            torch.empty(ids[board.rank].shape, dtype=torch.int32), torch.empty(1, dtype=torch.int64),
        )  # fmt: skip
        launch_publish_routing(board, CALL, routing)
        assert int(routing.sent) == 100 + int(routing.num_sent)
        routings.append(routing)
    return Sent(ranks, all_ids, all_scores, routings)


def _ones(ids: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ones(part.shape) for part in ids]


# -- sending ----------------------------------------------------------------------------------------------------------


def test_worked_example_of_publishing_routing():
    ids = [torch.tensor([[0, 2], [1, -1]]), torch.tensor([[4, -5], [2**40, -1]])]
    sent = send(ids, _ones(ids), 2)
    for received in sent.ids:
        assert received[0, :2].tolist() == [[0, 2], [1, -1]]
        assert received[1, :2].tolist() == [[-2, -2], [-2, -1]]
    assert sent.homes[0].tolist() == [[0, 1], [0, -1]] and sent.homes[1].tolist() == [[-1, -1], [-1, -1]]
    assert sent.num_sent == [1, 0]
    for board in sent.ranks:
        # Told with the round, T and bad ids, and forgotten; so are the counters of programs.
        assert board.state.tolist()[: STAGING + 1] == [1, 1] and not board.state[STAGING + 1 : 5].any()
        assert not board.state[BAD_IDS:].any()
        assert [word % 2**32 for word in board.signals[1].tolist()] == [2, 2]
        assert [word >> 32 for word in board.signals[1].tolist()] == [0, 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("num_tokens", "top_k", "block"), [((0, 2), 3, 1), ((5, 33, 40), 3, 8), ((40,), 8, 64)])
def test_publishing_routing_by_several_programs(num_tokens, top_k, block, dtype, monkeypatch):
    monkeypatch.setattr("crossdock.kernels.publish.routing_block", lambda *_: block)
    generator = torch.Generator().manual_seed(1)
    ids = [part.to(dtype) for part in random_ids(generator, num_tokens, top_k, 3 * len(num_tokens))]
    scores = [torch.rand(part.shape, generator=generator) for part in ids]
    sent = send(ids, scores, 3)
    for receiver in range(len(ids)):
        for sender, (part, score) in enumerate(zip(ids, scores, strict=True)):
            tokens = len(part)
            assert torch.equal(sent.ids[receiver][sender, :tokens], part.to(torch.int32))
            assert torch.equal(sent.scores[receiver][sender, :tokens], score)
            assert (sent.ids[receiver][sender, tokens:] == 3).all()
            assert (sent.scores[receiver][sender, tokens:] == 9).all()
    for rank, part in enumerate(ids):
        home = homes(part.long(), 3)
        assert torch.equal(sent.homes[rank], home)
        assert sent.num_sent[rank] == sum(len(set(token) - {-1, rank}) for token in home.tolist())
        assert not sent.ranks[rank].state[NUM_SENT:].any()


# -- arranging --------------------------------------------------------------------------------------------------------


class Arranged:
    """One rank's arrangement of what all have sent, by the kernels."""

    def __init__(
        self,
        sent: Sent,
        rank: int,
        num_local: int,
        *,
        alignment: int = 1,
        capacity: int | None = None,
        bound: int = MAX_TOKENS,
    ) -> None:
        board, routed = sent.ranks[rank], Routed(sent.ids[rank], sent.scores[rank], bound)
        asked = (board, CALL, sent.routings[rank], routed)
        sizes = Sizes(alignment, num_local, 64)
        self.groups: Groups = launch_count(*asked, sizes, capacity)
        self.num_rows_wanted = int(self.groups.report[0])
        num_rows = self.num_rows_wanted if capacity is None else capacity
        self.row_scores, self.kept_scores = launch_place(*asked, self.groups, sizes, num_rows)


def _assert_arranged(
    actual: Arranged,
    ids: list[torch.Tensor],
    scores: list[torch.Tensor],
    experts: tuple[int, int],
    alignment: int,
    capacity: int | None,
) -> None:
    """By the arithmetic of `permute`."""
    first, num_local = experts
    local = torch.cat(ids) - first
    local = torch.where((local >= 0) & (local < num_local), local, -1)
    wanted = count_by_expert(local, num_local)
    ends = padded_ends(wanted, alignment)
    num_rows = int(ends[-1]) if capacity is None else capacity
    kept, inside = kept_within(wanted, ends, num_rows)
    placed = map_slots_within(local, wanted, alignment, num_rows)
    groups = actual.groups
    assert actual.num_rows_wanted == int(ends[-1])
    assert groups.report[1:].tolist() == [len(part) for part in ids]
    assert torch.equal(groups.wanted, wanted) and torch.equal(groups.tokens_per_expert, kept)
    assert torch.equal(groups.expert_offsets, inside.to(torch.int32))
    starts = torch.cat([inside.new_zeros(1), inside[:-1]])
    assert torch.equal(groups.padding, torch.stack([starts + kept, inside]))

    dropped = (local >= 0) & (placed.row_of_slot < 0)
    expected = torch.where(dropped, -2, placed.row_of_slot)
    rows = torch.cat([part[: len(own)] for part, own in zip(groups.row_of_slot, ids, strict=True)])
    assert torch.equal(rows.long(), expected)
    for part, own in zip(groups.row_of_slot, ids, strict=True):
        assert (part[len(own) :] == -1).all()
    filled = int(inside[-1])
    named = placed.slot_of_row[:filled] >= 0
    row_scores = actual.row_scores[:filled]
    assert actual.row_scores.shape == (num_rows,)
    assert torch.equal(row_scores[named], torch.cat(scores).flatten()[placed.slot_of_row[:filled][named]])
    assert (row_scores[~named] == 0).all()
    assert torch.equal(actual.kept_scores[:filled], row_scores) and actual.kept_scores.shape == (num_rows,)


@settings(max_examples=settings().max_examples // 2)  # each launches many kernels, all interpreted
@given(
    ep_size=st.integers(1, 4),
    num_local=st.sampled_from([1, 3, 5, 70]),
    top_k=st.sampled_from([1, 2, 3, 7, 8]),
    alignment=st.sampled_from([1, 4, 16]),
    capacity=st.sampled_from([None, None, 0, 16, 48, 160, 4000]),
    block=st.sampled_from([2, 8, 64]),
    bad_ids=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_slots_are_placed_as_by_arithmetic(ep_size, num_local, top_k, alignment, capacity, block, bad_ids, seed, data):
    rank = data.draw(st.integers(0, ep_size - 1))
    num_tokens = data.draw(st.lists(st.integers(0, MAX_TOKENS), min_size=ep_size, max_size=ep_size))
    bound = data.draw(st.sampled_from([max(num_tokens), MAX_TOKENS]))
    generator, num_experts = torch.Generator().manual_seed(seed), num_local * ep_size
    ids = random_ids(generator, num_tokens, top_k, num_experts)
    if bad_ids:
        for part in ids:
            part += (torch.rand(part.shape, generator=generator) < 0.2) * num_experts * 3
    scores = [torch.rand(part.shape, generator=generator) for part in ids]
    sent = send(ids, scores, num_local)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "token_block", lambda *_: block)
        actual = Arranged(sent, rank, num_local, alignment=alignment, capacity=capacity, bound=bound)
    good = [drop_bad_ids(part, num_experts) for part in ids]
    _assert_arranged(actual, [part for part, _ in good], scores, (rank * num_local, num_local), alignment, capacity)
    assert actual.groups.bad_ids.tolist() == [int(num) for _, num in good]


def test_experts_beyond_one_block_and_tokens_beyond_the_bound():
    """More experts than a block of a GPU holds slots; and what a rank says to bring beyond the agreed bound is cut."""
    generator = torch.Generator().manual_seed(5)
    ids = random_ids(generator, (300, 7), 2, 600)
    scores = [torch.rand(part.shape, generator=generator) for part in ids]
    sent = send(ids, scores, 300, max_tokens=300)
    assert token_block(CPU, 300, 2) < 300
    for rank in (0, 1):
        actual = Arranged(sent, rank, 300, bound=300)
        _assert_arranged(actual, ids, scores, (300 * rank, 300), 1, None)
    cut = Arranged(sent, 0, 300, bound=20)
    kept = torch.cat([ids[0][:20], ids[1]])
    assert int(cut.groups.wanted.sum()) == int(((kept >= 0) & (kept < 300)).sum())


def test_worked_example_of_arranging():
    ids = [torch.tensor([[0]]), torch.tensor([[1], [0]])]
    sent = send(ids, _ones(ids), 1, max_tokens=2)
    whole = Arranged(sent, 0, 1, bound=2)
    assert whole.groups.row_of_slot.tolist() == [[[0], [-1]], [[-1], [1]]]
    assert whole.groups.tokens_per_expert.tolist() == [2]
    cut = Arranged(sent, 0, 1, capacity=1, bound=2)
    assert cut.groups.row_of_slot.tolist() == [[[0], [-1]], [[-1], [-2]]]
    assert cut.groups.tokens_per_expert.tolist() == [1] and cut.groups.wanted.tolist() == [2]


def test_worked_example_of_a_block():
    """Where its slots stand among those of their experts; rows are given to them only in the step behind this one."""
    sent = send(ids := [torch.tensor([[0, 1], [0, -1]])], _ones(ids), 2, max_tokens=2)
    routed = Routed(sent.ids[0], sent.scores[0], 2)
    groups = launch_count(sent.ranks[0], CALL, sent.routings[0], routed, Sizes(1, 2, 64), None)
    assert groups.row_of_slot.tolist() == [[[0, 0], [1, -1]]]
    assert groups.counts.tolist() == [[2, 1]]


def test_worked_example_of_counting_by_block(monkeypatch):
    monkeypatch.setattr(dispatch, "token_block", lambda *_: 1)
    ids = [torch.tensor([[0]]), torch.tensor([[1], [0]])]
    actual = Arranged(send(ids, _ones(ids), 1, max_tokens=2), 0, 1, bound=2)
    assert actual.groups.counts.flatten().tolist() == [1, 0, 0, 1]
    assert actual.groups.row_of_slot.tolist() == [[[0], [-1]], [[-1], [1]]]


def counts_kernel(counts_ptr, out_ptr, tile, num_tiles, TILES: tl.constexpr):
    """Write what stands before a block, and in all; of one expert."""
    before, total = count_before(counts_ptr, tile, num_tiles, 1, 1, TILES)
    tl.store(out_ptr + tl.arange(0, 1), before)
    tl.store(out_ptr + 1 + tl.arange(0, 1), total)


@pytest.mark.parametrize("tiles_at_once", [1, 2, 8])
def test_worked_example_of_what_stands_before_a_block(tiles_at_once):
    out = torch.zeros(2, dtype=torch.int32)
    for tile, before in enumerate((0, 1, 1, 1, 2)):
        counts = torch.tensor([1, 0, 0, 1, 5], dtype=torch.int32)  # the last is none of the four
        launch(counts_kernel, (1,), CPU, counts, out, tile, 4, TILES=tiles_at_once, helpers=_HELPERS)
        assert out.tolist() == [before, 2]


def fit_kernel(wanted_ptr, out_ptr, capacity):
    """Write the four answers of `fit_groups` for three experts, with alignment 8."""
    expert = tl.arange(0, 4)
    wanted = tl.load(wanted_ptr + expert, mask=expert < 3, other=0)
    start, kept, end, num_rows = fit_groups(wanted, capacity, 8)
    tl.store(out_ptr + expert, start)
    tl.store(out_ptr + 4 + expert, kept)
    tl.store(out_ptr + 8 + expert, end)
    tl.store(out_ptr + 12, num_rows)


@pytest.mark.parametrize(
    ("capacity", "starts", "kept", "ends"),
    [
        (2**30 - 2, [0, 0, 8], [0, 1, 9], [0, 8, 24]),
        (16, [0, 0, 8], [0, 1, 8], [0, 8, 16]),
        (4, [0, 0, 4], [0, 1, 0], [0, 4, 4]),
    ],
)
def test_worked_example_of_groups(capacity, starts, kept, ends):
    out = torch.zeros(13, dtype=torch.int32)
    launch(fit_kernel, (1,), CPU, torch.tensor([0, 1, 9], dtype=torch.int32), out, capacity, helpers=_HELPERS)
    assert [out[at : at + 3].tolist() for at in (0, 4, 8)] == [starts, kept, ends]
    assert int(out[12]) == 24
