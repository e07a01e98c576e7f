"""Nothing is read or written behind a tensor's end: every one of them ends where the next page may not be touched."""

from __future__ import annotations

import ctypes
import mmap
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import crossdock as cd
from crossdock.testing import RanksFailed, Seat, run_ranks
from tests.contract.conftest import On
from tests.contract.trials import make_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="protects pages by mprotect")

HIDDEN_DIM = 64
PROT_NONE = 0


def at_the_edge(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory full of NaN (or -1) that ends with a page; the page behind it can be neither read nor written."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, whole + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + whole), mmap.PAGESIZE, PROT_NONE) == 0
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    held = torch.frombuffer(pages, dtype=dtype, count=torch.Size(shape).numel(), offset=whole - num_bytes)
    return held.fill_(float("nan") if dtype.is_floating_point else -1).view(shape)


def moved(tensor: Tensor) -> Tensor:
    return at_the_edge(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def new_rows(num_rows: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return at_the_edge((num_rows, like.shape[1]), dtype or like.dtype)


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """5 tokens on rank 0 and 3 on rank 1: to the four experts go 3, 5, 1 and 3 rows, and 4 slots are empty."""
    num_tokens = 5 - 2 * rank
    ids = torch.tensor([[[0, 1], [1, -1], [3, 1], [0, -1], [-1, 2]], [[1, 3], [0, 1], [3, -1]]][rank])
    x = 16.0 * rank + torch.arange(num_tokens).unsqueeze(1) + torch.arange(HIDDEN_DIM) / 64
    return x, torch.full((num_tokens, 2), 0.5), ids


def there_and_back(seat: Seat, fields: dict[str, Any]) -> list[int]:
    """One step; the offsets. On `symmetric` what the kernels write lies at an edge as well."""
    x, scores, ids = map(moved, inputs(seat.rank))
    x.requires_grad_()
    scores.requires_grad_()
    config = make_config(4, 2, HIDDEN_DIM, **fields)
    with pytest.MonkeyPatch.context() as patch:
        if seat.backend == "symmetric":
            from crossdock.backends.symmetric import transport

            patch.setattr(transport, "new_rows", new_rows)
        with seat.open(config) as dispatcher:
            routed = dispatcher.dispatch(x, scores, ids)
            bounds = [0, *routed.expert_offsets.tolist()]
            rows, factors = moved(routed.rows.detach()), torch.zeros(len(routed.rows), 1)
            for local, (start, end) in enumerate(pairwise(bounds)):
                factors[start:end] = 2 * seat.rank + local + 1
                padding = rows[start + int(routed.tokens_per_expert[local]) : end]
                assert not padding.any(), "a padding row is not zero"
            rows = (rows * factors).requires_grad_()
            out = dispatcher.combine(rows, routed.handle)
            (grad_rows,) = torch.autograd.grad(out, rows, moved(torch.ones_like(out)))
            routed.rows.backward(moved(grad_rows * factors))
    named = ids >= 0
    wanted = (0.5 * (ids + 1) * named).sum(1, keepdim=True)
    assert torch.equal(out.detach(), wanted * x.detach())
    assert x.grad is not None and torch.equal(x.grad, wanted.expand_as(x))
    return bounds


# By name: fields of the configuration, and the offsets on both ranks. Groups of 3: of 3 and 5 rows the first fills its
# group, the last row of the other one's padding lies behind the capacity of 8, and no row does.
CAPACITIES: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "exact": ({"expert_alignment": 128}, [[0, 128, 256], [0, 128, 256]]),
    "worst case, many tokens": (
        {"row_capacity": cd.RowCapacity.worst_case(), "num_max_tokens_per_rank": 600},
        [[0, 3, 8], [0, 1, 4]],
    ),
    "worst case, few tokens": (
        {"row_capacity": cd.RowCapacity.worst_case(), "num_max_tokens_per_rank": 5},
        [[0, 3, 8], [0, 1, 4]],
    ),
    "full to the last row": ({"row_capacity": cd.RowCapacity.rows(8)}, [[0, 3, 8], [0, 1, 4]]),
    "full to the last row of padding": (
        {"row_capacity": cd.RowCapacity.rows(16), "expert_alignment": 8},
        [[0, 8, 16], [0, 8, 16]],
    ),
    "only padding does not fit": (
        {"row_capacity": cd.RowCapacity.balanced(0.4), "expert_alignment": 3, "num_max_tokens_per_rank": 5},
        [[0, 3, 8], [0, 3, 6]],
    ),
}


@pytest.mark.parametrize("backend", ["all_to_all", "symmetric"])
@pytest.mark.parametrize("case", CAPACITIES)
def test_every_tensor_may_end_where_memory_ends(on: On, backend: str, case: str):
    if backend == "symmetric":
        pytest.importorskip("triton", reason="triton is published for Linux only")
    fields, offsets = CAPACITIES[case]
    assert on(backend, 2)(there_and_back, fields) == offsets


def touches_the_edge(rank: int, write: bool) -> float:
    held = at_the_edge((4, 8), torch.float32)
    word = ctypes.c_float.from_address(held.data_ptr() + held.nbytes)
    if write:
        word.value = 1.0
    return word.value


@pytest.mark.parametrize("write", [False, True], ids=["read", "written"])
def test_who_goes_beyond_the_edge_is_killed(write: bool):
    """Else the test above would prove nothing."""
    with pytest.raises(RanksFailed, match="SIGSEGV"):
        run_ranks(touches_the_edge, 1, write, backend=None)
