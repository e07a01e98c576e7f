"""What is checked of every workload: a run's outcome on one rank against the reference's answer.

Every check takes a `Trial` and raises `AssertionError` with the name of the tensor and the first place that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .compare import assert_bit_equal, assert_within_baseline
from .oracle import Expected, expected
from .problems import Problem
from .seats import Seat
from .solving import Attempt, Outcome, forward


@dataclass(frozen=True, eq=False)
class Trial:
    """A problem solved on one rank, with what should have come out.

    Attributes:
        rank: of the problem's group.

    """

    problem: Problem
    rank: int
    attempt: Attempt
    outcome: Outcome
    expected_of_all: list[Expected]

    @property
    def expected(self) -> Expected:
        """What should have come out on this rank."""
        return self.expected_of_all[self.rank]


def try_problem(seat: Seat, problem: Problem, ranks: tuple[int, ...] | None = None) -> Trial | None:
    """Open a dispatcher over some ranks (or all) and solve the problem there; None on ranks that are not among them."""
    group = seat.group(ranks)
    if group is None:
        return None
    with seat.open(problem.config, group) as dispatcher:
        attempt = forward(dispatcher, problem, dispatcher.ep_rank, seat.device)
        return judge(attempt, attempt.backward())


def judge(attempt: Attempt, outcome: Outcome) -> Trial:
    """An attempt and its outcome with what should have come out."""
    problem, rank = attempt.sent.problem, attempt.sent.rank
    return Trial(problem, rank, attempt, outcome, expected(problem, attempt.sent.x.device))


def finish(attempt: Attempt) -> None:
    """Run the backward of an attempt and make all checks of it. Collective over the problem's group."""
    check_trial(judge(attempt, attempt.backward()))


def check_problem(seat: Seat, problem: Problem, ranks: tuple[int, ...] | None = None) -> None:
    """Solve a problem and make all checks of it."""
    trial = try_problem(seat, problem, ranks)
    if trial is not None:
        check_trial(trial)


def check_trial(trial: Trial) -> None:
    """Make all checks."""
    for check in CHECKS.values():
        check(trial)


def check_rows(trial: Trial) -> None:
    """Rows and their scores, to the bit; counts, offsets, zero padding; kinds and places of all tensors."""
    got, want = trial.outcome, trial.expected.outcome
    assert_bit_equal(got.tokens_per_expert, want.tokens_per_expert, "tokens_per_expert")
    assert_bit_equal(got.expert_offsets, want.expert_offsets, "expert_offsets")
    end, planned = _num_rows(want), trial.problem.num_rows
    assert got.rows.shape[0] == (end if planned is None else planned), (
        f"rows has {got.rows.shape[0]} rows, expected {end if planned is None else planned}"
    )
    assert_bit_equal(got.row_valid[:end], want.row_valid, "row_valid")
    assert not bool(got.row_valid[end:].any()), "row_valid is True behind the last offset"
    assert_bit_equal(*_in_order(trial, got.rows[:end], want.rows), "rows")
    assert_bit_equal(*_in_order(trial, got.scores[:end, None], want.scores[:, None]), "scores")
    routed, num_rows = trial.attempt.sent.routed, got.rows.shape[0]
    assert routed.handle.num_rows == num_rows, f"handle.num_rows is {routed.handle.num_rows}, rows has {num_rows}"
    assert got.scores.shape == (num_rows,), f"scores is {list(got.scores.shape)} beside {num_rows} rows"
    tokens = trial.problem.num_tokens[trial.rank]
    assert routed.handle.num_tokens == tokens, f"handle.num_tokens is {routed.handle.num_tokens}, expected {tokens}"
    for name in ("rows", "scores", "tokens_per_expert", "expert_offsets"):
        tensor: Tensor = getattr(got, name)
        device = trial.attempt.sent.x.device
        assert tensor.device == device, f"{name} is on {tensor.device}, the input on {device}"
        assert tensor.is_contiguous(), f"{name} is not contiguous, strides are {tensor.stride()}"


def check_out(trial: Trial) -> None:
    """Combine's output by the rule of its reduction, to the bit."""
    assert_bit_equal(trial.outcome.out, trial.expected.outcome.out, "output of combine")
    assert trial.outcome.out.is_contiguous(), f"output of combine has strides {trial.outcome.out.stride()}"


def check_gradients(trial: Trial) -> None:
    """Gradients of x, of the experts' rows and weights, to the bit; those of the scores against their baseline."""
    got, want = trial.outcome, trial.expected.outcome
    end = _num_rows(want)
    assert_bit_equal(*_in_order(trial, got.grad_rows[:end], want.grad_rows), "gradient of the experts' rows")
    assert_bit_equal(got.grad_x, want.grad_x, "gradient of x")
    for name, weight, weight_wanted in zip(("gate", "up", "down"), got.grad_weights, want.grad_weights, strict=False):
        assert_bit_equal(weight, weight_wanted, f"gradient of the experts' {name} weight")
    _check_score_gradients(trial)
    absent = got.grad_scores[trial.expected.without_row.to(got.grad_scores.device)]
    assert_bit_equal(absent, torch.zeros_like(absent), "gradient of the scores of slots without a row")


def check_inputs_unchanged(trial: Trial) -> None:
    """The caller's tensors, after everything."""
    assert_bit_equal(trial.attempt.sent.x, trial.problem.x[trial.rank], "x after the calls")
    assert_bit_equal(
        trial.attempt.sent.topk_scores, trial.problem.topk_scores[trial.rank], "topk_scores after the calls"
    )
    ids = trial.attempt.sent.topk_expert_ids
    assert_bit_equal(ids, trial.problem.topk_expert_ids[trial.rank].to(ids.dtype), "topk_expert_ids after the calls")


CHECKS: dict[str, Callable[[Trial], None]] = {
    "rows": check_rows,
    "output": check_out,
    "gradients": check_gradients,
    "inputs unchanged": check_inputs_unchanged,
}


def _check_score_gradients(trial: Trial) -> None:
    got, wanted = trial.outcome.grad_scores, trial.expected.outcome.grad_scores
    if not trial.problem.apply_scores:
        assert_bit_equal(got, wanted, "gradient of the scores")
        return
    # Judged in the company of all ranks' baselines: what a rank with a token or two loses can be nothing, by luck.
    everyone = trial.expected_of_all
    baselines = [answer.outcome.grad_scores for answer in everyone]
    truth = torch.cat([answer.grad_scores_fp64 for answer in everyone if answer.grad_scores_fp64 is not None])
    company = [got.cpu() if rank == trial.rank else part for rank, part in enumerate(baselines)]
    assert_within_baseline(torch.cat(company), truth, torch.cat(baselines), what="gradient of the scores")


def _num_rows(want: Outcome) -> int:
    return int(want.expert_offsets[-1])


def _in_order(trial: Trial, got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Both as they are, or, for a backend without the contract's order, each expert's rows sorted by their values."""
    got, want = got.detach().cpu(), want.cpu()
    if trial.problem.ordered_rows or got.shape != want.shape:
        return got, want
    ends = trial.expected.outcome.expert_offsets
    return _sorted_groups(got, ends), _sorted_groups(want, ends)


def _sorted_groups(rows: Tensor, ends: Tensor) -> Tensor:
    groups = torch.tensor_split(rows, ends[:-1].to(torch.int64))
    return torch.cat(
        [torch.stack(sorted(group, key=lambda row: row.tolist())) if len(group) else group for group in groups]
    )
