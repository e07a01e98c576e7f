"""The rounds of the symmetric backend, every interleaving of two ranks over three calls.

What a call does is taken from a real one on a CPU, where waiting, telling, and moving data are launches of their own:
they are noted as they happen. Every word and every buffer has one writer (what a rank pushes lies at its peer, in a
part that is the rank's alone), so the state of both ranks is the pair of their positions, and all can be visited.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import crossdock as cd
from crossdock.backends.base import Call, Link, Received, TransportSpec, Weights
from crossdock.group.fingerprint import CallFacts
from crossdock.group.members import Members
from crossdock.types import RowCapacity

pytest.importorskip("triton", reason="the interpreter comes with triton, which is published for Linux only")

from crossdock.backends.symmetric import transport
from crossdock.kernels import combine, dispatch, move, publish, scalars, small_combine, small_dispatch
from crossdock.kernels.launch import Chosen
from crossdock.kernels.signal import (
    CHUNKS,
    INBOX,
    NUM_CHUNKS,
    READ,
    ROUND,
    ROUND_SHIFT,
    ROUTED,
    STAGING,
    Board,
)

# -- noting what a call does ------------------------------------------------------------------------------------------

_WORDS = {ROUTED: "routed", CHUNKS: "chunks", READ: "read"}
_PUSHED = "pushed"  # what counts the rounds in which anything was


class Step(NamedTuple):
    """One launch's part: what it does, with which word or place, and what else there is to know.

    Attributes:
        what: wait, tell, write or read; with " small" for rounds of small batches.
        where: a word or a place.
        buffer: what counts the round (tell), or has to be free (wait for "read").
        begins: whether this begins a round, or comes before what does.
    """

    what: str
    where: str
    buffer: str = ""
    begins: bool = False


def _movements(kernel: Callable[..., None], options: dict[str, Any]) -> list[Step]:
    """What a kernel that moves data does to shared memory."""
    gives, takes = [], []
    if kernel is publish.publish_routing_kernel:
        gives = [Step("write", "routing", begins=True)]
    elif kernel is move.move_rows_kernel:
        gives = [Step("write", "staging", begins=options["BEGINS"])] if options["PUSHES"] else []
        takes = [Step("read", "staging")] if options["SPREADS"] else []
    elif kernel is dispatch.dispatch_kernel:
        gives = [Step("read", "tokens"), Step("read", "routing")] if options["COUNTS"] else []
        takes = [Step("read", "routing")] if options["PLACES"] else []
    elif kernel in (combine.combine_kernel, scalars.swap_scalars_kernel):
        places = ["slips"] if options.get("SCALARS", True) else []
        places = places if kernel is scalars.swap_scalars_kernel else ["staging", *places]
        gives = [Step("write", place, begins=True) for place in places if options["GIVES"]]
        takes = [Step("read", place) for place in places if options["TAKES"]]
    else:
        assert kernel in (small_dispatch.dispatch_small_kernel, small_combine.combine_small_kernel)
        gives = [Step("push small", "inbox")] if options["PUSHES"] else []
        takes = [Step("read small", "inbox")] if options["TAKES"] else []
    assert not options.get("FUSED")
    return [*gives, *takes]


def _note(steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every launch of the transport be noted before it is made."""

    def noted(owner: Any, name: str, steps_of: Callable[..., list[Step]]) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **options: Any) -> Any:
            steps.extend(steps_of(*args, **options))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noting)

    def waits(board: Board, word: int, digest: int) -> list[Step]:
        return [Step("wait", _WORDS[word], _PUSHED if word == READ else "")]

    def tells(board: Board, word: int, digest: int, *, begins: bool = False, num_tokens: int = 0) -> list[Step]:
        return [Step("tell", _WORDS[word], _PUSHED if word == CHUNKS else "", begins or word == ROUTED)]

    def movements(kernel: Callable[..., None], *args: Any, chosen: Chosen | None = None, **options: Any) -> list[Step]:
        return _movements(kernel, options if chosen is None else chosen.options)

    modules = (combine, dispatch, move, publish, scalars, small_combine, small_dispatch, transport)
    for module in modules:
        for name, steps_of in (
            ("launch", movements),
            ("launch_wait", waits),
            ("launch_tell", tells),
            ("launch_wait_small", lambda board, digest: [Step("wait small", "arrived")]),
        ):
            if hasattr(module, name):
                noted(module, name, steps_of)


