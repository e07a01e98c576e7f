"""Stress of the kernels of `symmetric`: dispatchers by turns, programs and ranks delayed at random, every bit compared.

Each rank opens the dispatchers of `configs`, whose calls take all the kernels there are, and solves some problems on
each of them, undisturbed and checked against the reference. Under `crossdock.kernels.stress.delays` it repeats them
then, all ranks in the same order of chance: forward, with backward now and then, and on a GPU as a captured graph. What
comes is compared there where it is, so that the host runs ahead; it looks every few hundred pairs of calls.

    wrong = PoolRunner(RankPool(2), "symmetric")(stress, 600, 1, timeout_s=100.0)  # by rank, in words

This module imports the kernels, hence triton: it is not loaded with `crossdock.testing`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from .. import TokenDispatcher
from ..kernels.stress import delays
from ..types import DispatcherConfig, RowCapacity
from .checks import check_trial, judge
from .problems import Experts, Problem
from .seats import Seat
from .solving import forward

PAIRS_PER_LOOK = 250  # of a dispatch and its combine
MOST_TOLD = 20
_COMPARED = ("rows", "row scores", "counts", "offsets", "output", "gradient of x", "gradient of the scores")
_ROUTINGS = ("anywhere", "one expert", "anywhere, one rank without tokens", "nobody")
_CHANCE_OF_BACKWARD = 0.1
_CAPTURED = 3  # problems of each dispatcher


def configs(on_gpu: bool) -> dict[str, DispatcherConfig]:
    """What is opened, by name. Up to 512 tokens have kernels of their own, if the backend's plan says so."""
    few = DispatcherConfig(
        num_experts=8,
        top_k=4 if on_gpu else 2,
        hidden_dim=256 if on_gpu else 16,
        dtype=torch.bfloat16,
        num_max_tokens_per_rank=32,
        row_capacity=RowCapacity.worst_case(),
        timeout_s=60.0,
    )
    many = replace(few, num_max_tokens_per_rank=520)
    return {
        "few, fast": few,
        "few, exact": replace(few, reduction="exact", dtype=torch.float32, expert_alignment=16),
        "many, fast": replace(many, dtype=torch.float32, expert_alignment=16),
        "many, exact": replace(many, reduction="exact"),
        "counted": replace(many, row_capacity=RowCapacity.exact()),
    }


@dataclass(frozen=True, eq=False)
class _Exercise:
    """One problem on one dispatcher, as one rank sees it.

    Attributes:
        name: both in words.
        inputs: rows, scores and ids.
        bound: `num_tokens_per_rank` of the calls.
        grad_out: see `Problem`.
        wanted: bytes of all tensors that are compared, in the order of their names, gradients last.
        num_kept: rows up to the last offset.

    """

    name: str
    dispatcher: TokenDispatcher
    inputs: tuple[Tensor, Tensor, Tensor]
    bound: int | None
    experts: Experts
    grad_out: Tensor
    wanted: tuple[Tensor, ...]
    num_kept: int

    def run(self, *, backward: bool) -> list[Tensor]:
        """Dispatch and combine, and what came; collective."""
        x, scores, ids = self.inputs
        if backward:
            x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
        with torch.set_grad_enabled(backward):
            routed = self.dispatcher.dispatch(x, scores, ids, num_tokens_per_rank=self.bound)
            results = self.experts(routed.rows, routed.expert_offsets, None)
            out = self.dispatcher.combine(results, routed.handle)
        kept = (routed.rows[: self.num_kept], routed.scores[: self.num_kept])
        came = [*kept, routed.tokens_per_expert, routed.expert_offsets, out]
        return [*came, *torch.autograd.grad(out, (x, scores), self.grad_out)] if backward else came


@dataclass(frozen=True, eq=False)
class _Replay:
    """The forward of an exercise as a CUDA graph, and the tensors that every replay fills."""

    graph: torch.cuda.CUDAGraph
    came: list[Tensor]

    @classmethod
    def of(cls, exercise: _Exercise) -> _Replay:
        exercise.run(backward=False)  # kernels cannot be loaded during a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            came = exercise.run(backward=False)
        return cls(graph, came)


def stress(
    seat: Seat, num_pairs: int, seed: int, num_problems: int = 12, names: Sequence[str] | None = None
) -> list[str]:
    """Make `num_pairs` delayed pairs of dispatch and combine; collective.

    Args:
        seat: of this rank.
        num_pairs: over all dispatchers.
        seed: of problems, order and delays; the same on every rank.
        num_problems: of each dispatcher.
        names: of `configs`; None: all of them.

    Returns:
        What went wrong on this rank, in words, the first `MOST_TOLD` of it; empty if nothing did.

    Raises:
        ValueError: a name that is none, or nothing to do.
        AssertionError: an undisturbed call is not what the reference says.
        CrossdockError: whatever a call came to.
    """
    on_gpu = seat.device.type == "cuda"
    known = configs(on_gpu)
    chosen = {name: config for name, config in known.items() if names is None or name in names}
    if len(chosen) < len(names or known) or num_problems < 1:
        raise ValueError(
            f"names must be some of {list(known)} and num_problems at least 1, got {names}, {num_problems}"
        )
    exercises: list[_Exercise] = []
    captured: list[_Exercise] = []
    with ExitStack() as stack:
        for name, config in chosen.items():
            dispatcher = stack.enter_context(seat.open(config))
            stack.callback(dispatcher.close, graphs_destroyed=on_gpu)
            problems = [_draw(config, seat.size, number, seed, on_gpu) for number in range(num_problems)]
            these = [
                _solved(f"{name}, problem {number} ({_routing_of(number)})", dispatcher, problem, seat)
                for number, problem in enumerate(problems)
            ]
            exercises += these
            if on_gpu and config.row_capacity.kind != "exact":
                captured += these[:_CAPTURED]
        with delays(seed * seat.size + seat.rank):
            return _repeat(exercises, captured, num_pairs, random.Random(seed), seat.device)


