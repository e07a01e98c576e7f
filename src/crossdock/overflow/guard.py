"""The guard: what happens at the end of a training step, in order."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..dispatcher import TokenDispatcher
from ..errors import CapacityOverflow, ConfigError, ContractViolation, CrossdockError, InvalidInput
from ..opened import OpenDispatcher
from ..types import check_positive_int
from .agree import Agreement, StepName, come_to
from .apply import Stepper
from .arguments import check_retry, checked_dispatchers, checked_optimizers, checked_shrinking
from .groups import agreement_over, by_key, wider
from .report import APART, DROPPED, Report
from .rng import RngState
from .scaler import ScalerState
from .sizing import Sizer

Loss = TypeVar("Loss")


@dataclass(frozen=True, kw_only=True)
class GuardStats:
    """What a guard has done so far; the same on every rank of its groups, but for what is resized.

    Attributes:
        steps: steps that all ranks came to and decided on, applied or not, also where an error came after that, as of
            too many skipped in a row. A call of `step` that ended before, by its closure's error, a wrong argument or a
            fault, is none.
        skipped_steps: steps that it did not apply.
        retries: times that it ran a step again.
        grown: times that a layer of this rank's dispatchers got a larger capacity.
        shrunk: times that one got a smaller capacity.
    """

    steps: int = 0
    skipped_steps: int = 0
    retries: int = 0
    grown: int = 0
    shrunk: int = 0


class OverflowGuard:
    """Keeps a training step that lacks rows from being applied; `guard.step()` stands in for `optimizer.step()`.

    A step is truncated if a dispatch since the last one has dropped rows, under another policy than "drop", on any rank
    of any of the groups. Then parameters and the optimizer's state stay as they are, to the bit, on all of these ranks;
    the step is counted; and the `calibrated` layers that dropped rows are sized to fit what they were asked for. A call
    that was given up on the device (`PeerTimeout` follows at the next touch point) keeps a step from being applied too.

    The optimizer's step is decided on the device where all optimizers read `found_inf` (torch's fused ones) or with
    `snapshot=True`. Then a new size is read, and comes, one step late, and a second step in a row may be skipped.
    Otherwise the host reads the flag, once a step, and sizes change at once.

    Args:
        dispatchers: one, or several whose calls make up a step. A dispatcher has one guard.
        optimizer: one, or several that step together.
        groups: every group over which a step is the same for all ranks, beside the dispatchers' own: those of data,
            tensor and pipeline parallelism. The flag is agreed over each in turn, as over the dimensions of a mesh.
            Making a guard asks no other rank; on a CPU the first step meets them, and opens communicators of its own.
        snapshot: keep a copy of parameters and state during the step, and put it back on the device, so that the host
            reads nothing; for optimizers without `found_inf`, for which the step of a `GradScaler` still does.
        sync: read on the host at every step, so that sizes change at once.
        retry: run a truncated step again, at once and with the capacity that it needs; `step` needs its closure then.
        shrink_after: after so many steps in a row that took up little of a layer's capacity, fit that to the most of
            them; None never does.
        shrink_below: what "little" is, a share of the capacity.
        patience: how many steps in a row may be skipped, or runs of a retried step truncated, before that is an error.

    Raises:
        ConfigError: no dispatchers, or settings that do not go together.

    Example:
        >>> from .. import DispatcherConfig, RowCapacity
        >>> config = DispatcherConfig(
        ...     num_experts=4, top_k=2, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=16,
        ...     row_capacity=RowCapacity.calibrated(1.0), on_overflow="skip_step",
        ... )
        >>> weight = torch.ones(8, requires_grad=True)
        >>> with TokenDispatcher(config) as dispatcher:
        ...     guard = OverflowGuard(dispatcher, torch.optim.SGD([weight], lr=0.1))
        ...     for num_tokens in (4, 8, 8):
        ...         ids = torch.tensor([[0, 1]] * num_tokens)
        ...         routed = dispatcher.dispatch(weight.expand(num_tokens, 8), torch.ones(num_tokens, 2), ids)
        ...         dispatcher.combine(routed.rows, routed.handle).sum().backward()
        ...         guard.step()
        >>> guard.stats()
        GuardStats(steps=3, skipped_steps=1, retries=0, grown=1, shrunk=0)
    """

    def __init__(
        self,
        dispatchers: TokenDispatcher | Sequence[TokenDispatcher],
        optimizer: Optimizer | Sequence[Optimizer],
        groups: Sequence[Any] = (),
        *,
        snapshot: bool = False,
        sync: bool = False,
        retry: bool = False,
        shrink_after: int | None = None,
        shrink_below: float = 0.5,
        patience: int = 10,
    ) -> None:
        check_positive_int("patience", patience)
        guarded = checked_dispatchers(dispatchers)
        self._opened = [each._open for each in guarded]
        self._steppers = [Stepper(each, snapshot=snapshot) for each in checked_optimizers(optimizer)]
        if retry:
            check_retry(self._opened)
        shrinking = checked_shrinking(shrink_after, shrink_below)
        self._sizers = [Sizer(opened, shrinking) for opened in self._opened]
        self._retry, self._patience = retry, patience
        self._reads_host = sync or retry or any(stepper.needs_host for stepper in self._steppers)
        self._attach()
        timeout_s = max(opened.config.timeout_s for opened in self._opened)
        self._own = [agreement_over(each.group, self._device, timeout_s) for each in guarded]
        self._wider = wider(self._own, groups, self._device, timeout_s)
        for places in by_key(self._own):  # else two guards that first step in another order on one rank would pair up
            self._own[places[0]].alike = {"dispatchers": [_opening_of(self._opened[i]) for i in places]}
        self._agreements = [*(self._own[places[0]] for places in by_key(self._own)), *self._wider]
        self._close = weakref.finalize(self, _close_all, self._agreements, os.getpid())
        self._unread: Report | None = None
        self._fault: CrossdockError | None = None  # of the first step to which not all ranks came
        self._steps = self._skipped = self._skipped_in_a_row = self._retries = self._grown = self._shrunk = 0

    def step(self, closure: Callable[[], Loss] | None = None, *, scaler: Any = None) -> Loss | None:
        """End a training step: agree, apply it or not, and fit capacities. On all ranks of all groups together.

        Args:
            closure: runs forward and backward of the whole step and returns its loss, which is returned; called once,
                or again under `retry`. Without it, they have been run.
            scaler: a `torch.amp.GradScaler`, whose step is made instead of the optimizer's; gradients may have been
                unscaled, and `scaler.update()` stays with the caller. A truncated step does not change its scale; one
                that runs again begins with the scaler as the first run did, so that its closure may unscale.

        Raises:
            CapacityOverflow: under `on_overflow="raise"`; or too many steps in a row were truncated.
            PeerTimeout, ContractViolation: a dispatcher's first fault, or ranks that do not come to this step.
            InvalidInput: no closure under `retry`.
        """
        self._check_step(closure)
        self._raise_faults()
        self._read_late()
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        start = (RngState.of(self._device), ScalerState.of(scaler)) if self._retry else None
        loss, step = _run(closure), StepName(self._steps)
        report, skip = self._agree(step), None
        self._steps += 1  # decided on, whatever comes of it
        if self._reads_host:
            skip = self._take(report)
            while skip and start is not None and report.code == DROPPED:
                step = step.again()
                loss, report = self._run_again(closure, start, step)
                skip = self._take(report)
            if skip:
                self._count_skipped(report)
        else:
            self._unread = report
        for opened in self._opened:
            opened.look()
        for stepper in self._steppers:
            stepper.step(report.flag, skip, scaler)
        return loss

    @property
    def has_stepped(self) -> bool:
        """Whether `step` was ever called."""
        return self._steps > 0 or self._fault is not None

    def num_skipped(self) -> int:
        """Steps that were not applied; waits for the device."""
        return self._skipped + self.has_skipped_unread(wait=True)

    def has_skipped_unread(self, *, wait: bool) -> bool:
        """Whether the last step was not applied, and the host has not read that yet; without a wait it may not know."""
        report = self._unread
        if report is None or not (wait or report.has_arrived()):
            return False
        return report.code > 0

    def stats(self) -> GuardStats:
        """What it has done so far; waits for the device."""
        return GuardStats(
            steps=self._steps,
            skipped_steps=self.num_skipped(),
            retries=self._retries,
            grown=self._grown,
            shrunk=self._shrunk,
        )

    def __repr__(self) -> str:
        return f"OverflowGuard({len(self._opened)} dispatchers, {len(self._steppers)} optimizers)"

    # -- parts of a step ---------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next((opened.device for opened in self._opened if opened.device is not None), torch.device("cpu"))

    def _check_step(self, closure: Any) -> None:
        if self._retry and closure is None:
            raise InvalidInput("retry=True needs a closure at every step: what runs forward and backward once more")
        if closure is not None and not callable(closure):
            raise InvalidInput(f"closure must be a function without arguments, got {type(closure).__name__}")
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ContractViolation(
                "a guard's step cannot be captured in a graph: capture forward and backward, and step behind the replay"
            )

    def _raise_faults(self) -> None:
        for opened in self._opened:
            opened.session.raise_fault()
        if self._fault is not None:
            raise copy.copy(self._fault)  # a fresh one: a traceback would keep tensors alive

    def _agree(self, step: StepName) -> Report:
        """What all ranks have seen of this step."""
        self._raise_faults()
        device = self._device
        news = [opened.take_news(device).to(device) for opened in self._opened]
        try:
            with come_to(step, self._agreements, self._raise_faults):
                flag = self._agree_on(news)
        except CrossdockError as fault:
            self._fault = copy.copy(fault)
            raise
        return Report(flag, news)

    def _agree_on(self, news: list[Tensor]) -> Tensor:
        """Put what all ranks have seen in the place of what this one has; `[1]`: the first word of all of it."""
        for places in by_key(self._own):
            joined = torch.cat([news[i] for i in places])
            num_calls = sum(self._opened[i].session.num_calls for i in places)
            self._own[places[0]].maximum(joined, self._raise_faults, num_calls)
            for i, part in zip(places, joined.split([len(news[i]) for i in places]), strict=True):
                news[i] = part
        flag = torch.stack([part[0] for part in news]).amax().reshape(1)
        for agreement in self._wider:
            agreement.maximum(flag, self._raise_faults)
        return flag

    def _take(self, report: Report) -> bool:
        """Read a report on the host and fit capacities; whether its step is truncated."""
        if report.code == APART:
            self._fault = ContractViolation(
                "ranks of this guard's groups came to different steps, or to different runs of one, and nothing was"
                " applied; a closure that raises on one rank has to end the step on all"
            )
            self._raise_faults()
        skipped, grown, parts = report.code > 0, 0, report.of_dispatchers
        for sizer, part in zip(self._sizers, parts, strict=True):
            resized = sizer.fit(part)
            grown += resized.grown
            self._shrunk += resized.shrunk
        self._grown += grown
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row > self._patience:
            self._count_skipped(report)
            self._give_up(parts)
        return skipped

    def _count_skipped(self, report: Report) -> None:
        self._skipped += 1
        parts = report.of_dispatchers
        for opened, sizer, part in zip(self._opened, self._sizers, parts, strict=True):
            opened.statistics.note_skipped(sizer.dropping(part))

    def _read_late(self) -> None:
        if self._unread is not None:
            report, self._unread = self._unread, None
            if self._take(report):
                self._count_skipped(report)

    def _run_again(
        self, closure: Callable[[], Loss] | None, start: tuple[RngState, ScalerState], step: StepName
    ) -> tuple[Loss | None, Report]:
        self._retries += 1
        for state in start:
            state.restore()
        for stepper in self._steppers:
            stepper.optimizer.zero_grad(set_to_none=True)
        return _run(closure), self._agree(step)

    def _give_up(self, parts: list[list[int]]) -> None:
        found = ((sizer.dropping(part), i) for i, (sizer, part) in enumerate(zip(self._sizers, parts, strict=True)))
        layer, i = next(((layers[0], i) for layers, i in found if layers), (None, 0))
        if layer is None:
            why = "ranks of another dispatcher dropped rows"
        else:
            capacity = self._opened[i].config.row_capacity
            why = f"layer {layer!r} drops rows, and row_capacity {capacity} " + (
                "does not grow fast enough" if capacity.kind == "calibrated" else "does not grow: raise it"
            )
        raise CapacityOverflow(f"{self._skipped_in_a_row} steps in a row were truncated and not applied: {why}")

    def _attach(self) -> None:
        for opened in self._opened:
            if (there := opened.accounts.guard) is not None and there() is not None:
                raise ConfigError(
                    "a dispatcher has one guard, and this one has one already: give that all optimizers, or drop it"
                )
        for opened in self._opened:
            opened.accounts.guard = weakref.ref(self)


def _run(closure: Callable[[], Loss] | None) -> Loss | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _close_all(agreements: list[Agreement], pid: int) -> None:
    if os.getpid() == pid:  # else a forked child: the links are its parent's
        for agreement in agreements:
            agreement.close()


def _opening_of(opened: OpenDispatcher) -> str:
    """What tells a dispatcher from all others, the same on every rank of it."""
    opening = opened.session.opening
    return "" if opening is None else opening.prefix