def _opened(reduction: Any = "fast", **changes: Any) -> transport.SymmetricTransport:
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
        **changes,
    )
    link = Link(members=Members(0, (0,), torch.device("cpu"), "none"), store_prefix="", on_expiry=lambda _: None)
    return transport.SymmetricTransport(spec, link, torch.device("cpu"))


class Trace(NamedTuple):
    """What one operation does, and where the board stood behind it and all before it.

    Attributes:
        steps: in order, the same on every rank and for every group size.
        before: the names of the operations that the same dispatcher has made before.
        state: rounds, by buffer.
        told: the last round in each word, by its name in `micro_steps`.
    """

    steps: list[Step]
    before: tuple[str, ...]
    state: dict[str, int]
    told: dict[str, int]


def _board_at_the_end(board: Board) -> tuple[dict[str, int], dict[str, int]]:
    state = {_PUSHED: int(board.state[STAGING])}
    state |= {"round": int(board.state[ROUND]), "small": int(board.state[INBOX])}
    told = {"read": int(board.signals[READ, 0]) >> ROUND_SHIFT}
    for parity in (0, 1):
        first = CHUNKS + parity * NUM_CHUNKS
        told[f"chunks {parity}"] = int(board.signals[first, 0]) >> ROUND_SHIFT
        told[f"routed {parity}"] = int(board.signals[ROUTED + parity, 0]) >> ROUND_SHIFT
    return state, told


def _operations(opened: transport.SymmetricTransport) -> dict[str, Callable[[], object]]:
    """All of a transport, by name; each works whatever came before it."""
    x, scores, ids = torch.ones(3, 8), torch.ones(3, 2), torch.tensor([[0, 1], [1, -1], [0, 0]])
    facts = CallFacts(0, "dispatch", "")
    call = Call(facts=facts, words=tuple(facts.words()), verify=lambda words: None)
    there: list[Received] = []

    def refused() -> None:
        with pytest.raises(cd.InvalidInput):
            opened.dispatch(x, scores, ids + 5, None, call)

    def home() -> torch.Tensor:
        return opened.rows_home(there[0].rows, Weights(scores, there[0].row_scores), there[0].layout, call)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return opened.dispatch_backward(there[0].rows, there[0].row_scores, there[0].layout, call)

    operations: dict[str, Callable[[], object]] = {
        "dispatch": lambda: there.append(opened.dispatch(x, scores, ids, None, call)),
        "dispatch to a capacity": lambda: there.append(opened.dispatch(x, scores, ids, 8, call)),
        f"combine {opened.spec.reduction}": home,
        f"rows and scalars {opened.spec.reduction}": both,
        "rows out": lambda: opened.rows_out(x, there[0].layout, call),
        "scalars": lambda: opened.scalars_home(there[0].row_scores, there[0].layout, call),
        "agree": lambda: opened.agree_max(3, call),
        "refused": refused,
    }
    return operations


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """Every operation, in its general form and in that for small batches."""
    steps: list[Step] = []
    found: dict[str, Trace] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        _note(steps, monkeypatch)
        for reduction, capacity in (("fast", None), ("exact", None), ("fast", RowCapacity.rows(8))):
            opened = _opened(reduction) if capacity is None else _opened(reduction, row_capacity=capacity)
            before: list[str] = []
            for operation, act in _operations(opened).items():
                if capacity is not None and operation == "dispatch":
                    continue
                steps.clear()
                act()
                if operation == "agree":
                    steps.insert(steps.index(Step("wait", "routed")) + 1, Step("read", "tokens"))  # by the host
                small = any(step.what.endswith("small") for step in steps)
                name = f"small {operation}" if small else operation
                trace = Trace(steps.copy(), tuple(before), *_board_at_the_end(opened.rounds.board))
                assert name not in found or found[name].steps == trace.steps
                found[name] = trace if capacity is None or small else found[name]
                before.append(name)
            opened.close()
    return found


