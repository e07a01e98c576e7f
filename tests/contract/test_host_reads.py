"""Who reads a step's flag: the device, with the host a step behind, or the host, once. And how that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import crossdock as cd
from crossdock.ledger import DeviceLedger
from tests.contract.host_reads import EARLIER, FRESH, device_ledger, host_reads
from tests.contract.overflow_trials import OPTIMIZERS, guarded_config, ids_of

# What reads values of a device on the host, and by which name it is told.
READS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "tolist": (lambda x: x.tolist(), "tolist"),
    "item": (lambda x: x[0].item(), "_local_scalar_dense"),
    "int": (lambda x: int(x[0]), "_local_scalar_dense"),
    "bool": (lambda x: bool(x[0]), "_local_scalar_dense"),
    "bool of a comparison": (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
    "a size": (lambda x: torch.zeros(x[0]), "_local_scalar_dense"),  # type: ignore[call-overload]
    "cpu": (lambda x: x.cpu(), "cpu"),
    "numpy": (lambda x: x.numpy(), "numpy"),
    "np.asarray": (lambda x: np.asarray(x), "__array__"),
    "to('cpu')": (lambda x: x.to("cpu"), "to"),
    "to(device='cpu')": (lambda x: x.to(device="cpu", non_blocking=True), "to"),
    "to(torch.device)": (lambda x: x.to(torch.device("cpu")), "to"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "a mask": (lambda x: x[x > 0], "index"),
    "repr": (lambda x: repr(x), "__repr__"),
}
ON_THE_DEVICE: list[Callable[[Tensor], object]] = [
    lambda x: x.to(x.device, torch.float32),
    lambda x: x.to(torch.float32),
    lambda x: x.to(x),
    lambda x: torch.where(x > 0, x, 0),
]


def reads_of_a_step(patch: pytest.MonkeyPatch, what: str, change: Callable[[Any], object]) -> list[str]:
    """Of the second step of a guard that decides on the device, with something more done in "take" or "agree"."""
    owner, name = {"take": (DeviceLedger, "take"), "agree": (cd.OverflowGuard, "_agree")}[what]
    genuine = getattr(owner, name)

    def changed(*arguments: Any) -> Any:
        result = genuine(*arguments)
        change(result)
        return result

    patch.setattr(owner, name, changed)
    with cd.TokenDispatcher(guarded_config(), device=torch.device("cpu")) as dispatcher, device_ledger(dispatcher):
        weight = torch.nn.Parameter(torch.ones(4))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS["fused SGD without momentum"]([weight]))
        weight.grad = torch.ones(4)
        guard.step()
        with host_reads(dispatcher) as seen:
            guard.step()
        return seen


@pytest.mark.parametrize("way", READS)
def test_a_read_of_the_host_is_seen_however_it_is_made(way: str, monkeypatch: pytest.MonkeyPatch):
    read, name = READS[way]
    assert reads_of_a_step(monkeypatch, "take", read) == [EARLIER, name]


def test_a_copy_that_is_waited_for_at_once_is_seen(monkeypatch: pytest.MonkeyPatch):
    assert reads_of_a_step(monkeypatch, "agree", lambda report: report.code) == [EARLIER, FRESH]


@pytest.mark.parametrize("place", range(len(ON_THE_DEVICE)))
def test_what_stays_on_the_device_is_no_read(place: int, monkeypatch: pytest.MonkeyPatch):
    assert reads_of_a_step(monkeypatch, "take", ON_THE_DEVICE[place]) == [EARLIER]


def reads_of_steps(make: str, settings: dict[str, Any], scaled: bool) -> tuple[list[bool], list[int], list[list[str]]]:
    """Which steps were applied, rows of their dispatches, and what the host has read in each but the first.

    The second one is truncated, and what comes behind it is not larger.
    """
    capacity = cd.RowCapacity.calibrated(1.0)
    with cd.TokenDispatcher(guarded_config(row_capacity=capacity)) as dispatcher, device_ledger(dispatcher):
        weight = torch.nn.Parameter(torch.ones(16))
        guard = cd.OverflowGuard(dispatcher, OPTIMIZERS[make]([weight]), **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        changed, sizes, reads = [], [], []
        for number, num_tokens in enumerate([2, 4, 4, 4]):
            routed = dispatcher.dispatch(
                weight.expand(num_tokens, 16),
                torch.ones(num_tokens, 2),
                ids_of("even")[:num_tokens],
                num_tokens_per_rank=4,
            )
            sizes.append(routed.rows.shape[0])
            scaler.scale(dispatcher.combine(routed.rows, routed.handle).sum()).backward()
            before = weight.tolist()
            with host_reads(dispatcher) as seen:
                guard.step(scaler=scaler)
            if number > 0:  # the first one makes the optimizer's state
                reads.append(seen)
            if scaled:
                scaler.update()
            changed.append(weight.tolist() != before)
        assert dispatcher.stats().skipped_steps == guard.num_skipped() == changed.count(False)
        assert dispatcher.stats().layers[""].headroom == 0.0
        return changed, sizes, reads


LATE = ([True, False, False, True], [4, 4, 4, 8])  # steps that are applied, and rows, where sizes come one step late
AT_ONCE = ([True, False, True, True], [4, 4, 8, 8])
OF_A_SCALER = "_local_scalar_dense"  # torch's own `GradScaler.step`


@pytest.mark.parametrize(
    ("make", "settings", "scaled"),
    [
        ("fused AdamW", {}, False),
        ("SGD", {"snapshot": True}, False),
        ("fused AdamW", {}, True),
        ("fused SGD", {}, True),
    ],
)
def test_the_device_decides(make: str, settings: dict[str, Any], scaled: bool):
    """The host reads what is known of the step before, whatever the device is busy with."""
    assert reads_of_steps(make, settings, scaled) == (*LATE, [[EARLIER]] * 3)


@pytest.mark.parametrize(
    ("make", "settings"), [("SGD", {}), ("SGD without momentum", {}), ("fused SGD", {"sync": True})]
)
def test_the_host_decides_by_one_read(make: str, settings: dict[str, Any]):
    assert reads_of_steps(make, settings, scaled=False) == (*AT_ONCE, [[FRESH]] * 3)


def test_a_scaler_reads_for_optimizers_that_are_not_fused():
    """At every step with a snapshot; where the host knows that a step is left out, not in that one."""
    assert reads_of_steps("SGD", {"snapshot": True}, scaled=True) == (*LATE, [[EARLIER, OF_A_SCALER]] * 3)
    reads = [[FRESH], [FRESH, OF_A_SCALER], [FRESH, OF_A_SCALER]]
    assert reads_of_steps("SGD", {}, scaled=True) == (*AT_ONCE, reads)
