"""Where rows go inside one rank: counts, padded offsets and the map between slots and expert-major rows.

Plain tensor arithmetic on any device, without host reads: whoever needs a size on the host passes it in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SlotMap(NamedTuple):
    """Both directions between slots (token, k) and the rows of local experts.

    Attributes:
        row_of_slot: `[N, K]` int64, a row; -1 where the slot's expert is not here.
        slot_of_row: `[R]` int64, a flat slot `token * K + k`; -1 on padding rows.
    """

    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor


def count_by_expert(expert_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Slots that name each expert: `[num_experts]` int64; ids of -1 count nowhere."""
    flat = expert_ids.reshape(-1)
    bins = torch.where(flat < 0, num_experts, flat)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[:num_experts]


def drop_bad_ids(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with those outside `-1..num_experts-1` made -1, and how many there were (a scalar on the device)."""
    bad = (expert_ids < -1) | (expert_ids >= num_experts)
    return torch.where(bad, -1, expert_ids), bad.sum()


def round_up(value: torch.Tensor, multiple: int) -> torch.Tensor:
    """Every element rounded up to a multiple; 0 stays 0."""
    return value if multiple == 1 else (value + (multiple - 1)) // multiple * multiple


def padded_ends(tokens_per_expert: torch.Tensor, alignment: int) -> torch.Tensor:
    """Inclusive ends of the experts' groups, each padded to `alignment`: int64, the shape of the counts.

    >>> padded_ends(torch.tensor([0, 1, 8, 9]), 8).tolist()
    [0, 8, 16, 32]
    """
    return torch.cumsum(round_up(tokens_per_expert, alignment), 0)


def map_slots(
    local_ids: torch.Tensor, tokens_per_expert: torch.Tensor, alignment: int, num_slots: int, num_rows: int
) -> SlotMap:
    """Place every slot that names a local expert, by expert, then token, then slot.

    Args:
        local_ids: `[N, K]` int64 local expert of each slot, -1 for none; tokens in the order rows shall have.
        tokens_per_expert: `[e]` int64: how many slots name each local expert.
        alignment: groups are padded to a multiple of this.
        num_slots: slots that name a local expert (the sum of the counts).
        num_rows: rows with padding (the last of `padded_ends`).

    Two experts, alignment 2; token 0 wants expert 1 and none, token 1 wants experts 0 and 1:

    >>> m = map_slots(torch.tensor([[1, -1], [0, 1]]), torch.tensor([1, 2]), 2, 3, 4)
    >>> m.row_of_slot.tolist(), m.slot_of_row.tolist()
    ([[2, -1], [0, 3]], [2, -1, 0, 3])
    """
    flat = local_ids.reshape(-1)
    slots = _slots_by_expert(flat, tokens_per_expert.shape[0], num_slots)
    shift = _shift_by_padding(tokens_per_expert, alignment)
    position = torch.arange(num_slots, device=flat.device)
    row = position if shift is None else position + shift[flat[slots]]
    row_of_slot = torch.full_like(flat, -1).scatter_(0, slots, row)
    slot_of_row = slots if num_rows == num_slots else flat.new_full((num_rows,), -1).scatter_(0, row, slots)
    return SlotMap(row_of_slot.view(local_ids.shape), slot_of_row)


def _slots_by_expert(flat: torch.Tensor, num_experts: int, num_slots: int) -> torch.Tensor:
    """`[num_slots]` int64: the slots of `flat [N * K]` that name an expert, by expert, then as they stand."""
    if flat.is_cuda or num_slots == flat.shape[0]:
        key = torch.where(flat < 0, num_experts, flat).to(torch.int32)
        return torch.sort(key, stable=True).indices[:num_slots]
    here = first_true(flat >= 0, num_slots)  # few of them are, where there are many ranks: sort no others
    by_expert = torch.sort(flat.index_select(0, here).to(torch.int32), stable=True).indices
    return here.index_select(0, by_expert)


def map_slots_within(
    local_ids: torch.Tensor, tokens_per_expert: torch.Tensor, alignment: int, num_rows: int
) -> SlotMap:
    """`map_slots` into `num_rows` rows, of which the host knows nothing else: what lies behind them is dropped.

    Three slots want expert 0 and one wants expert 1, and there are two rows:

    >>> m = map_slots_within(torch.tensor([[0, 1], [0, 0]]), torch.tensor([3, 1]), 1, 2)
    >>> m.row_of_slot.tolist(), m.slot_of_row.tolist()
    ([[0, -1], [1, -1]], [0, 2])
    """
    flat = local_ids.reshape(-1)
    num_experts = tokens_per_expert.shape[0]
    key = torch.where(flat < 0, num_experts, flat).to(torch.int32)
    by_expert, slots = torch.sort(key, stable=True)
    row = torch.arange(flat.shape[0], device=flat.device)
    shift = _shift_by_padding(tokens_per_expert, alignment)
    if shift is not None:
        row = row + torch.cat([shift, shift.new_zeros(1)])[by_expert]
    kept = (by_expert < num_experts) & (row < num_rows)
    row_of_slot = torch.empty_like(flat).scatter_(0, slots, torch.where(kept, row, -1))
    # One place more than there are rows, for all that is dropped.
    slot_of_row = flat.new_full((num_rows + 1,), -1).scatter_(0, torch.where(kept, row, num_rows), slots)
    return SlotMap(row_of_slot.view(local_ids.shape), slot_of_row[:num_rows])


def kept_within(
    tokens_per_expert: torch.Tensor, ends: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and padded ends of the experts' groups, cut off at `num_rows` rows.

    >>> kept, ends = kept_within(torch.tensor([3, 2, 1]), torch.tensor([4, 8, 12]), 5)
    >>> kept.tolist(), ends.tolist()
    ([3, 1, 0], [4, 5, 5])
    """
    ends = ends.clamp(max=num_rows)
    return torch.minimum(tokens_per_expert, torch.diff(ends, prepend=ends.new_zeros(1))), ends


def _shift_by_padding(tokens_per_expert: torch.Tensor, alignment: int) -> torch.Tensor | None:
    """How far padding of the experts before it pushes an expert's rows back; None without padding."""
    if alignment == 1:
        return None
    padding = round_up(tokens_per_expert, alignment) - tokens_per_expert
    return torch.cumsum(padding, 0) - padding


def take_or_zero(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`values [N]` by `index` (any shape); 0 where the index is -1."""
    return torch.cat([values, values.new_zeros(1)])[index]  # -1 is the zero behind the last


def first_true(mask: torch.Tensor, num_true: int) -> torch.Tensor:
    """Ascending positions of the `num_true` True elements of `mask [N]`; no host read on a GPU."""
    if mask.is_cuda:
        return torch.sort((~mask).to(torch.uint8), stable=True).indices[:num_true]
    return mask.nonzero().squeeze(1)