# -- the model --------------------------------------------------------------------------------------------------------


class Micro(NamedTuple):
    """What happens at once: await, tell, fill or see a word, with its value.

    `exact` awaits a word that may not be ahead either: whose it is would not be compared, see `signal.wait_for`.
    """

    what: str
    word: str
    value: int
    exact: bool = False


_TORN = -1


class _Rank:
    """What a rank counts."""

    def __init__(self, parities: int) -> None:
        self.number, self.small, self.parities = 0, 0, parities
        self.last = {_PUSHED: 0}
        self.micros: list[Micro] = []

    def add(self, step: Step) -> None:
        kind, _, small = step.what.partition(" ")
        getattr(self, f"_{kind}_small" if small else f"_{kind}")(step)

    def _at(self, place: str, number: int) -> str:
        return f"{place} {number % self.parities}"

    def _wait(self, step: Step) -> None:
        if step.where == "read":
            self.micros.append(Micro("await", "read", self.last[step.buffer]))
        else:
            self.micros.append(Micro("await", self._at(step.where, self.number), self.number, exact=True))

    def _tell(self, step: Step) -> None:
        if step.where == "read":
            self.micros.append(Micro("tell", "read", self.number))
            return
        self.number += step.begins
        if step.where == "routed":
            self.micros.append(Micro("fill", self._at("tokens", self.number), self.number))
        self.last[_PUSHED] = self.number
        if step.where == "chunks" and step.begins:  # for ranks that dispatch instead
            self.micros.append(Micro("tell", self._at("routed", self.number), self.number))
        self.micros.append(Micro("tell", self._at(step.where, self.number), self.number))

    def _write(self, step: Step) -> None:
        self.micros += [Micro("fill", step.where, value) for value in (_TORN, self.number + step.begins)]

    def _read(self, step: Step) -> None:
        place = self._at("tokens", self.number) if step.where == "tokens" else step.where
        self.micros += [Micro("see", place, self.number)] * (1 if step.where == "tokens" else 2)

    def _push_small(self, step: Step) -> None:
        self.number, self.small = self.number + 1, self.small + 1
        half = self._at("inbox", self.small)
        self.micros += [
            *(Micro("tell", self._at(word, self.number), self.number) for word in ("routed", "chunks")),
            *(Micro("fill", half, value) for value in (_TORN, self.small)),
            Micro("tell", "arrived", self.small),
        ]

    def _wait_small(self, step: Step) -> None:
        self.micros.append(Micro("await", "arrived", self.small))
        self.micros.append(Micro("await", self._at("chunks", self.number), self.number, exact=True))

    def _read_small(self, step: Step) -> None:
        self.micros += [Micro("see", self._at("inbox", self.small), self.small)] * 2


def _played(steps: Sequence[Step], parities: int = 2) -> _Rank:
    rank = _Rank(parities)
    for step in steps:
        rank.add(step)
    return rank


def micro_steps(steps: Sequence[Step], *, parities: int = 2) -> list[Micro]:
    """A rank's steps, writes and reads cut in two: between the halves the other rank may do anything."""
    return _played(steps, parities).micros


class Found(NamedTuple):
    """What can go wrong, and in how many states the two ranks can be."""

    wrong: str
    num_states: int


