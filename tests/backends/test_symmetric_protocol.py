"""The rounds of the symmetric backend, every interleaving of two ranks over three calls.

What a call does is taken from a real one: its waits, signals, reads and writes are noted as they happen. Every word and
buffer has one writer, so the state of both ranks is the pair of their positions, and all of them can be visited.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from crossdock.backends.base import Call, Link, TransportSpec, Weights
from crossdock.group.fingerprint import CallFacts
from crossdock.group.members import Members

pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")

from crossdock.backends.symmetric import headers, rounds, transport

# -- noting what a call does ------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step of a rank: what it does, and to which buffer."""

    what: str
    buffer: str = ""


# The launchers of the transport, and what each of them does to shared memory.
_LAUNCHES = {
    "launch_publish": [Step("write", "header"), Step("write", "rows")],
    "launch_count_published": [Step("read", "rows")],
    "launch_place_published": [Step("read", "rows")],
    "launch_pull_rows": [Step("read", "rows")],
    "launch_pre_add": [Step("write", "partials")],
    "launch_add_ranks": [Step("read", "partials")],
    "launch_add_slot": [Step("read", "partials")],
    "launch_lay_out_scalars": [Step("write", "scalars")],
    "launch_fetch_scalars": [Step("read", "scalars")],
}


def _noting(steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    def note(owner: Any, name: str, make: Callable[..., list[Step]]) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            steps.extend(make(*args, **options))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    for name, does in _LAUNCHES.items():

        def steps_of(*args: Any, does: list[Step] = does, **options: Any) -> list[Step]:
            carries_header = does[0].what == "write" and does[0].buffer != "header" and args[-1] is not None
            return [Step("write", "header"), *does] if carries_header else does

        note(transport, name, steps_of)
    note(headers, "launch_read_headers", lambda *_: [Step("read", "header")])
    for name in ("await_free", "publish"):
        note(rounds.Rounds, name, lambda _, buffer, *rest, name=name: [Step(name, buffer)])
    for name in ("await_published", "finish_reading"):
        note(rounds.Rounds, name, lambda _, *rest, name=name: [Step(name)])


def _transport(reduction: Any) -> transport.SymmetricTransport:
    spec = TransportSpec(
        num_experts=2,
        top_k=2,
        hidden_dim=8,
        dtype=torch.float32,
        num_max_tokens_per_rank=4,
        expert_alignment=2,
        reduction=reduction,
        num_sms=None,
        timeout_s=10.0,
        rank=0,
        ep_size=1,
    )
    link = Link(members=Members(0, (0,), torch.device("cpu"), "none"), store_prefix="", on_expiry=lambda _: None)
    return transport.SymmetricTransport(spec, link, torch.device("cpu"))


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Step]]:
    """The steps of every operation, which are the same on every rank and for every group size."""
    steps: list[Step] = []
    found: dict[str, list[Step]] = {}

    def take(name: str) -> None:
        found[name] = steps.copy()
        steps.clear()

    call = Call(facts=CallFacts(0, "dispatch", ""), words=tuple(CallFacts(0, "dispatch", "").words()), verify=_trust)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _noting(steps, monkeypatch)
        for reduction in ("fast", "exact"):
            opened = _transport(reduction)
            x, scores = torch.ones(3, 8), torch.ones(3, 2)
            received = opened.dispatch(x, scores, torch.tensor([[0, 1], [1, -1], [0, 0]]), call)
            take("dispatch")
            opened.rows_home(received.rows, Weights(scores, received.row_scores), received.layout, call)
            take(f"combine {reduction}")
            opened.rows_out(x, received.layout, call)
            take("rows out")
            opened.scalars_home(received.row_scores, received.layout, call)
            take("scalars")
            opened.rows_home(received.rows, None, received.layout, call)
            opened.scalars_home(received.row_scores, received.layout, None)
            take(f"dispatch backward {reduction}")
            opened.close()
    return found


def _trust(words: Sequence[Sequence[int]]) -> None:
    """Take all ranks' words as they are."""


# -- the model --------------------------------------------------------------------------------------------------------


