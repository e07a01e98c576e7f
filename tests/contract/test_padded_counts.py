"""Backends that want equal or aligned token counts get them from the dispatcher, and nobody sees the padding."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import crossdock as cd
from crossdock import recompute
from crossdock.backends.base import Transport
from crossdock.group.fingerprint import CallFacts
from crossdock.padding import PaddedTransport
from crossdock.testing import Cell, Seat, ThreadRunner, assert_bit_equal, conformance_cells, run_cell
from crossdock.testing.solving import solve
from tests.contract.picky import PickyBackend, PickyTransport
from tests.contract.trials import make_config, problem, random_ids, refused, with_config

EQUAL, ALIGNED, BOTH = PickyBackend(1, equal=True), PickyBackend(4, equal=False), PickyBackend(4, equal=True)
picky = pytest.mark.parametrize("backend", [EQUAL, ALIGNED, BOTH], ids=["equal", "aligned", "both"])
# Inductor compiles for long, and what it makes of a layout does not depend on the backend; aot_eager stays.
COMPILED_TO_CODE = {"torch.compile, inductor: the same bits", "torch.compile, worst case: the same bits"}
CAPACITIES = (cd.RowCapacity.worst_case(), cd.RowCapacity.calibrated(3.0), cd.RowCapacity.rows(64))


def served(dispatcher: cd.TokenDispatcher) -> PickyTransport:
    """The backend's own transport."""
    transport = dispatcher._open.transport
    inner = transport._inner if isinstance(transport, PaddedTransport) else transport
    assert isinstance(inner, PickyTransport)
    return inner


@pytest.mark.parametrize(("backend", "ep_size"), [(BOTH, 2), (ALIGNED, 1)], ids=["both-2", "aligned-1"])
def test_the_conformance_suite(backend: PickyBackend, ep_size: int, full: bool):
    for number, cell in enumerate(conformance_cells(ep_size)):
        if str(cell) not in COMPILED_TO_CODE and (full or number % 3 == 0):
            check_cell(backend, ep_size, cell)


def check_cell(backend: PickyBackend, ep_size: int, cell: Cell) -> None:
    results = [result for rank in ThreadRunner(ep_size, backend)(run_cell, cell, backend.traits) for result in rank]
    failed = [result for result in results if result.status == "failed"]
    assert not failed, "\n".join(f"{cell}, rank {f.rank}, {f.group}: {f.message}\n{f.detail}" for f in failed)


def counts_seen(
    seat: Seat, num_tokens: tuple[int, ...], bound: int | None, fields: dict[str, Any]
) -> tuple[list[int], int]:
    """What the backend saw of one forward and backward, and how often it waited."""
    config = make_config(4, 2, num_max_tokens_per_rank=30, **fields)
    trial = problem(config, random_ids(num_tokens, 2, 4))
    with seat.open(config) as dispatcher:
        x = trial.x[seat.rank].clone().requires_grad_()
        routed = dispatcher.dispatch(
            x, trial.topk_scores[seat.rank], trial.topk_expert_ids[seat.rank], num_tokens_per_rank=bound
        )
        out = dispatcher.combine(routed.rows, routed.handle)
        out.sum().backward()
        assert out.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
        return served(dispatcher).num_tokens, dispatcher.stats().host_syncs


SYNC_FREE = {"row_capacity": cd.RowCapacity.rows(120)}


