"""Opening a dispatcher: with one rank or a fresh group, by a backend's name or not, with and without vendors."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossdock as cd
from crossdock.backends.base import Link, Received, Transport, TransportSpec
from crossdock.backends.local import LocalBackend, LocalTransport
from crossdock.testing import LoopbackGroup, Problem, Seat, assert_bit_equal, run_ranks
from crossdock.testing.checks import finish
from crossdock.testing.solving import forward, solve
from tests.conftest import Ranks
from tests.contract.conftest import BACKENDS, On, every_backend
from tests.contract.trials import checked, make_config, problem, random_ids, refused

ONE = make_config(4, 2)


def one_rank_trial() -> Problem:
    return problem(make_config(4, 2, expert_alignment=16), random_ids((5,), 2, 4))


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_is_no_special_case(on: On, backend: str):
    trial = one_rank_trial()
    with cd.TokenDispatcher(trial.config) as dispatcher:  # no group, and no torch.distributed
        assert (dispatcher.backend_name, dispatcher.ep_rank, dispatcher.ep_size) == ("local", 0, 1)
        wanted = solve(dispatcher, trial, 0, torch.device("cpu"))
    (outcome,) = on(backend, 1)(checked, trial)
    for name in ("rows", "out", "grad_x", "grad_scores"):
        assert_bit_equal(getattr(outcome, name), getattr(wanted, name), name)


def default_group_of_one(seat: Seat, trial: Problem) -> str:
    with cd.TokenDispatcher(trial.config) as dispatcher:
        solve(dispatcher, trial, 0, seat.device)
        return dispatcher.backend_name


def test_a_default_group_of_one_rank(on: On):
    assert on("all_to_all", 1)(default_group_of_one, one_rank_trial()) == ["local"]


# -- which backend ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "error", "sentence"),
    [
        ("typo", cd.ConfigError, "unknown backend 'typo'; known are 'auto', 'local', 'loopback', 'all_to_all'"),
        ("all_to_all", cd.BackendUnavailable, "backend 'all_to_all' is not available here: torch.distributed is not"),
        ("loopback", cd.BackendUnavailable, "it serves the members of a LoopbackGroup only"),
        ("deepep", cd.ConfigError, "unknown backend 'deepep'"),
    ],
)
def test_a_named_backend_is_never_replaced(backend: str, error: type[cd.CrossdockError], sentence: str):
    assert sentence in refused(lambda: cd.TokenDispatcher(ONE, backend=backend), error)


def test_only_auto_chooses_and_says_what():
    explanation = cd.explain(ONE)
    assert explanation.chosen == "local"
    with cd.TokenDispatcher(ONE) as dispatcher:
        assert "backend='local'" in repr(dispatcher)
    assert cd.explain(ONE, LoopbackGroup(2).member(0)).chosen == "loopback"


class OnlyExact(LocalBackend):
    """A backend that waits for its counts."""

    traits = dataclasses.replace(LocalBackend.traits, row_capacities=frozenset({"exact"}))


def test_a_capacity_that_a_backend_does_not_offer_is_refused():
    config = dataclasses.replace(ONE, row_capacity=cd.RowCapacity.worst_case())
    message = refused(lambda: cd.TokenDispatcher(config, backend=OnlyExact()), cd.BackendUnavailable)
    assert "row_capacity worst_case(1.0) is not offered by this backend, only exact" in message


class Speechless(LocalBackend):
    """A backend that cannot say how it would share out the work."""

    def describe(self, spec: object, device: object) -> str:
        raise OSError("a broken library")


def test_opening_asks_no_backend_how_it_would_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LocalBackend, "describe", Speechless.describe)
    with cd.TokenDispatcher(ONE) as dispatcher:
        assert dispatcher.backend_name == "local"
    assert "it could not tell how it would share out the work: OSError: a broken library" in str(cd.explain(ONE))


@pytest.mark.parametrize(
    "source", ["raise RuntimeError('no such symbol')", "def Bent():\n    raise OSError('no card')"]
)
def test_a_broken_package_takes_no_other_backend_along(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bent_backend.py").write_text(source)
    facts = tmp_path / "bent_backend-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: bent-backend\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[crossdock.backends]\nbent = bent_backend:Bent\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bent_backend", raising=False)
    with cd.TokenDispatcher(ONE) as dispatcher:
        assert dispatcher.backend_name == "local"
    (bent,) = [candidate for candidate in cd.explain(ONE).candidates if candidate.name == "bent"]
    assert bent.why_not is not None and "it could not be loaded: " in bent.why_not
    assert "no such symbol" in bent.why_not or "no card" in bent.why_not
    assert "it could not be loaded" in refused(lambda: cd.TokenDispatcher(ONE, backend="bent"), cd.BackendUnavailable)


# -- in inference mode ------------------------------------------------------------------------------------------------


def opened_in_inference_mode(seat: Seat, trial: Problem) -> None:
    with torch.inference_mode():
        dispatcher = seat.open(trial.config)
        inputs = trial.x[seat.rank], trial.topk_scores[seat.rank], trial.topk_expert_ids[seat.rank]
        routed = dispatcher.dispatch(*inputs)
        dispatcher.combine(routed.rows, routed.handle)
    with dispatcher:
        finish(forward(dispatcher, trial, seat.rank, seat.device))


@every_backend(2)
def test_what_is_opened_in_inference_mode_serves_outside(on: On, backend: str, ep_size: int):
    on(backend, ep_size)(opened_in_inference_mode, problem(make_config(4, 2), random_ids((4, 4), 2, 4)))


# -- in a clean process -----------------------------------------------------------------------------------------------

WITHOUT_TRITON = """
import sys
import time
from functools import partial
sys.modules["triton"] = None
import torch, crossdock as cd
config = cd.DispatcherConfig(num_experts=4, top_k=2, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=4)
print([c.name for c in cd.explain(config).candidates])
with cd.TokenDispatcher(config) as d:
    routed = d.dispatch(torch.ones(4, 8), torch.ones(4, 2), torch.tensor([[0, 1]] * 4))
    assert (d.combine(routed.rows, routed.handle) == 2).all()