class Micro(NamedTuple):
    """What happens at once: await, tell, fill or see a word, with its value."""

    what: str
    word: str
    value: int


_TORN = -1


def micro_steps(steps: Sequence[Step], *, header_places: int = 2) -> list[Micro]:
    """A rank's steps, writes and reads cut in two: between the halves the other rank may do anything."""
    number, last, micros = 0, dict.fromkeys(rounds.BUFFERS, 0), list[Micro]()
    for what, buffer in steps:
        writing = what == "write"
        place = f"header {(number + writing) % header_places}" if buffer == "header" else buffer
        if what == "await_free":
            micros.append(Micro("await", "read", last[buffer]))
        elif what == "publish":
            number += 1
            last[buffer] = number
            micros.append(Micro("tell", "published", number))
        elif what == "await_published":
            micros.append(Micro("await", "published", number))
        elif what == "finish_reading":
            micros.append(Micro("tell", "read", number))
        elif writing:
            micros += [Micro("fill", place, _TORN), Micro("fill", place, number + 1)]
        else:
            micros += [Micro("see", place, number)] * 2
    return micros


class Found(NamedTuple):
    """What can go wrong, and in how many states the two ranks can be."""

    wrong: str
    num_states: int


def explore(micros: Sequence[Micro]) -> Found:
    """Visit every state that two ranks with these steps can come to."""
    words: list[dict[str, int]] = [{"published": 0, "read": 0}]
    for what, word, value in micros:
        words.append(words[-1] | {word: value} if what in ("tell", "fill") else words[-1])
    seen, todo = {(0, 0)}, [(0, 0)]
    while todo:
        state = todo.pop()
        moves = []
        for rank in (0, 1):
            at, other = state[rank], state[1 - rank]
            if at == len(micros):
                continue
            what, word, value = micros[at]
            there = words[other].get(word, 0)
            if what == "await" and there < value:
                continue
            if what == "see" and there != value:
                return Found(f"read {word} of round {there}, wanted {value}", len(seen))
            moves.append((at + 1, other) if rank == 0 else (other, at + 1))
        if not moves and state != (len(micros), len(micros)):
            return Found(f"stuck at {state}", len(seen))
        todo += [move for move in moves if move not in seen]
        seen.update(moves)
    return Found("", len(seen))


# -- the tests --------------------------------------------------------------------------------------------------------


def test_operations_are_what_they_say(traces: dict[str, list[Step]]):
    read_header = Step("read", "header")
    assert traces["dispatch"][:5] == [
        Step("await_free", "rows"),
        Step("write", "header"),
        Step("write", "rows"),
        Step("publish", "rows"),
        Step("await_published"),
    ]
    for name, steps in traces.items():
        assert read_header in steps and steps.index(read_header) > steps.index(Step("await_published")), name
        assert steps[-1] == Step("finish_reading"), name
    assert traces["combine exact"].count(Step("publish", "partials")) == 2  # one a slot
    assert traces["combine fast"].count(Step("publish", "partials")) == 1


def test_no_interleaving_of_three_calls_goes_wrong(traces: dict[str, list[Step]]):
    num_states = 0
    for calls in itertools.product(traces, repeat=3):
        found = explore(micro_steps([step for call in calls for step in traces[call]]))
        assert not found.wrong, f"{calls}: {found.wrong}"
        num_states += found.num_states
    assert num_states > 50_000


@pytest.mark.parametrize(
    ("left_out", "wrong"),
    [("await_free", "read rows"), ("await_published", "read"), ("finish_reading", "stuck"), ("publish", "read")],
)
def test_every_step_of_the_protocol_is_needed(traces: dict[str, list[Step]], left_out: str, wrong: str):
    steps = [step for step in traces["dispatch"] * 3 if step.what != left_out]
    assert explore(micro_steps(steps)).wrong.startswith(wrong)


def test_one_place_for_headers_would_not_do(traces: dict[str, list[Step]]):
    steps = [*traces["dispatch"], *traces["combine fast"], *traces["rows out"]]
    assert not explore(micro_steps(steps)).wrong
    assert explore(micro_steps(steps, header_places=1)).wrong.startswith("read header")
