"""The proofs hold, and each one notices a difference of one bit that is planted where it looks."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from crossdock import LayerView
from crossdock.cli.demo import checkpoint, train
from crossdock.cli.demo import prove_sync_free as sync_free
from crossdock.cli.demo.claims import Claim
from crossdock.cli.demo.prove_ragged import prove_ragged
from crossdock.cli.demo.prove_sharded import prove_sharded
from crossdock.cli.demo.prove_split import prove_split
from crossdock.cli.demo.prove_sync_free import prove_sync_free
from crossdock.cli.demo.settings import Job, ModelSizes
from crossdock.nn import GroupedExperts
from crossdock.testing import run_ranks
from tests.conftest import Ranks

SMALL = ModelSizes(hidden_dim=32, ffn_dim=16, num_experts=8, seq_len=64)


def job_in(out: Path) -> Job:
    text = out / "text.txt"  # the standard library, which is the default, takes every rank half a second to read
    text.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(2000)))
    return Job(steps=2, seed=3, backend="auto", data=text, out=out, num_sequences=2, sizes=SMALL)


def nudged(tensor: Tensor) -> Tensor:
    """The tensor with its first element one bit larger, differentiable as before."""
    change = torch.zeros_like(tensor)
    if tensor.numel():
        flat = tensor.detach().flatten()
        change.view(-1)[0] = torch.nextafter(flat[0], flat.new_tensor(torch.inf)) - flat[0]
    return tensor + change


def planted(what: str) -> AbstractContextManager[Any]:
    experts, dispatch, load = GroupedExperts.forward, LayerView.dispatch, checkpoint.load

    def one_expert_differs(self: GroupedExperts, rows: Tensor, *more: Any) -> Tensor:
        out = experts(self, rows, *more)
        return nudged(out) if self.num_local_experts < SMALL.num_experts else out

    def bound_matters(self: LayerView, x: Tensor, *more: Any, num_tokens_per_rank: int | None = None) -> Any:
        x = x if num_tokens_per_rank is None else nudged(x)
        return dispatch(self, x, *more, num_tokens_per_rank=num_tokens_per_rank)

    def reads_wrongly(path: Path) -> Any:
        state, sizes = load(path)
        return {name: nudged(tensor) if name == "head.weight" else tensor for name, tensor in state.items()}, sizes

    def capacity_matters(self: LayerView, x: Tensor, *more: Any, **options: Any) -> Any:
        x = nudged(x) if self.dispatcher.config.row_capacity.kind == "calibrated" else x
        return dispatch(self, x, *more, **options)

    plants: dict[str, AbstractContextManager[Any]] = {
        "": nullcontext(),
        "expert": mock.patch.object(GroupedExperts, "forward", one_expert_differs),
        "capacity": mock.patch.object(LayerView, "dispatch", capacity_matters),
        "bound": mock.patch.object(LayerView, "dispatch", bound_matters),
        "file": mock.patch.object(checkpoint, "load", reads_wrongly),
    }
    return plants[what]


def proved(rank: int, prove: Any, job: Job, plant: str) -> list[Claim]:
    with planted(plant):
        claims: list[Claim] = prove(rank, job)
    return claims


def claims_of_training(rank: int, job: Job) -> list[Claim]:
    return train.train(rank, job).claims


@pytest.mark.parametrize(
    ("prove", "num_ranks", "plant", "first"),
    [
        (prove_split, 2, "expert", "on rank 0: layer 0 "),
        (prove_ragged, 2, "bound", "on rank 0: counts [8, 3]: "),
        (prove_sharded, 4, "bound", " of step "),
        (prove_sync_free, 2, "capacity", "on rank 0: with a capacity: "),
        (claims_of_training, 2, "file", "on rank 0: weights head.weight: 1 of 8192 elements differ"),
    ],
)
def test_a_proof_holds_and_notices_a_bit(
    prove: Any, num_ranks: int, plant: str, first: str, ranks: Ranks, tmp_path: Path
):
    job = dataclasses.replace(job_in(tmp_path), backend="all_to_all")
    by_rank = ranks(num_ranks).run(proved, prove, job, "")
    assert all(claim.holds for claim in by_rank[0]), by_rank[0]
    assert all(claims == by_rank[0] for claims in by_rank)
    by_rank = ranks(num_ranks).run(proved, prove, job, plant)
    failed = [claim for claim in by_rank[0] if not claim.holds]
    assert failed
    assert all(first in claim.result or "lengths" in claim.claim for claim in failed), failed
    assert all(claims == by_rank[0] for claims in by_rank)


def test_four_ranks_split_as_two_do(ranks: Ranks, tmp_path: Path):
    (claim,) = ranks(4).run(proved, prove_split, job_in(tmp_path), "")[0]
    assert claim.holds, claim.result
    assert claim.claim.startswith("EP 1 and EP 4")
    assert all(claim.holds for claim in ranks(4).run(proved, prove_ragged, job_in(tmp_path), "")[0])


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        pytest.param(
            "symmetric",
            "2, 2, 2, 2, 2, 2, 2 before, 4, 0, 0, 0, 0, 0, 0, 0 after",
            marks=pytest.mark.full,  # the last one takes it too
        ),
        ("all_to_all", "2, 2, 2, 2, 2, 2, 2 before, 4, 2, 2, 2, 2, 2, 2, 2 after"),  # Gloo takes sizes from the host
        ("local", "2, 2, 2, 2, 2, 2, 2 before, 4, 0, 0, 0, 0, 0, 0, 0 after"),  # which serves no two ranks
    ],
)
def test_training_without_waits_goes_through_an_overflow(tmp_path: Path, backend: str, told: str):
    job = dataclasses.replace(job_in(tmp_path), backend=backend)
    # Ranks of its own, for a proof that makes a group of torch's: what earlier tests have left behind stays out.
    reads, overflow = run_ranks(proved, 2, prove_sync_free, job, "", timeout_s=100.0)[0]
    assert reads.holds and overflow.holds, (reads, overflow)
    assert told in reads.result
    assert ("Gloo takes sizes" in reads.how) == (backend == "all_to_all")
    assert reads.claim.startswith("training with a row capacity" if backend == "all_to_all" else "no step waits for")
    assert ("for nothing offers it on cpu" in reads.how) == (backend == "local")
    assert overflow.result.startswith("skipped: step 4; room for ")
    assert [(line.dispatches, line.overflows, line.dropped > 0) for line in reads.layers] == [(8, 1, True)] * 2


def proved_beside_an_old_gpu(rank: int, job: Job) -> list[Claim]:
    with mock.patch.object(sync_free, "_experts_wait", lambda sizes, device: True):
        return prove_sync_free(rank, job)


def test_a_gpu_whose_experts_wait_leaves_the_proof_to_the_cpu(tmp_path: Path):
    job = dataclasses.replace(job_in(tmp_path), backend="all_to_all")
    assert not sync_free._experts_wait(SMALL, torch.device("cpu"))  # where waiting costs nothing
    reads, overflow = run_ranks(proved_beside_an_old_gpu, 2, job, timeout_s=100.0)[0]
    assert reads.holds and overflow.holds, (reads, overflow)
    assert "on the CPU, for experts read their counts on the host on cpu" in reads.how