def _words_after(micros: Sequence[Micro]) -> list[dict[str, int]]:
    """What a rank has told and filled, behind each of its steps."""
    words: list[dict[str, int]] = [{}]
    for micro in micros:
        words.append(words[-1] | {micro.word: micro.value} if micro.what in ("tell", "fill") else words[-1])
    return words


def explore(micros: Sequence[Micro]) -> Found:
    """Visit every state that two ranks with these steps can come to."""
    words, end = _words_after(micros), len(micros)
    seen, todo = {(0, 0)}, [(0, 0)]
    while todo:
        state = todo.pop()
        moves = []
        for rank in (0, 1):
            at, other = state[rank], state[1 - rank]
            if at == end:
                continue
            what, word, value, exact = micros[at]
            there = words[other].get(word, 0)
            if what == "await" and there < value:
                continue
            if exact and there != value:
                return Found(f"waited for {word} of round {value}, was told {there}", len(seen))
            if what == "see" and there != value:
                return Found(f"read {word} of round {there}, wanted {value}", len(seen))
            moves.append((at + 1, other) if rank == 0 else (other, at + 1))
        if not moves and state != (end, end):
            return Found(f"stuck at {state}", len(seen))
        todo += [move for move in moves if move not in seen]
        seen.update(moves)
    return Found("", len(seen))


# -- the tests --------------------------------------------------------------------------------------------------------

_OPERATIONS = (
    "dispatch", "refused", "rows out", "combine fast", "combine exact", "rows and scalars fast", "scalars", "agree",
    "small combine fast",
)  # fmt: skip


def test_operations_are_what_they_say(traces: dict[str, Trace]):
    more = {"dispatch to a capacity", "small dispatch to a capacity", "small rows and scalars fast"}
    assert set(traces) == {*_OPERATIONS, *more, "rows and scalars exact"}
    free, told = Step("wait", "read", "pushed"), Step("tell", "routed", begins=True)
    beginning = [free, Step("write", "routing", begins=True), told]
    routing = [Step("read", "tokens"), Step("read", "routing")]
    pushed = [Step("write", "staging"), Step("tell", "chunks", "pushed")]
    done = Step("tell", "read")
    assert traces["dispatch"].steps == [
        *beginning, *pushed, Step("wait", "routed"), *routing, Step("read", "routing"),
        Step("wait", "chunks"), Step("read", "staging"), done,
    ]  # fmt: skip
    assert traces["dispatch to a capacity"].steps == traces["dispatch"].steps
    assert traces["refused"].steps == [*beginning, *pushed, Step("wait", "routed"), *routing, done]
    assert traces["agree"].steps == [free, told, Step("wait", "routed"), Step("read", "tokens"), done]
    for name, places, rounds in (
        ("rows out", ("staging",), 1),
        ("combine fast", ("staging",), 1),
        ("combine exact", ("staging",), 2),
        ("rows and scalars fast", ("staging", "slips"), 1),
        ("scalars", ("slips",), 1),
    ):
        assert traces[name].steps == rounds * [
            free, *(Step("write", place, begins=True) for place in places),
            Step("tell", "chunks", "pushed", begins=True), Step("wait", "chunks"),
            *(Step("read", place) for place in places), done,
        ]  # fmt: skip
    assert traces["rows and scalars exact"].steps == [*traces["combine exact"].steps, *traces["scalars"].steps]
    small = [Step("push small", "inbox"), Step("wait small", "arrived"), Step("read small", "inbox")]
    for name in ("dispatch to a capacity", "combine fast", "rows and scalars fast"):
        assert traces[f"small {name}"].steps == small


def test_the_model_counts_as_the_kernels_do(traces: dict[str, Trace]):
    for name, trace in traces.items():
        rank = _played([step for earlier in (*trace.before, name) for step in traces[earlier].steps])
        assert rank.last | {"round": rank.number, "small": rank.small} == trace.state, name
        told = _words_after(rank.micros)[-1]
        assert {word: told.get(word, 0) for word in trace.told} == trace.told, name