@pytest.mark.parametrize(
    ("backend", "num_tokens", "bound", "fields", "seen", "waits"),
    [
        (EQUAL, (5, 3), None, {}, [5, 5], 2),
        (EQUAL, (5, 3), 9, {}, [9, 9], 1),
        (EQUAL, (5, 5), None, {"equal_token_counts": True}, [5, 5], 1),
        (EQUAL, (0, 0), None, {}, [0, 0], 2),
        (EQUAL, (0, 3), None, {}, [3, 3], 2),
        (EQUAL, (5, 3), None, SYNC_FREE, [30, 30], 1),
        (EQUAL, (5, 3), 9, SYNC_FREE, [9, 9], 1),
        (EQUAL, (5, 5), None, {"equal_token_counts": True, **SYNC_FREE}, [5, 5], 1),
        (ALIGNED, (5, 3), None, {}, [8, 4], 1),
        (ALIGNED, (0, 3), 9, {}, [0, 4], 1),
        (ALIGNED, (29, 3), None, SYNC_FREE, [32, 4], 1),
        (BOTH, (5, 3), None, {}, [8, 8], 2),
        (BOTH, (5, 3), 9, {}, [12, 12], 1),
        (BOTH, (5, 5), None, {"equal_token_counts": True}, [8, 8], 1),
        (BOTH, (29, 3), None, SYNC_FREE, [32, 32], 1),
        (BOTH, (29, 3), 30, SYNC_FREE, [32, 32], 1),
    ],
    ids=str,
)
def test_what_the_backend_is_given(
    backend: PickyBackend,
    num_tokens: tuple[int, int],
    bound: int | None,
    fields: dict[str, Any],
    seen: list[int],
    waits: int,
):
    by_rank = ThreadRunner(2, backend)(counts_seen, num_tokens, bound, fields)
    assert [counts[0] for counts, _ in by_rank] == seen
    # One wait is the loopback's own, for counts that it needs on the host; the other is for the largest count.
    assert [syncs for _, syncs in by_rank] == [waits, waits]


def outcome(seat: Seat, trial: Any) -> list[Tensor]:
    with seat.open(trial.config) as dispatcher:
        solved = solve(dispatcher, trial, seat.rank, seat.device)
        again = solve(dispatcher, trial, seat.rank, seat.device)
        for name in ("out", "grad_x", "grad_scores"):
            assert_bit_equal(getattr(again, name), getattr(solved, name), f"{name}, once more")
        return [solved.out, solved.grad_x, solved.grad_scores, solved.tokens_per_expert]


