"""What `stats()` tells by layer: bytes sent, held and kept, skipped steps; with and without a wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.host_copy import HostCopy
from crossdock.telemetry import figures
from crossdock.testing import Problem, Seat, ThreadRunner
from crossdock.testing.solving import forward
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, problem, random_ids
from tests.gpus import host_sync_is_an_error

ROW_BYTES = 16 * 4
CAPACITY = cd.RowCapacity.worst_case()


def trial_of(num_tokens: tuple[int, ...], **fields: Any) -> Problem:
    config = make_config(4, 2, **{"row_capacity": CAPACITY, **fields})
    return problem(config, random_ids(num_tokens, 2, 4))


def bytes_of_layers(seat: Seat, trial: Problem) -> tuple[dict[str, list[int]], list[int]]:
    """By layer: rows kept, bytes of rows sent, held, kept for backward and copied; then the dispatcher's two sums."""
    with seat.open(trial.config) as dispatcher:
        for name in ("thrice", "once", "thrice", "thrice"):
            forward(dispatcher.layer(name), trial, seat.rank, seat.device).backward()
        with torch.no_grad():
            forward(dispatcher.layer("looked at"), trial, seat.rank, seat.device)
        stats = dispatcher.stats()
    accounts = {
        name: [layer.rows, layer.sent_rows_bytes, layer.last_rows_bytes, layer.saved_bytes, layer.received_rows_bytes]
        for name, layer in stats.layers.items()
    }
    return accounts, [stats.sent_rows_bytes, stats.sent_bytes]


