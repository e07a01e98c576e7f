"""What `explain` says of storage is what an opened dispatcher takes."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

import crossdock as cd
from crossdock import select
from crossdock.backends.local import LocalBackend
from crossdock.backends.symmetric import SymmetricBackend
from crossdock.testing import LoopbackGroup, traits_of
from tests.cli.commands import crossdock
from tests.conftest import Ranks

CONFIG = cd.DispatcherConfig(
    num_experts=8, top_k=2, hidden_dim=256, dtype=torch.bfloat16, num_max_tokens_per_rank=1021, timeout_s=20.0
)


class Picky(LocalBackend):
    """A backend that lacks something on this machine, and another one that has no such dtype."""

    name = "picky"
    traits = dataclasses.replace(LocalBackend.traits, dtypes=frozenset({torch.float32}), needs="a card")

    def refusal(self, spec: Any, group: Any) -> str | None:
        return super().refusal(spec, group) or "it sees no card"


def test_a_refusal_says_what_would_help():
    member, float32 = LoopbackGroup(2).member(0), dataclasses.replace(CONFIG, dtype=torch.float32)
    instead = 'leave backend= out: "auto" takes {!r} here'
    join = "call torch.distributed.init_process_group first, as on the ranks of torchrun"
    for backend, group, config, fix in (
        ("local", member, CONFIG, instead.format("loopback")),
        ("symmetric", None, CONFIG, f"{join}, or {instead.format('local')}"),
        ("all_to_all", None, CONFIG, f"{join}, or {instead.format('local')}"),
        ("all_to_all", member, CONFIG, f"pass a group of torch.distributed, or {instead.format('loopback')}"),
        ("loopback", None, CONFIG, f"it needs a crossdock.testing.LoopbackGroup, or {instead.format('local')}"),
        (Picky(), None, float32, f"it needs a card, or {instead.format('local')}"),
        (Picky(), None, CONFIG, instead.format("local")),  # no card would help
    ):
        with pytest.raises(cd.BackendUnavailable) as refused:
            cd.TokenDispatcher(config, group, backend)
        assert refused.value.fix == fix
        assert str(refused.value).endswith(f"{refused.value.reason}; {fix}")


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


class Odd(LocalBackend):
    """One of another package, which fails where it is asked one thing, with an error of a class of its own or not."""

    name = "odd"

    def __init__(self, asked: str, error: type[Exception]) -> None:
        self.asked, self.error = asked, error

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "asked"):
            if name == "traits":
                raise object.__getattribute__(self, "error")("no such\ntable")
            return self.fail
        return object.__getattribute__(self, name)

    def fail(self, *_: object) -> None:
        raise self.error("no such\ntable")


class NoSuchCard(Exception):
    """What a library of a vendor may raise."""


UNTOLD = {
    "traits": "cannot serve: it could not tell its traits",
    "refusal": "cannot serve: it could not tell whether it can serve",
    "describe": "usable: it could not tell how it would share out the work",
    "workspace_bytes": "usable: it could not tell how much storage it would take",
    "preference_on": 'usable by name only: it could not tell whether "auto" should take it',
}


@pytest.mark.parametrize("error", [ZeroDivisionError, TypeError, LookupError, NoSuchCard])
@pytest.mark.parametrize("asked", UNTOLD)
def test_a_backend_that_cannot_tell_takes_no_other_along(asked: str, error: type[Exception]):
    backends = {"local": LocalBackend(), "odd": Odd(asked, error)}
    with mock.patch.object(select, "known_backends", lambda: backends):
        explanation = cd.explain(CONFIG)
        assert traits_of("local") == LocalBackend.traits
    first, second = str(explanation).splitlines()
    assert first.split() == ["local", "chosen"]
    assert second == f"odd    {UNTOLD[asked]}: {error.__name__}: no such table"
    assert (explanation.candidates[1].traits == LocalBackend.traits) == (asked != "traits")
    if "cannot serve" in UNTOLD[asked]:
        with pytest.raises(cd.BackendUnavailable, match=f"it could not tell .*: {error.__name__}: no such table"):
            cd.TokenDispatcher(CONFIG, backend=backends["odd"])


@pytest.mark.parametrize(
    ("asked", "answer", "words"),
    [
        (
            "traits",
            {},
            "cannot serve: it could not tell its traits: TypeError: BackendTraits is wanted, not dict",
        ),
        ("refusal", False, "cannot serve: it could not tell whether it can serve: TypeError: str is wanted, not bool"),
        ("refusal", "", "cannot serve: it gives no reason"),
        ("preference_on", "often", "ValueError: one of never, fallback, preferred is wanted, not 'often'"),
        ("describe", 3, "TypeError: str is wanted, not int"),
        ("workspace_bytes", "much", "TypeError: 'str' object cannot be interpreted as an integer"),
    ],
)
def test_an_answer_of_another_kind_is_none(asked: str, answer: object, words: str):
    odd = LocalBackend()
    setattr(odd, asked, answer if asked == "traits" else lambda *_: answer)
    with mock.patch.object(select, "known_backends", lambda: {"local": LocalBackend(), "odd": odd}):
        first, second = str(cd.explain(CONFIG)).splitlines()
    assert first.split() == ["local", "chosen"] and second.endswith(words)


def test_a_backend_that_cannot_tell_its_traits_is_not_verified():
    with mock.patch.object(select, "known_backends", lambda: {"odd": Odd("traits", ZeroDivisionError)}):
        done = crossdock("verify", "--backend", "odd")
    sentence = "it could not tell its traits: ZeroDivisionError: no such table"
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"crossdock verify: backend 'odd' is not available here: {sentence}\n"
