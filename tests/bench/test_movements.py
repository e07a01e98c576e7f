"""What `crossdock bench` counts, expects and times: against the reference, by hand, and on real ranks."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

import crossdock as cd
from crossdock import reference
from crossdock.bench.bars import BARS, hold_against_bars
from crossdock.bench.movements.capacities import CapacityChoice
from crossdock.bench.movements.ceilings import Ceilings
from crossdock.bench.movements.cells import Effort, ceilings_here, field_here, measure
from crossdock.bench.movements.checking import WrongResult, check
from crossdock.bench.movements.contenders import Contender
from crossdock.bench.movements.cuda_clock import clock_of
from crossdock.bench.movements.expected import arrivals, home, rows_by_slot, score_gradients
from crossdock.bench.movements.figures import Figure, RankFigures, put_together
from crossdock.bench.movements.moved import expert_scale
from crossdock.bench.movements.operations import COMBINE, DISPATCH, Opened
from crossdock.bench.movements.problems import Problem
from crossdock.bench.movements.traffic import RankBytes, Traffic, traffic_of
from crossdock.bench.movements.workloads import NAMED, ROUTINGS, Workload
from crossdock.errors import ConfigError
from crossdock.testing import RanksFailed, assert_bit_equal

CPU = torch.device("cpu")
SMALL = Workload(name="small", num_tokens=6, hidden_dim=16, num_experts=8, top_k=3)
CEILINGS = Ceilings(link="by hand", put_gb_per_s=2.0, get_gb_per_s=1.0, copy_gb_per_s=10.0, collective_gb_per_s=None)
EXACT = CapacityChoice("exact")


def problems(workload: Workload, ep_size: int) -> list[Problem]:
    return [Problem(workload, rank, ep_size, CPU) for rank in range(ep_size)]


def scaled(rows: torch.Tensor, there: reference.ReferenceRows, problem: Problem) -> torch.Tensor:
    local = torch.repeat_interleave(torch.arange(problem.num_local_experts), torch.tensor(there.tokens_per_expert))
    scale = expert_scale(problem.workload.num_experts, CPU)[problem.rank * problem.num_local_experts + local]
    return rows * scale.to(rows.dtype).unsqueeze(1)


# -- inputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_rank_can_make_the_part_of_any_other(routing):
    one, other = problems(replace(SMALL, routing=routing), 2)
    assert_bit_equal(one.rows_of(1, 0), other.sets[0].x)
    assert_bit_equal(one.grads_of(1, 1), other.sets[1].grad_out)
    assert_bit_equal(one.choices[1].topk_expert_ids[1], other.sets[1].topk_expert_ids)
    assert not torch.equal(one.sets[0].x, one.sets[1].x)
    assert not torch.equal(one.sets[0].x, one.sets[0].grad_out)
    for ids in one.choices[0].topk_expert_ids.flatten(0, 1).tolist():
        assert len(set(ids)) == SMALL.top_k


def test_routings_load_the_ranks_as_they_say():
    loads = {}
    for routing in ROUTINGS:
        workload = Workload(
            name="x",
            num_tokens=500,
            hidden_dim=1,
            num_experts=32,
            top_k=4,
            routing=routing,  # type: ignore[arg-type]
        )
        ids = Problem(workload, 0, 2, CPU).choices[0].topk_expert_ids
        loads[routing] = torch.bincount(ids.flatten(), minlength=32) / ids.numel()
    assert loads["uniform"].max() < 2 / 32
    assert 4 / 32 < loads["zipf"].max() < 0.26
    assert loads["one-hot-rank"][:16].sum() == 1.0


def test_the_sizes_of_the_named_workloads():
    sizes = {name: (w.num_tokens, w.hidden_dim, w.num_experts, w.top_k) for name, w in NAMED.items()}
    assert sizes["prefill"] == (8192, 7168, 256, 8)
    assert sizes["train"] == (4096, 7168, 256, 8)
    assert sizes["train-small"] == (4096, 2048, 128, 8)
    assert sizes["decode-16"] == (16, 7168, 256, 8)
    assert {bar.workload for bar in BARS} <= set(NAMED)


# -- bytes and floor ---------------------------------------------------------------------------------------------------


def test_bytes_of_a_routing_by_hand(monkeypatch: pytest.MonkeyPatch):
    # Two ranks of two experts, two tokens each, rows of 4 bytes. Rank 0: one token stays, one goes to 2 and 3.
    # Rank 1: one token goes to 0 and 1, one goes to 0 and stays.
    workload = Workload(name="x", num_tokens=2, hidden_dim=2, num_experts=4, top_k=2)
    ids = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [0, 2]]])
    problem = problems(workload, 2)[0]
    choices = tuple(choice._replace(topk_expert_ids=ids) for choice in problem.choices)
    monkeypatch.setitem(problem.__dict__, "choices", choices)
    out = traffic_of(problem, "out")
    assert out.once == (RankBytes(4.0, 8.0, 4.0 * (2 + 5)), RankBytes(8.0, 4.0, 4.0 * (2 + 3)))
    assert out.copies == (RankBytes(8.0, 12.0, 28.0), RankBytes(12.0, 8.0, 20.0))
    back = traffic_of(problem, "home")
    assert [(rank.sent, rank.received) for rank in back.once] == [(8.0, 4.0), (4.0, 8.0)]
    assert problem.num_rows_needed == 5


def test_the_floor_is_the_slowest_of_three_on_the_slowest_rank():
    idle = RankBytes(0.0, 0.0, 1000.0)
    floors = {
        "put": RankBytes(8000.0, 1000.0, 1000.0),  # 4 us at 2 GB/s
        "get": RankBytes(1000.0, 4000.0, 1000.0),  # 4 us at 1 GB/s
        "copy": RankBytes(1000.0, 1000.0, 40000.0),  # 4 us at 10 GB/s
    }
    for busy in floors.values():
        assert Traffic((idle, busy), (busy, busy)).floor_us(CEILINGS) == pytest.approx(4.0)
    alone = replace(CEILINGS, put_gb_per_s=None, get_gb_per_s=None)
    assert floors["put"].floor_us(alone) == pytest.approx(0.1)


def test_what_all_to_all_says_it_sends_is_what_is_counted(ranks):
    sent = ranks(2).run(rows_bytes_told, SMALL)
    counted = traffic_of(problems(SMALL, 2)[0], "out")
    assert sum(sent) / 2 == pytest.approx(sum(rank.sent for rank in counted.once) / 2)


def rows_bytes_told(rank: int, workload: Workload) -> float:
    """Bytes of rows that one dispatch of each set sends, the mean of the sets."""
    problem = Problem(workload, rank, 2, CPU)
    with Opened(Contender(backend="all_to_all", capacity=EXACT), problem) as opened:
        before = opened.dispatcher.stats().sent_rows_bytes
        for number in range(problem.num_sets):
            opened.dispatch(number)
        return (opened.dispatcher.stats().sent_rows_bytes - before) / problem.num_sets


# -- what must come out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_is_expected_is_what_the_reference_says(routing, reduction):
    parts = problems(replace(SMALL, routing=routing), 2)
    x, scores, ids, grads = ([part.sets[1][place] for part in parts] for place in range(4))
    there = reference.dispatch(x, scores, ids, SMALL.num_experts)
    for part, rows in zip(parts, there, strict=True):
        found = arrivals(part, 1)
        assert found.tokens_per_expert.tolist() == rows.tokens_per_expert
        assert_bit_equal(found.row_scores, rows.scores)
        assert_bit_equal(rows_by_slot(part, 1, found.slot_of_row), rows.rows)
    y = [scaled(rows.rows, rows, part) for part, rows in zip(parts, there, strict=True)]
    num_tokens = [SMALL.num_tokens] * 2
    out = reference.combine(y, there, scores, num_tokens, reduction)
    grad_x = reference.combine(y, there, None, num_tokens, reduction)
    plain = reference.combine([rows.rows for rows in there], there, scores, num_tokens, reduction)
    _, grad_scores = reference.combine_backward(grads, y, there, scores)
    for rank, part in enumerate(parts):
        assert_bit_equal(home(part, 1, reduction, weighted=True), out[rank])
        assert_bit_equal(home(part, 1, reduction, weighted=False), grad_x[rank])
        assert_bit_equal(home(part, 1, reduction, weighted=True, scaled=False), plain[rank])
        truth, bound = score_gradients(part, 1)
        assert torch.allclose(truth, grad_scores[rank], rtol=1e-12)
        assert bool((bound > 0).all()) and bool((bound < 1e-3 * truth.abs().max()).all())


class Bent(Opened):
    """A dispatcher whose results are spoilt in one place."""

    spoilt = ""

    def dispatch(self, number, *, grad=False):
        routed = super().dispatch(number, grad=grad)
        if self.spoilt == "rows" and routed.rows.shape[0]:
            routed.rows[-1, -1] = 7.0
        return routed

    def combine(self, number, *, grad=False):
        out = super().combine(number, grad=grad)
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if self.spoilt == "out" else out

    def combine_backward(self, number):
        grad_rows, grad_scores = super().combine_backward(number)
        return grad_rows, grad_scores * (1.01 if self.spoilt == "grad_scores" else 1.0)


def spoil(rank: int, what: str, on_rank: int) -> str:
    bent = Bent(Contender(backend="all_to_all", capacity=EXACT), Problem(SMALL, rank, 2, CPU))
    with bent as opened:
        bent.spoilt = what if rank == on_rank else ""
        try:
            check(opened)
        except WrongResult as wrong:
            return str(wrong)
    return ""


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("rows", "on rank 1: rows, set 0: 1 of "),
        ("out", "on rank 1: output of combine, set 0: "),
        ("grad_scores", "on rank 1: gradient of the scores of combine, set 0: off by "),
    ],
)
def test_a_wrong_result_is_told_on_every_rank(ranks, what, sentence):
    told = ranks(2).run(spoil, what, 1)
    assert told[0] == told[1]
    assert told[0].startswith(sentence)


def test_right_results_pass(ranks):
    assert ranks(2).run(spoil, "nothing", 0) == ["", ""]


# -- who is measured ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("exact", cd.RowCapacity.exact()),
        ("worst_case", cd.RowCapacity.worst_case()),
        ("balanced:1.5", cd.RowCapacity.balanced(1.5)),
        ("rows:256", cd.RowCapacity.rows(256)),
        ("rows", cd.RowCapacity.rows(384)),
    ],
)
def test_capacities_as_they_are_typed(text, capacity):
    assert CapacityChoice.parse(text).of(300) == capacity


@pytest.mark.parametrize("text", ["balanced", "some", "balanced:x", "balanced:-1", "exact:2", "worst_case:2"])
def test_capacities_that_cannot_be(text):
    with pytest.raises(ConfigError):
        CapacityChoice.parse(text)


def test_the_field_has_who_can_serve_and_says_why_others_cannot(ranks):
    found = ranks(2).run(field_here, SMALL, (), (), ("fast", "exact"), (None,))
    assert found[0] == found[1]
    contenders, refused = found[0].contenders, found[0].refused
    assert ("all_to_all", "exact") in {(each.backend, each.reduction) for each in contenders}
    assert refused["local"] == "it serves one rank, and this group has 2"


def test_an_unknown_backend_and_a_capacity_that_is_too_small(ranks):
    with pytest.raises(RanksFailed, match="unknown backend 'typo'"):
        ranks(2).run(field_here, SMALL, ("typo",), (), ("fast",), (None,))
    needed = Problem(SMALL, 0, 2, CPU).num_rows_needed
    assert not CapacityChoice("rows", needed - 1).holds(Problem(SMALL, 0, 2, CPU))
    assert CapacityChoice("rows", needed).holds(Problem(SMALL, 0, 2, CPU))
    assert not CapacityChoice("balanced", 0.1).holds(Problem(SMALL, 0, 2, CPU))


# -- times -------------------------------------------------------------------------------------------------------------


def test_ceilings_of_this_machine(ranks):
    ceilings = ranks(2).run(ceilings_here)
    assert ceilings[0] == ceilings[1], "all ranks divide by the same numbers"
    found = ceilings[0]
    assert found.put_gb_per_s and found.get_gb_per_s and found.collective_gb_per_s
    assert 0.01 < found.put_gb_per_s < 1000 and 0.01 < found.copy_gb_per_s < 10_000
    assert "memory that the ranks share" in str(found)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_contender_is_measured(ranks, reduction):
    contender = Contender(backend="all_to_all", capacity=EXACT, reduction=reduction)
    figures = ranks(2).run(measure, SMALL, contender, CEILINGS, Effort(3, 2), timeout_s=100.0)[0]
    operations = [figure.operation for figure in figures]
    assert operations == (
        ["combine", "dispatch backward"]
        if reduction == "exact"
        else ["dispatch", "combine", "pair", "dispatch backward", "combine backward", "combine backward, no scores"]
    )
    for figure in figures:
        assert figure.us.p10 <= figure.us.median <= figure.us.p90
        assert len(figure.run_medians_us) == 2
        assert figure.copies_bytes > figure.once_bytes > 0
        assert figure.pct_of_floor == pytest.approx(figure.us.median / figure.floor_us * 100)


def count_calls(rank: int, slow: bool) -> tuple[int, int]:
    calls = []
    clock = clock_of(CPU)

    def work(number: int) -> None:
        calls.append(number)
        if slow and rank == 1:
            torch.randn(3_000_000).sort()

    return len(clock.eager(work, 40)), len(calls)


def test_a_slow_call_is_repeated_less_and_alike_on_all_ranks(ranks):
    assert ranks(2).run(count_calls, False) == [(40, 44)] * 2
    slow = ranks(2).run(count_calls, True)
    assert slow[0] == slow[1]
    assert 2 <= slow[0][0] < 40


def test_the_slowest_rank_is_the_headline():
    times = [[[4.0, 4.0], [6.0, 6.0]], [[8.0, 8.0], [10.0, 10.0]]]  # by rank and run
    by_rank = [
        RankFigures(capacity="exact()", times_us={(DISPATCH, "eager"): of_rank}, host_us={DISPATCH: host})
        for of_rank, host in zip(times, (2.0, 1.0), strict=True)
    ]
    busy = RankBytes(4000.0, 4000.0, 0.0)
    traffic = {DISPATCH: (Traffic((busy, busy), (busy, busy)),)}
    contender = Contender(backend="x", capacity=EXACT)
    (figure,) = put_together(SMALL, contender, by_rank, traffic, CEILINGS)
    assert (figure.us.median, figure.run_medians_us, figure.host_us) == (9.0, (8.0, 10.0), 2.0)
    assert figure.floor_us == pytest.approx(4.0)
    assert figure.pct_of_floor == pytest.approx(225.0)
    assert figure.gb_per_s == pytest.approx(4000 / 9.0 / 1e3)
    assert figure.noise_pct == pytest.approx(25.0)
    assert figure.as_dict()["noise_pct"] == figure.noise_pct
    assert figure.skew_pct == pytest.approx(80.0)


def test_figures_that_mean_nothing_are_none():
    """Noise of one run, and the floor's share of an interpreter's time; no bar is held against that."""
    figure = figure_of("train", DISPATCH, 111.0)
    assert figure.noise_pct is None and figure.pct_of_floor == pytest.approx(111.0)
    interpreted = figure_of("train", DISPATCH, 111.0, interpreted=True)
    assert (interpreted.noise_pct, interpreted.pct_of_floor, interpreted.us.median) == (None, None, 111.0)
    written = interpreted.as_dict()
    assert (written["noise_pct"], written["pct_of_floor"]) == (None, None)
    assert all(verdict.reached is None for verdict in hold_against_bars([interpreted]) if verdict.bar.unit == "f")


@pytest.mark.parametrize(
    ("backend", "device_type", "interpreted"),
    [("symmetric", "cpu", True), ("symmetric", "cuda", False), ("all_to_all", "cpu", False)],
)
def test_kernels_are_interpreted_on_a_cpu(backend: str, device_type: str, interpreted: bool):
    assert Contender(backend=backend, capacity=EXACT).is_interpreted(device_type) == interpreted


# -- bars --------------------------------------------------------------------------------------------------------------


def figure_of(workload: str, operation: str, us: float, capacity: str = "rows", *, interpreted: bool = False) -> Figure:
    busy = RankBytes(100_000.0, 100_000.0, 0.0)  # a floor of 100 us
    contender = Contender(backend="symmetric", capacity=CapacityChoice(capacity))
    rank = RankFigures(
        capacity="",
        times_us={(operation, "eager"): [[us]]},
        host_us={operation: 50.0},
        interpreted=interpreted,
    )
    traffic = {operation: (Traffic((busy,), (busy,)),)}
    return put_together(NAMED[workload], contender, [rank], traffic, CEILINGS)[0]


def test_figures_are_held_against_the_bars():
    figures = [
        figure_of("train", DISPATCH, 111.0),
        figure_of("train", COMBINE, 116.0),
        figure_of("train", "combine backward", 130.0),
        figure_of("prefill", DISPATCH, 105.0, capacity="exact"),
    ]
    verdicts = {(str(v.bar), v.bar.unit): v for v in hold_against_bars(figures)}
    met = {name: verdict.met for name, verdict in verdicts.items() if verdict.met is not None}
    assert met == {
        ("train: dispatch", "f"): True,
        ("train: combine", "f"): False,
        ("train: combine backward", "dispatch"): True,
        ("train: dispatch", "host us"): True,
        ("train: combine", "host us"): False,
    }
    assert verdicts["train: combine", "f"].reached == pytest.approx(1.16)
    assert statistics.mean(bar.limit for bar in BARS if bar.unit == "f") < 1.25