@every_backend(2)
def test_bytes_belong_to_layers(on: On, backend: str, ep_size: int):
    trial = trial_of((6, 4))
    home = [part // 2 for part in trial.topk_expert_ids]
    away = [int((ranks != rank).any(1).sum()) for rank, ranks in enumerate(home)]
    both_ways = 2 * sum(away) * ROW_BYTES  # what this rank sends out, and what it sends back, forward and backward
    for rank, (accounts, sums) in enumerate(on(backend, ep_size)(bytes_of_layers, trial)):
        rows, held = int(sum((ranks == rank).sum() for ranks in home)), 64 * 2 * 2 * ROW_BYTES
        assert accounts["once"] == [rows, both_ways, held, held, rows * ROW_BYTES]
        assert accounts["thrice"] == [3 * rows, 3 * both_ways, held, held, 3 * rows * ROW_BYTES]
        assert accounts["looked at"] == [rows, both_ways // 2, held, 0, rows * ROW_BYTES]
        assert sums[0] == 4 * both_ways + both_ways // 2 < sums[1]


def test_nothing_is_kept_where_the_experts_apply_the_scores():
    trial = trial_of((6,), row_capacity=cd.RowCapacity.exact())
    with cd.TokenDispatcher(trial.config, backend="local") as dispatcher:
        for apply_scores, kept in ((True, 12 * ROW_BYTES), (False, 0)):
            routed = dispatcher.dispatch(trial.x[0], trial.topk_scores[0], trial.topk_expert_ids[0])
            dispatcher.combine(routed.rows, routed.handle, apply_scores=apply_scores)
            with torch.no_grad():  # an evaluation between two steps
                dispatcher.combine(routed.rows, routed.handle, apply_scores=not apply_scores)
            account = dispatcher.stats().layers[""]
            assert (account.last_rows_bytes, account.saved_bytes) == (12 * ROW_BYTES, kept)


@pytest.mark.parametrize("settings", [{}, {"snapshot": True}, {"retry": True}], ids=["host", "device", "retry"])
def test_skipped_steps_belong_to_the_layers_that_lacked_rows(settings: dict[str, Any]):
    """Layer "a" overflows in the second step, both in the fourth; under `retry` these are run again."""
    config = make_config(4, 2, row_capacity=cd.RowCapacity.calibrated(1.0), on_overflow="skip_step")
    weight = torch.nn.Parameter(torch.ones(16))
    with cd.TokenDispatcher(config, backend="local") as dispatcher:
        guard = cd.OverflowGuard(dispatcher, torch.optim.SGD([weight], lr=0.1), **settings)
        for of_a, of_b in ((4, 4), (8, 4), (8, 4), (16, 8), (16, 8), (1, 1)):

            def run(sizes: tuple[int, int] = (of_a, of_b)) -> None:
                for name, num_tokens in zip(("a", "b"), sizes, strict=True):
                    ids = torch.tensor([[0, 1]] * num_tokens)
                    x, scores = weight.expand(num_tokens, 16), torch.ones(num_tokens, 2)
                    routed = dispatcher.layer(name).dispatch(x, scores, ids)
                    dispatcher.layer(name).combine(routed.rows, routed.handle).sum().backward()

            guard.step(run)
        stats = dispatcher.stats()
        skipped = [stats.layers[name].skipped_steps for name in ("a", "b")]
        told = {f.labels["layer"]: f.value for f in figures(stats) if f.name == "layer_skipped_steps_total"}
    assert (stats.skipped_steps, skipped) == ((0, [0, 0]) if "retry" in settings else (2, [2, 1]))
    assert told == dict(zip(("a", "b"), skipped, strict=True))


def test_without_a_wait_there_is_the_last_copy_that_has_come(monkeypatch: pytest.MonkeyPatch):
    arrived = [False]
    monkeypatch.setattr(HostCopy, "has_arrived", lambda copy: arrived[0])
    trial = trial_of((6,))
    with cd.TokenDispatcher(trial.config, backend="local") as dispatcher:

        def dispatch() -> None:
            dispatcher.dispatch(trial.x[0], trial.topk_scores[0], trial.topk_expert_ids[0])

        dispatch()
        early = dispatcher.stats(wait=False)
        assert (early.calls, early.rows, dict(early.layers)) == (1, 0, {})
        dispatch()
        assert dispatcher.stats(wait=False).rows == 0
        arrived[0] = True
        late = dispatcher.stats(wait=False)
        assert (late.calls, late.rows, late.layers[""].calls) == (2, 12, 1), "of when the copy was asked for"
        assert dispatcher.stats(wait=False).rows == 24
        arrived[0] = False
        dispatch()
        assert (dispatcher.stats(wait=False).rows, dispatcher.stats().rows) == (24, 36)
        assert dispatcher.stats(wait=False) == dispatcher.stats()


def test_what_a_combine_keeps_is_its_own_whatever_was_dispatched_since():
    trial = trial_of((6,), row_capacity=cd.RowCapacity.exact())
    x, scores, ids = trial.x[0], trial.topk_scores[0], trial.topk_expert_ids[0]
    with cd.TokenDispatcher(trial.config, backend="local") as dispatcher:
        first = dispatcher.dispatch(x, scores, ids)
        dispatcher.dispatch(x[:1], scores[:1], ids[:1])
        dispatcher.combine(first.rows, first.handle)
        account = dispatcher.stats().layers[""]
        assert (account.last_rows_bytes, account.saved_bytes) == (2 * ROW_BYTES, 12 * ROW_BYTES)


def of_a_layer_that_only_combines(seat: Seat, trial: Problem) -> list[int]:
    with seat.open(trial.config) as dispatcher, torch.no_grad():
        parts = (trial.x[seat.rank], trial.topk_scores[seat.rank], trial.topk_expert_ids[seat.rank])
        routed = dispatcher.layer("out").dispatch(*parts)
        dispatcher.layer("home").combine(routed.rows, routed.handle)
        stats = dispatcher.stats()
        home = stats.layers["home"]
        assert (home.calls, home.rows, home.imbalance, home.fill) == (0, 0, 1.0, None)
        assert sum(layer.sent_rows_bytes for layer in stats.layers.values()) == stats.sent_rows_bytes
        return [stats.layers[name].sent_rows_bytes for name in ("out", "home")]


def test_a_layer_that_only_combines_has_an_account():
    out, home = ThreadRunner(2)(of_a_layer_that_only_combines, trial_of((6, 4)))
    assert out[0] == home[1] > 0 and out[1] == home[0] > 0  # what one rank sends out the other one sends home


def test_before_anything_has_come_there_is_nothing():
    with cd.TokenDispatcher(make_config(4, 2)) as dispatcher:
        for wait in (True, False):
            assert dataclasses.asdict(dispatcher.stats(wait=wait)) == dataclasses.asdict(cd.DispatcherStats())


@pytest.mark.gpu(1)
def test_nothing_waits_for_the_device():
    device = torch.device("cuda", torch.cuda.current_device())
    trial = trial_of((6,))
    x, scores, ids = (part[0].to(device) for part in (trial.x, trial.topk_scores, trial.topk_expert_ids))
    with cd.TokenDispatcher(trial.config, device=device) as dispatcher:
        dispatcher.dispatch(x, scores, ids)
        dispatcher.stats(wait=False)
        torch.cuda.synchronize()
        with host_sync_is_an_error():
            dispatcher.dispatch(x, scores, ids)
            told = dispatcher.stats(wait=False)
        assert told.rows in (12, 24) and dispatcher.stats().rows == 24  # as far as the device has come
