"""What every rank works out from all ranks' published ids is what plain tensor arithmetic works out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

from crossdock.kernels.arrange import Groups, Published, launch_count_published, launch_place_published
from crossdock.kernels.launch import launch
from crossdock.kernels.publish import Shelf, launch_publish
from crossdock.permute import count_by_expert, map_slots, padded_ends
from tests.kernels.symmetric_ranks import homes, on_shelf, random_ids, table_of

CPU = torch.device("cpu")
NO_LIMIT = 2**31 - 1


class Arranged:
    """One rank's arrangement of what `ids` publish, by the kernels."""

    def __init__(
        self,
        ids: list[torch.Tensor],
        scores: list[torch.Tensor],
        experts: tuple[int, int],
        alignment: int,
        capacity: int | None = None,
        max_tokens: int = 40,
    ) -> None:
        ep_size, top_k = len(ids), ids[0].shape[1]
        shelved_ids = on_shelf([part.to(torch.int32) for part in ids], max_tokens)
        shelved_scores = on_shelf(scores, max_tokens)
        headers = torch.zeros(ep_size, 3, dtype=torch.int64)
        headers[:, 1] = torch.tensor([part.shape[0] for part in ids])
        published = Published(table_of(shelved_ids), table_of(shelved_scores), headers[:, 1], top_k)
        self.num_bad, num_rows = torch.full((ep_size,), 9), torch.zeros(1, dtype=torch.int64)
        limit = NO_LIMIT if capacity is None else capacity
        self.groups: Groups = launch_count_published(
            published, experts, alignment, max_tokens, limit, self.num_bad, num_rows
        )
        self.num_rows_wanted = int(num_rows)
        rows = self.num_rows_wanted if capacity is None else capacity
        num_places = max(part.shape[0] for part in ids)
        self.row_of_slot, self.row_scores = launch_place_published(
            published, self.groups, experts[0], alignment, num_places, rows
        )


