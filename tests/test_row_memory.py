"""Memory of rows is used again when nobody holds them, and only then."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from crossdock.row_memory import RowMemory, new_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for under Linux only")

LIKE = torch.empty(0, 1024, dtype=torch.bfloat16)  # 2 KB a row
NUM_ROWS = 2000  # 4 MB: two huge pages


def test_rows_are_what_was_asked_for():
    memory = RowMemory()
    for make in (new_rows, memory.new_rows):
        for num_rows in (0, 3, NUM_ROWS):
            rows = make(num_rows, LIKE)
            assert (rows.shape, rows.dtype, rows.is_contiguous()) == ((num_rows, 1024), torch.bfloat16, True)
            assert make(num_rows, LIKE, torch.float32).dtype == torch.float32
            rows.fill_(2.5)
            assert rows.eq(2.5).all()


def test_memory_comes_again_when_the_last_view_has_gone():
    memory = RowMemory()
    rows = memory.new_rows(NUM_ROWS, LIKE)
    address, view = rows.data_ptr(), rows[5:7].fill_(3.0).view(torch.int16)
    del rows
    others = [memory.new_rows(NUM_ROWS, LIKE).fill_(0.0) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    assert view.view(torch.bfloat16).eq(3.0).all()
    del view
    assert memory.new_rows(NUM_ROWS - 100, LIKE).data_ptr() == address
    assert memory.new_rows(NUM_ROWS, LIKE.float()).data_ptr() != address, "8 MB lie in 4"


def test_a_graph_holds_what_it_needs():
    memory, weight = RowMemory(), torch.ones(1, requires_grad=True)
    rows = memory.new_rows(NUM_ROWS, LIKE, torch.float32).fill_(2.0)
    loss = (rows * weight).sum()
    address = rows.data_ptr()
    del rows
    assert memory.new_rows(NUM_ROWS, LIKE, torch.float32).fill_(0.0).data_ptr() != address
    (grad,) = torch.autograd.grad(loss, weight)
    assert grad.item() == 2.0 * NUM_ROWS * 1024


def test_any_thread_may_let_go():
    memory = RowMemory()
    held = [memory.new_rows(NUM_ROWS, LIKE)]
    address = held[0].data_ptr()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert memory.new_rows(NUM_ROWS, LIKE).data_ptr() == address


def kept(memory: RowMemory) -> int:
    """Bytes that it keeps."""
    return sum(map(len, memory._free))


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("crossdock.row_memory._KEPT_BYTES", 10 << 20)
    memory = RowMemory()
    rows = [memory.new_rows(NUM_ROWS, LIKE) for _ in range(5)]
    del rows
    assert kept(memory) == 8 << 20


def test_little_is_not_laid_into_much():
    memory = RowMemory()
    memory.new_rows(16 * NUM_ROWS, LIKE)  # nobody holds it
    held = memory.new_rows(NUM_ROWS, LIKE)
    assert kept(memory) == 64 << 20
    del held
    assert kept(memory) == 68 << 20


def test_closed_memory_keeps_nothing():
    memory = RowMemory()
    free, held = memory.new_rows(NUM_ROWS, LIKE), memory.new_rows(NUM_ROWS, LIKE).fill_(1.0)
    del free
    memory.close()
    assert kept(memory) == 0
    assert held.eq(1.0).all()
    del held
    assert kept(memory) == 0