def test_no_interleaving_of_three_calls_goes_wrong(traces: dict[str, Trace], full: bool):
    num_states = 0
    for calls in itertools.product(_OPERATIONS, repeat=4 if full else 3):
        found = explore(micro_steps([step for call in calls for step in traces[call].steps]))
        assert not found.wrong, f"{calls}: {found.wrong}"
        num_states += found.num_states
    assert num_states > 150_000


def pushed_first(micros: Sequence[Micro]) -> list[Micro]:
    """As it may be on a GPU, where other programs push than publish: staging is told of before routing is."""
    turned = list(micros)
    for place, micro in enumerate(micros):
        if (micro.what, micro.word, micro.value) == ("fill", "routing", _TORN):
            turned[place : place + 7] = [*micros[place + 4 : place + 7], *micros[place : place + 4]]
    return turned


def test_nor_does_one_where_rows_are_pushed_before_routing(traces: dict[str, Trace]):
    for calls in itertools.product(_OPERATIONS, repeat=3):
        if "dispatch" in calls and "refused" not in calls:  # a GPU moves no rows before it may refuse
            found = explore(pushed_first(micro_steps([step for call in calls for step in traces[call].steps])))
            assert not found.wrong, f"{calls}: {found.wrong}"
    micros = pushed_first(micro_steps(traces["dispatch"].steps))
    words = [micro.word.split()[0] for micro in micros if micro.what == "tell"]
    assert words == ["chunks", "routed", "read"]


_LEFT_OUT = [
    ("dispatch", "await", "read", "read routing"),
    ("dispatch", "await", "routed", "read tokens"),
    ("dispatch", "await", "chunks", "read staging"),
    ("dispatch", "tell", "read", "stuck"),
    ("dispatch", "tell", "routed", "stuck"),
    ("dispatch", "tell", "chunks", "stuck"),
    ("rows out", "await", "read", "read staging"),
    ("rows out", "await", "chunks", "read staging"),
    ("combine fast", "await", "read", "read staging"),
    ("combine fast", "await", "chunks", "read staging"),
    ("combine exact", "await", "read", "read staging"),
    ("rows and scalars fast", "await", "read", "read s"),  # either buffer
    ("rows and scalars fast", "await", "chunks", "read staging"),
    ("scalars", "await", "read", "read slips"),
    ("scalars", "await", "chunks", "read slips"),
    ("refused", "await", "read", "read routing"),
    ("agree", "await", "routed", "read tokens"),
    ("small combine fast", "await", "arrived", "read inbox"),
]


@pytest.mark.parametrize(("call", "what", "word", "wrong"), _LEFT_OUT)
def test_what_is_left_out_is_missed(traces: dict[str, Trace], call: str, what: str, word: str, wrong: str):
    micros = micro_steps(traces[call].steps * 3)
    kept = [micro for micro in micros if not (micro.what == what and micro.word.split()[0] == word)]
    assert len(kept) < len(micros)
    assert explore(kept).wrong.startswith(wrong)


def test_one_of_many_waits_that_is_left_out_is_missed(traces: dict[str, Trace]):
    """In a sequence of all operations, each wait but those that another has made needless."""
    micros = micro_steps([step for call in _OPERATIONS for step in traces[call].steps])
    needless = []
    for place, micro in enumerate(micros):
        if micro.what == "await" and micro.value and not explore([*micros[:place], *micros[place + 1 :]]).wrong:
            needless.append(micro.word)
    assert "routed" not in needless and all(word.split()[0] in ("read", "chunks", "routed") for word in needless)


def test_one_place_for_every_round_would_not_do(traces: dict[str, Trace]):
    for calls in (["dispatch", "small combine fast", "rows out"], ["small combine fast"] * 3):
        steps = [step for call in calls for step in traces[call].steps]
        assert not explore(micro_steps(steps)).wrong
        assert explore(micro_steps(steps, parities=1)).wrong
