"""What `explain` says of storage is what an opened dispatcher takes."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

import crossdock as cd
from crossdock import select
from crossdock.backends.base import TransportSpec
from crossdock.backends.local import LocalBackend
from crossdock.backends.symmetric import SymmetricBackend
from tests.conftest import Ranks

CONFIG = cd.DispatcherConfig(
    num_experts=8, top_k=2, hidden_dim=256, dtype=torch.bfloat16, num_max_tokens_per_rank=1021, timeout_s=20.0
)


def told_and_taken(rank: int, name: str, config: cd.DispatcherConfig) -> tuple[int | None, int, str]:
    """What `explain` says before, what a dispatcher has afterwards, and the line of the table."""
    explanation = cd.explain(config)
    (told,) = [each.workspace_bytes for each in explanation.candidates if each.name == name]
    (line,) = [line for line in str(explanation).splitlines() if line.startswith(f"{name} ")]
    with cd.TokenDispatcher(config, backend=name) as dispatcher:
        return told, dispatcher.workspace_bytes, line


@pytest.mark.parametrize("num_tokens", [16, 1021])  # with buffers for small batches, and without
def test_storage_is_told_before_it_is_taken(ranks: Ranks, num_tokens: int):
    pytest.importorskip("triton")
    config = dataclasses.replace(CONFIG, num_max_tokens_per_rank=num_tokens)
    for told, taken, line in ranks(2).run(told_and_taken, "symmetric", config):
        assert told == taken > 0
        assert line.endswith(f"; {select.in_units(taken)} of storage a rank")


def test_who_keeps_no_storage_tells_of_none(ranks: Ranks):
    told, taken, line = told_and_taken(0, "local", CONFIG)
    assert (told, taken, line.split()) == (0, 0, ["local", "chosen"])
    for told, taken, line in ranks(2).run(told_and_taken, "all_to_all", CONFIG):
        assert (told, taken, line) == (0, 0, "all_to_all  chosen")
    refused = [each.workspace_bytes for each in cd.explain(CONFIG).candidates if each.why_not is not None]
    assert refused and set(refused) == {None}


class Aligned(SymmetricBackend):
    """One that takes multiples of 64 tokens, for which the dispatcher pads."""

    traits = dataclasses.replace(SymmetricBackend.traits, token_alignment=64)


def told_and_taken_of_aligned(rank: int) -> tuple[int | None, int, int]:
    with mock.patch.object(select, "known_backends", lambda: {"symmetric": Aligned()}):
        told, taken, _ = told_and_taken(rank, "symmetric", CONFIG)
    return told, taken, told_and_taken(rank, "symmetric", CONFIG)[1]


def test_padded_token_counts_are_part_of_it(ranks: Ranks):
    pytest.importorskip("triton")
    for told, taken, without in ranks(2).run(told_and_taken_of_aligned):
        assert told == taken > without


class Forgetful(LocalBackend):
    """One that cannot say what it would take."""

    def workspace_bytes(self, spec: TransportSpec) -> int:
        raise LookupError("no such table")


def test_a_backend_that_cannot_tell_takes_no_other_along():
    with mock.patch.object(select, "known_backends", lambda: {"local": LocalBackend(), "forgetful": Forgetful()}):
        first, second = str(cd.explain(CONFIG)).splitlines()
    assert first.split() == ["local", "chosen"]
    assert second.endswith("it failed when it was asked to describe itself: LookupError('no such table')")
