"""A warning that rows were dropped points at the caller's line, however deep in the package it is given."""

from __future__ import annotations

import dataclasses
import gc
import linecache
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.nn import GroupedExperts, MoE
from crossdock.routing import softmax_topk
from tests.contract.overflow_trials import NUM_TOKENS, OPTIMIZERS, guarded_config, ids_of

Touch = Callable[[Any, torch.Tensor, torch.Tensor], object]


def check(layer: Any, x: torch.Tensor, scores: torch.Tensor) -> None:
    layer.dispatcher.check()  # this line


def stats(layer: Any, x: torch.Tensor, scores: torch.Tensor) -> None:
    layer.dispatcher.stats()  # this line


def dispatch(layer: Any, x: torch.Tensor, scores: torch.Tensor) -> None:
    layer.dispatch(x, scores, ids_of("hot"))  # this line


def dispatch_without_gradients(layer: Any, x: torch.Tensor, scores: torch.Tensor) -> None:
    with torch.no_grad():
        layer.dispatch(x, scores, ids_of("hot"))  # this line


def call_a_module(layer: Any, x: torch.Tensor, scores: torch.Tensor) -> None:
    """Frames of torch stand between."""
    experts = GroupedExperts(layer.dispatcher.num_local_experts, hidden_dim=16, ffn_dim=16)
    router = torch.nn.Linear(16, layer.dispatcher.config.num_experts)
    moe = MoE(layer, router, experts, routing=partial(softmax_topk, top_k=2))
    moe(x)  # this line


@pytest.mark.parametrize("touch", [check, stats, dispatch, dispatch_without_gradients, call_a_module])
def test_a_drop_is_told_of_the_caller_s_line(touch: Touch):
    x, scores = torch.ones(NUM_TOKENS, 16, requires_grad=True), torch.ones(NUM_TOKENS, 2)
    with cd.TokenDispatcher(guarded_config(row_capacity=cd.RowCapacity.rows(12))) as dispatcher:
        layer = dispatcher.layer("moe")
        layer.dispatch(x, scores, ids_of("hot"))
        with pytest.warns(UserWarning, match="no OverflowGuard watches") as told:
            touch(layer, x, scores)
    assert [place(each) for each in told] == [(__file__, touch.__name__)]


def place(told: warnings.WarningMessage) -> tuple[str, str]:
    """The file that a warning points at, and the function above, if it is at the line that this one marks."""
    lines = linecache.getlines(told.filename)
    assert "# this line" in lines[told.lineno - 1], (told.filename, told.lineno)
    return told.filename, next(
        line.split()[1].partition("(")[0] for line in reversed(lines[: told.lineno]) if line.startswith("def ")
    )


def test_a_guard_that_was_never_stepped_is_told_of_at_the_end_of_the_with():
    optimizer = OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(1))])
    with pytest.warns(UserWarning, match="was never stepped") as told:  # noqa: SIM117
        with cd.TokenDispatcher(guarded_config(row_capacity=cd.RowCapacity.rows(12))) as dispatcher:  # closed here
            guard = cd.OverflowGuard(dispatcher, optimizer)
            dispatcher.dispatch(torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of("hot"))
    assert guard.num_skipped() == 0
    assert told[0].filename == __file__
    assert "# closed here" in linecache.getline(__file__, told[0].lineno)


def test_a_rank_that_has_not_joined_the_others_is_told(monkeypatch: pytest.MonkeyPatch):
    config = guarded_config(row_capacity=cd.RowCapacity.rows(12))
    cd.TokenDispatcher(config).close()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")  # as torchrun does
    with pytest.warns(UserWarning, match="torchrun has started this process, and torch.distributed is not") as told:
        cd.TokenDispatcher(config).close()
    assert told[0].filename == __file__
    cd.TokenDispatcher(config, backend="local").close()  # asked for by name


@pytest.mark.parametrize("is_heard", [False, True])
def test_an_overflow_of_a_dispatcher_that_is_dropped_is_told(is_heard: bool):
    config = dataclasses.replace(guarded_config(row_capacity=cd.RowCapacity.rows(12)), on_overflow="raise")
    dispatcher = cd.TokenDispatcher(config)
    dispatcher.dispatch(torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of("hot"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if is_heard:
            with pytest.raises(cd.CapacityOverflow):
                dispatcher.check()
        del dispatcher
        gc.collect()
    messages = [str(each.message) for each in told]
    assert len(messages) == (not is_heard)
    assert all("dropped before it could raise: layer '' on rank 0" in message for message in messages)


def test_all_is_freed_where_that_warning_is_an_error():
    config = dataclasses.replace(guarded_config(row_capacity=cd.RowCapacity.rows(12)), on_overflow="raise")
    dispatcher = cd.TokenDispatcher(config)
    dispatcher.dispatch(torch.ones(NUM_TOKENS, 16), torch.ones(NUM_TOKENS, 2), ids_of("hot"))
    session = dispatcher._open.session
    with pytest.raises(UserWarning, match="dropped before it could raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatcher._open.close()
    assert session.state.phase == "closed"