assert not torch.cuda.is_initialized()
assert not {"deep_ep", "uccl"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    "faults",
    [{}, {"deep_ep": "raise AssertionError('no GPU')", "uccl": "raise OSError('undefined symbol')"}],
    ids=["none", "broken"],
)
def test_no_gpu_no_triton_and_broken_vendor_packages(faults: dict[str, str], tmp_path: Path):
    for name, fault in faults.items():
        (tmp_path / f"{name}.py").write_text(fault)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "['local', 'loopback', 'all_to_all', 'symmetric']" in done.stdout


# -- dtypes -----------------------------------------------------------------------------------------------------------


@every_backend(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_is_served_and_others_are_refused(on: On, backend: str, ep_size: int, dtype: torch.dtype):
    trial = problem(make_config(4, 2, dtype=dtype), random_ids((4, 4), 2, 4))
    for messages in on(backend, 2)(offered_other_dtypes, trial):
        assert all("must be torch" in message for message in messages)


def offered_other_dtypes(seat: Seat, trial: Problem) -> list[str]:
    messages = []
    scores, ids = trial.topk_scores[seat.rank], trial.topk_expert_ids[seat.rank]
    with seat.open(trial.config) as dispatcher:
        for other in {torch.bfloat16, torch.float16, torch.float32, torch.float64} - {trial.config.dtype}:
            x = trial.x[seat.rank].to(other)
            messages.append(refused(lambda x=x: dispatcher.dispatch(x, scores, ids)))  # type: ignore[misc]
        solve(dispatcher, trial, seat.rank, seat.device)
    return messages


# -- a fresh group ----------------------------------------------------------------------------------------------------


def test_the_first_call_on_a_fresh_group():
    trial = problem(make_config(4, 2), random_ids((4, 4), 2, 4))
    run_ranks(first_call, 2, trial)


def first_call(rank: int, trial: Problem) -> None:
    with cd.TokenDispatcher(trial.config, dist.new_group([0, 1]), "all_to_all") as dispatcher:
        solve(dispatcher, trial, rank, torch.device("cpu"))


def test_a_device_that_is_none_is_refused():
    config = make_config(4, 2, 8)
    for device, sentence in (
        ("gpu", "got 'gpu'"),
        ("cuda:1", "device 'cuda:1' was asked for, and torch sees no GPU here"),
    ):
        if device.startswith("cuda") and torch.cuda.is_available():
            continue
        for ask in (partial(cd.TokenDispatcher, config), partial(cd.explain, config)):
            with pytest.raises(cd.ConfigError, match=re.escape(sentence)):
                ask(device=device)


class _TellsTheEnd(LocalTransport):
    """Tells where the last expert's rows end, though no account was offered in which it might have entered them."""

    def dispatch(self, *args: Any) -> Received:
        received = super().dispatch(*args)
        return received._replace(rows_end=received.expert_offsets[-1:].to(torch.int64))


class _Telling(LocalBackend):
    name = "telling"

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        return _TellsTheEnd(spec)


def test_a_dispatch_is_entered_whatever_its_backend_tells():
    config = make_config(2, 1, row_capacity=cd.RowCapacity.rows(4), on_overflow="drop")
    with cd.TokenDispatcher(config, backend=_Telling()) as dispatcher:
        dispatcher.dispatch(torch.ones(10, 16), torch.ones(10, 1), torch.zeros(10, 1).long())
        (layer,) = dispatcher.stats().layers.values()
        assert (layer.rows, layer.rows_wanted, layer.overflows) == (4, 10, 1)


def _open_and_close(rank: int) -> int:
    for number in range(60):
        time.sleep(0.002 * (number % 5) * (rank == number % 4))
        cd.TokenDispatcher(make_config(4, 2), backend="all_to_all").close()
    return rank


@pytest.mark.full
def test_who_closes_at_once_disturbs_nobody_who_still_connects(ranks: Ranks):
    """Two runs in three failed where ranks did not meet once they had connected."""
    assert ranks(4).run(_open_and_close, timeout_s=60.0) == [0, 1, 2, 3]