@given(
    ep_size=st.integers(1, 4),
    num_local=st.sampled_from([1, 3, 5, 70]),
    top_k=st.sampled_from([1, 2, 3, 7, 8]),
    alignment=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_slots_are_placed_as_by_arithmetic(ep_size, num_local, top_k, alignment, seed, data):
    rank = data.draw(st.integers(0, ep_size - 1))
    num_tokens = data.draw(st.lists(st.integers(0, 40), min_size=ep_size, max_size=ep_size))
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(generator, num_tokens, top_k, num_local * ep_size)
    scores = [torch.rand(part.shape, generator=generator) for part in ids]
    first = rank * num_local
    actual = Arranged(ids, scores, (first, num_local), alignment)

    local = torch.cat(ids) - first
    local = torch.where((local >= 0) & (local < num_local), local, -1)
    counts = count_by_expert(local, num_local)
    ends = padded_ends(counts, alignment)
    placed = map_slots(local, counts, alignment, int(counts.sum()), int(ends[-1]))
    assert actual.num_rows_wanted == int(ends[-1])
    assert torch.equal(actual.groups.tokens_per_expert, counts) and torch.equal(actual.groups.wanted, counts)
    assert torch.equal(actual.groups.expert_offsets, ends.to(torch.int32))
    rows = torch.cat([part[: len(own)] for part, own in zip(actual.row_of_slot, ids, strict=True)])
    assert torch.equal(rows.long(), placed.row_of_slot)
    for part, own in zip(actual.row_of_slot, ids, strict=True):
        assert (part[len(own) :] == -1).all()
    named = placed.slot_of_row >= 0
    assert torch.equal(actual.row_scores[named], torch.cat(scores).flatten()[placed.slot_of_row[named]])
    assert (actual.row_scores[~named] == 0).all()


@given(
    capacity=st.sampled_from([4, 8, 20, 64, 400]),
    alignment=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**16),
)
def test_what_does_not_fit_is_dropped_from_the_end(capacity, alignment, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(generator, (13, 0, 30), 3, 12)
    scores = [torch.rand(part.shape, generator=generator) for part in ids]
    whole, cut = (Arranged(ids, scores, (4, 4), alignment, limit) for limit in (None, capacity))
    assert cut.num_rows_wanted == whole.num_rows_wanted
    assert torch.equal(cut.groups.wanted, whole.groups.tokens_per_expert)
    kept = torch.where(whole.row_of_slot >= capacity, -2, whole.row_of_slot)
    assert torch.equal(cut.row_of_slot, kept)
    assert torch.equal(cut.groups.expert_offsets, whole.groups.expert_offsets.clamp(max=capacity))
    assert int(cut.groups.tokens_per_expert.sum()) == int((kept >= 0).sum())
    assert bool((cut.groups.padding[0] <= cut.groups.padding[1]).all())


def test_worked_example_of_placing():
    ids, scores = [torch.tensor([[0]]), torch.tensor([[1], [0]])], [torch.ones(1, 1), torch.ones(2, 1)]
    whole = Arranged(ids, scores, (0, 1), 1)
    assert whole.row_of_slot.tolist() == [[[0], [-1]], [[-1], [1]]]
    assert whole.groups.tokens_per_expert.tolist() == [2]
    cut = Arranged(ids, scores, (0, 1), 1, capacity=1)
    assert cut.row_of_slot.tolist() == [[[0], [-1]], [[-1], [-2]]]
    assert cut.groups.tokens_per_expert.tolist() == [1] and cut.groups.wanted.tolist() == [2]


def test_worked_example_of_counting_by_block():
    from crossdock.kernels.arrange import count_published_kernel, scan_published_kernel

    ids = on_shelf([torch.tensor([[0]], dtype=torch.int32), torch.tensor([[1], [0]], dtype=torch.int32)], 2)
    counts, bad = torch.zeros(4, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    sizes: dict[str, Any] = {"TOP_K": 1, "TOP_K_BLOCK": 1, "NUM_LOCAL": 1, "BLOCK": 1, "CHUNK": 1}
    launch(count_published_kernel, (2, 2), CPU, table_of(ids), torch.tensor([1, 2]), counts, bad, 1, 2, 0, **sizes)
    assert counts.flatten().tolist() == [1, 0, 0, 1]
    wanted = torch.zeros(1, dtype=torch.int64)
    launch(scan_published_kernel, (1,), CPU, counts, wanted, 4, NUM_LOCAL=1, EXPERTS=1, BLOCK=2)
    assert counts.flatten().tolist() == [0, 1, 1, 1] and wanted.tolist() == [2]


@pytest.mark.parametrize(("capacity", "ends", "kept"), [(NO_LIMIT, [0, 8, 24], [0, 1, 9]), (16, [0, 8, 16], [0, 1, 8])])
def test_worked_example_of_groups(capacity, ends, kept):
    from crossdock.kernels.arrange import fit_groups_kernel

    starts, kept_out, num_rows = torch.zeros(3).long(), torch.zeros(3).long(), torch.zeros(1).long()
    padding, ends_out = torch.zeros(2, 3).long(), torch.zeros(3, dtype=torch.int32)
    launch(
        fit_groups_kernel, (1,), CPU, torch.tensor([0, 1, 9]), starts, padding, kept_out, ends_out, num_rows, capacity,
        ALIGNMENT=8, NUM_LOCAL=3, BLOCK=4,
    )  # fmt: skip
    assert ends_out.tolist() == ends and kept_out.tolist() == kept and int(num_rows) == 24
    assert padding[1].tolist() == ends


def _shelf(max_tokens: int, hidden_dim: int, top_k: int, dtype: torch.dtype) -> Shelf:
    return Shelf(
        torch.full((max_tokens, hidden_dim), 9, dtype=dtype),
        torch.full((max_tokens, top_k), 9, dtype=torch.int32),
        torch.full((max_tokens, top_k), 9.0),
        torch.zeros(2, 5, dtype=torch.int64),
        torch.tensor([6, 0, 0, 0]),
        torch.zeros(1, dtype=torch.int64),
        0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "top_k", "hidden_dim"), [(0, 2, 8), (5, 3, 40), (300, 1, 1032)])
def test_publishing(dtype, num_tokens, top_k, hidden_dim):
    shelf, words = _shelf(300, hidden_dim, top_k, dtype), torch.arange(1, 6)
    wide = torch.randn(num_tokens, 2 * hidden_dim).to(dtype)
    x = wide[:, :hidden_dim]
    (ids,) = random_ids(torch.Generator().manual_seed(1), [num_tokens], top_k, 12)
    scores = torch.rand(num_tokens, top_k)
    home = launch_publish(x, (ids, scores), words, shelf, 12, 3)
    assert torch.equal(shelf.rows[:num_tokens], x) and torch.equal(shelf.ids[:num_tokens].long(), ids)
    assert torch.equal(shelf.scores[:num_tokens], scores) and torch.equal(home, homes(ids, 3))
    assert shelf.headers.tolist() == [[0] * 5, [1, 2, 3, 4, 5]]  # the next round is 7, an odd one
    assert (shelf.rows[num_tokens:] == 9).all() and (shelf.ids[num_tokens:] == 9).all()
    away = int(sum(len({home for home in token if home > 0}) for token in home.tolist()))
    assert int(shelf.sent) == away
    again = launch_publish(-x, home, -words, shelf._replace(state=torch.tensor([7, 0, 0, 0])), 12, 3)
    assert again is home and int(shelf.sent) == 2 * away
    assert torch.equal(shelf.rows[:num_tokens], -x) and torch.equal(shelf.ids[:num_tokens].long(), ids)
    assert shelf.headers[0].tolist() == [-1, -2, -3, -4, -5]


def test_worked_example_of_publishing():
    shelf = _shelf(2, 8, 2, torch.float32)
    arguments = (torch.zeros(5, dtype=torch.int64), shelf, 4, 2)
    home = launch_publish(torch.ones(2, 8), (torch.tensor([[0, 2], [1, -1]]), torch.ones(2, 2)), *arguments)
    assert shelf.ids.tolist() == [[0, 2], [1, -1]] and home.tolist() == [[0, 1], [0, -1]]
    assert int(shelf.sent) == 1
    home = launch_publish(torch.ones(2, 8), (torch.tensor([[4, -5], [2**40, -1]]), torch.ones(2, 2)), *arguments)
    assert shelf.ids.tolist() == [[-2, -2], [-2, -1]] and home.tolist() == [[-1, -1], [-1, -1]]
    bad = Arranged([shelf.ids.long(), torch.tensor([[0, 1]])], [torch.ones(2, 2), torch.ones(1, 2)], (0, 2), 1)
    assert bad.num_bad.tolist() == [3, 0] and bad.num_rows_wanted == 2