def _repeat(
    exercises: Sequence[_Exercise],
    captured: Sequence[_Exercise],
    num_pairs: int,
    draw: random.Random,
    device: torch.device,
) -> list[str]:
    """All pairs; `draw` is the same on every rank."""
    replays = {exercise: _Replay.of(exercise) for exercise in captured}
    told: list[str] = []
    different = torch.zeros(PAIRS_PER_LOOK, len(_COMPARED), dtype=torch.int64, device=device)
    names: list[str] = []
    for number, exercise in enumerate(islice(_by_turns(exercises, draw), num_pairs)):
        chance = draw.random()
        backward = chance < _CHANCE_OF_BACKWARD
        replay = replays.get(exercise) if chance > 0.5 else None
        names.append(f"pair {number}, {exercise.name}{', backward' if backward else ', replayed' if replay else ''}")
        if replay is None:
            came = exercise.run(backward=backward)
        else:
            replay.graph.replay()
            came = replay.came
        _compare(came, exercise.wanted, different[len(names) - 1])
        if len(names) == PAIRS_PER_LOOK or number == num_pairs - 1:
            told += _in_words(names, different.tolist())
            different.zero_()
            names.clear()
            for dispatcher in {each.dispatcher for each in exercises}:
                dispatcher.check()
    return told[:MOST_TOLD]


def _by_turns(exercises: Sequence[_Exercise], draw: random.Random) -> Iterator[_Exercise]:
    """All of them, each time in another order: a word or row that came late is seldom that of the same exercise."""
    while True:
        yield from draw.sample(exercises, len(exercises))


def _compare(came: Sequence[Tensor], wanted: Sequence[Tensor], different: Tensor) -> None:
    """Count the bytes of each tensor that differ."""
    counts = [(_bytes_of(tensor) != bits).sum() for tensor, bits in zip(came, wanted, strict=False)]
    different[: len(counts)] = torch.stack(counts)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _in_words(names: Sequence[str], different: Sequence[Sequence[int]]) -> list[str]:
    told = []
    for name, counts in zip(names, different, strict=False):
        parts = [f"{count} bytes of the {what}" for what, count in zip(_COMPARED, counts, strict=True) if count]
        if parts:
            told.append(f"{name}: {', '.join(parts)} differ")
    return told


# -- the problems -----------------------------------------------------------------------------------------------------


def _routing_of(number: int) -> str:
    return _ROUTINGS[number % len(_ROUTINGS)]


def _draw(config: DispatcherConfig, ep_size: int, number: int, seed: int, on_gpu: bool) -> Problem:
    """Problem `number` of a dispatcher, the same on every rank; ranks bring different numbers of tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    many = config.num_max_tokens_per_rank > 32
    most = (200 if many else 32) if on_gpu else 12
    ids = []
    for rank in range(ep_size):
        num_tokens = int(torch.randint(1, most + 1, (1,), generator=generator))
        if "without tokens" in _routing_of(number) and rank == number // len(_ROUTINGS) % ep_size:
            num_tokens = 0
        part = torch.randint(-1, config.num_experts, (num_tokens, config.top_k), generator=generator)
        if _routing_of(number) == "one expert":
            part = torch.full_like(part, config.num_experts - 1 - number % config.num_experts)
        ids.append(torch.full_like(part, -1) if _routing_of(number) == "nobody" else part)
    # Strided calls tell how many tokens a rank has at most, which keeps those of many tokens short.
    return Problem.draw(config, ids, generator).replace(strided=many)


def _solved(name: str, dispatcher: TokenDispatcher, problem: Problem, seat: Seat) -> _Exercise:
    """Solve a problem undisturbed, and check it; collective."""
    rank = seat.rank
    attempt = forward(dispatcher, problem, rank, seat.device)
    outcome = attempt.backward()
    check_trial(judge(attempt, outcome))
    end = int(outcome.expert_offsets[-1])
    kept = (outcome.rows[:end], outcome.scores[:end], outcome.tokens_per_expert, outcome.expert_offsets)
    wanted = (*kept, outcome.out, outcome.grad_x, outcome.grad_scores)
    parts = (problem.x[rank], problem.topk_scores[rank], problem.topk_expert_ids[rank], problem.grad_out[rank])
    x, scores, ids, grad_out = (part.to(seat.device) for part in parts)
    return _Exercise(
        name=name,
        dispatcher=dispatcher,
        inputs=(x, scores, ids),
        bound=max(problem.num_tokens) if problem.strided else None,
        experts=Experts(problem, rank, seat.device),
        grad_out=grad_out,
        wanted=tuple(_bytes_of(tensor) for tensor in wanted),
        num_kept=end,
    )
