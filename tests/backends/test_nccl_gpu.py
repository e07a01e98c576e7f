"""`all_to_all` over NCCL: the contract on two GPUs, and faults that free the device and name their rank."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock.testing import start_ranks
from tests.gpus import host_sync_is_an_error

TIMEOUT_S = 4.0
MARGIN_S = 5.0

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(240)]


def _open(timeout_s: float = TIMEOUT_S) -> cd.TokenDispatcher:
    config = cd.DispatcherConfig(
        num_experts=8,
        top_k=2,
        hidden_dim=64,
        dtype=torch.bfloat16,
        num_max_tokens_per_rank=64,
        timeout_s=timeout_s,
    )
    return cd.TokenDispatcher(config, backend="all_to_all")


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    return x, torch.rand(16, 2, device="cuda"), torch.randint(0, 8, (16, 2), device="cuda")


def _combine_without_a_peer(rank: int, fault: str) -> dict[str, Any]:
    """Rank 1 goes after one good pair of calls; rank 0 tells what its next combine came to."""
    dispatcher = _open()
    x, scores, ids = _inputs()
    routed = dispatcher.dispatch(x, scores, ids)
    dispatcher.combine(routed.rows, routed.handle)
    torch.cuda.synchronize()
    if rank == 1:
        if fault == "dies":
            os._exit(7)
        if fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3 * TIMEOUT_S)  # "idles"
        return {}
    begun = time.monotonic()
    out = dispatcher.combine(routed.rows, routed.handle)
    enqueued_s = time.monotonic() - begun
    torch.cuda.synchronize()
    told: dict[str, Any] = {"enqueued_s": enqueued_s, "is_nan": bool(out.isnan().all())}
    try:
        dispatcher.check()
    except cd.PeerTimeout as error:
        told |= {"ranks": error.ranks, "after_s": time.monotonic() - begun, "message": str(error)}
    begun = time.monotonic()
    dispatcher.close()
    return told | {"closed_s": time.monotonic() - begun}


@pytest.mark.parametrize("fault", ["dies", "stops", "idles"])
def test_a_missing_rank_is_named_and_the_device_is_freed(fault):
    with start_ranks(_combine_without_a_peer, 2, fault, backend="nccl") as started:
        survivor = started.results(timeout_s=60.0)[0]
    told = survivor.value
    assert told["enqueued_s"] < 1.0, "combine waited on the host"
    assert told["is_nan"], "outputs of a call that was given up are NaN"
    assert told["ranks"] == (1,)
    assert told["after_s"] < TIMEOUT_S + MARGIN_S
    assert told["closed_s"] < TIMEOUT_S


def _bad_id_on_one_rank(rank: int) -> tuple[str, int]:
    with _open() as dispatcher:
        x, scores, ids = _inputs()
        if rank == 1:
            ids[3, 1] = 8
        try:
            dispatcher.dispatch(x, scores, ids)
        except cd.InvalidInput as error:
            ids[3, 1] = 1
            return str(error), dispatcher.dispatch(x, scores, ids).rows.shape[0]
    return "", 0


def test_a_bad_id_is_refused_on_every_rank_before_any_row_moves(gpu_ranks):
    told = gpu_ranks(2).run(_bad_id_on_one_rank)
    assert {message for message, _ in told} == {"topk_expert_ids has ids outside -1..7: 1 on rank 1; no row was moved"}
    assert sum(num_rows for _, num_rows in told) == 64, "the call after it is a good one"


def _another_layer_on_each_rank(rank: int) -> tuple[int, ...]:
    with _open() as dispatcher:
        routed = dispatcher.dispatch(*_inputs())
        dispatcher.layer("ab"[rank]).combine(routed.rows, routed.handle)
        torch.cuda.synchronize()
        try:
            dispatcher.combine(routed.rows, routed.handle)
        except cd.ContractViolation as error:
            assert "layer is 'a' on ranks [0], 'b' on ranks [1]" in str(error)
            return error.ranks
    return ()


def test_a_combine_that_differs_is_found_at_the_next_call(gpu_ranks):
    assert gpu_ranks(2).run(_another_layer_on_each_rank) == [(1,), (1,)]


def _without_host_syncs(rank: int) -> None:
    with _open() as dispatcher:
        x, scores, ids = _inputs()
        x.requires_grad_()
        for _ in range(2):
            routed = dispatcher.dispatch(x, scores, ids)
            with host_sync_is_an_error():
                dispatcher.combine(routed.rows, routed.handle).backward(torch.ones_like(x))
        dispatcher.check()


def test_only_dispatch_waits_on_the_host(gpu_ranks):
    gpu_ranks(2).run(_without_host_syncs)