@picky
@pytest.mark.parametrize("num_tokens", [(8, 3), (6, 6), (5, 3), (13, 7), (5, 5), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_uneven_counts_have_the_bits_of_a_backend_that_takes_them(
    backend: PickyBackend, num_tokens: tuple[int, int], reduction: str
):
    config = make_config(4, 2, 64, dtype=torch.bfloat16, reduction=reduction, num_max_tokens_per_rank=15)
    trial = problem(config, random_ids(num_tokens, 2, 4), experts="identity")
    wanted = ThreadRunner(2, "loopback")(outcome, trial)
    capacities = (config.row_capacity, *CAPACITIES)
    for trial in (with_config(trial, row_capacity=capacity) for capacity in capacities):
        for expected, actual in zip(wanted, ThreadRunner(2, backend)(outcome, trial), strict=True):
            for name, one, other in zip(("out", "dx", "dscores", "counts"), actual, expected, strict=True):
                assert_bit_equal(one, other, f"{name}, {trial.config.row_capacity}")


def recomputed(seat: Seat, lengths: tuple[int, ...], fields: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Gradients of two regions in flight, and how often their backward waited."""
    config = make_config(4, 2, 16, num_max_tokens_per_rank=15, **fields)
    with seat.open(config) as dispatcher:
        layer = dispatcher.layer("moe")

        def region(x: Tensor, ids: Tensor) -> Tensor:
            routed = layer.dispatch(x, x[:, :2].sigmoid(), ids)
            return layer.combine(routed.rows * routed.rows, routed.handle)

        inputs, losses = [], []
        for step in range(2):
            trial = problem(config, random_ids(lengths, 2, 4, seed=step), seed=step)
            inputs.append(trial.x[seat.rank].clone().requires_grad_())
            out = recompute.checkpoint(region, inputs[-1], trial.topk_expert_ids[seat.rank])
            losses.append(out.square().sum())
        waited = dispatcher.stats().host_syncs
        torch.autograd.backward(losses)
        return [x.grad for x in inputs if x.grad is not None], dispatcher.stats().host_syncs - waited


@picky
@pytest.mark.parametrize("capacity", [cd.RowCapacity.exact(), *CAPACITIES], ids=str)
def test_a_recomputation_agrees_on_nothing_again(backend: PickyBackend, capacity: cd.RowCapacity):
    run = partial(recomputed, lengths=(7, 4), fields={"row_capacity": capacity})
    for (wanted, _), (grads, waits) in zip(
        ThreadRunner(2, "loopback")(run), ThreadRunner(2, backend)(run), strict=True
    ):
        assert waits == 0 and len(grads) == 2
        for one, other in zip(grads, wanted, strict=True):
            assert_bit_equal(one, other, "gradient of x")


def wrongly_declared(seat: Seat) -> str:
    config = make_config(4, 2, equal_token_counts=True, timeout_s=5.0)
    trial = problem(config, random_ids((5, 3), 2, 4))
    with seat.open(config) as dispatcher:
        x, scores, ids = (part[seat.rank] for part in (trial.x, trial.topk_scores, trial.topk_expert_ids))
        return refused(lambda: dispatcher.dispatch(x, scores, ids), cd.ContractViolation)


@picky
def test_a_wrong_declaration_is_named(backend: PickyBackend):
    for message in ThreadRunner(2, backend)(wrongly_declared):
        assert "number of tokens (declared equal by equal_token_counts=True)" in message
        assert "5" in message and "3" in message


def copies(seat: Seat, num_tokens: int) -> bool:
    """Whether a dispatch and its backward copy what they are given."""
    with seat.open(make_config(4, 2)) as dispatcher:
        transport, inner = dispatcher._open.transport, served(dispatcher)
        x, grad = torch.ones(num_tokens, 16), torch.ones(num_tokens, 16)
        seen: list[Tensor] = []
        dispatch, out, home = inner.dispatch, inner.rows_out, inner.rows_home

        def seeing(tensor: Tensor) -> Tensor:
            seen.append(tensor)
            return tensor

        inner.dispatch = lambda x, *more: dispatch(seeing(x), *more)  # type: ignore[method-assign]
        inner.rows_out = lambda x, *more: out(seeing(x), *more)  # type: ignore[method-assign]
        inner.rows_home = lambda *more: seeing(home(*more))  # type: ignore[method-assign]

        def movements(call: Any) -> Tensor:
            received = transport.dispatch(x, torch.ones(num_tokens, 2), torch.ones(num_tokens, 2).long(), None, call)
            transport.rows_out(grad, received.layout, call)
            return transport.rows_home(received.rows, None, received.layout, call)

        came = dispatcher._open.run(CallFacts(-1, "dispatch", ""), lambda _, call: movements(call))
        assert came.shape == x.shape
        return [seen[0] is x, seen[1] is grad, seen[2] is came] != [True] * 3


@pytest.mark.parametrize(("num_tokens", "copied"), [(8, False), (0, False), (7, True)])
def test_what_is_equal_and_aligned_is_not_copied(num_tokens: int, copied: bool):
    assert ThreadRunner(1, BOTH)(copies, num_tokens) == [copied]


def wrapped(seat: Seat) -> bool:
    dispatcher = seat.open(make_config(4, 2))
    transport = dispatcher._open.transport
    with dispatcher:
        bytes_sent = dispatcher.stats().sent_bytes, transport.fault_flag(), dispatcher.workspace_bytes
        assert bytes_sent == (0, None, 0)
    assert not isinstance(transport, PaddedTransport) or served(dispatcher).closed
    return isinstance(transport, PaddedTransport)


def test_only_backends_that_need_it_are_padded_for():
    assert ThreadRunner(1, "loopback")(wrapped) == [False]
    assert ThreadRunner(1, PickyBackend(1, equal=False))(wrapped) == [False]
    assert ThreadRunner(1, BOTH)(wrapped) == [True]


def test_every_question_to_a_transport_is_passed_on():
    public = {name for name, _ in inspect.getmembers(Transport) if not name.startswith("_")}
    assert public <= vars(PaddedTransport).keys()
