"""One optimizer's step, applied or not: by what the host knows, or by a flag that only the device has.

torch's fused optimizers read such a flag (`found_inf`) and leave everything as it is where it is set. For all others
a copy is kept and put back. A step in which an optimizer makes its state is decided on the host: what is not there yet
can be neither kept nor put back, and fused SGD would keep a momentum that nobody has written. Whatever is decided
here, the step of torch's `GradScaler` reads on the host, once for each optimizer that does not read `found_inf`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ContractViolation
from .scaler import infinite, unscale


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's fused optimizers, or anything else that takes `GradScaler`'s two attributes."""
    takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters  # an older agreement
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not takes_scaler


class Stepper:
    """Steps one optimizer.

    Attributes:
        optimizer: it.
        needs_host: whether somebody has to tell it on the host whether to step.
    """

    def __init__(self, optimizer: Optimizer, *, snapshot: bool) -> None:
        self.optimizer = optimizer
        self._fused = reads_found_inf(optimizer)
        self.needs_host = not (self._fused or snapshot)
        self._stateless: set[int] = set()  # ids of parameters that were stepped and keep no state

    def step(self, flag: Tensor, skip: bool | None, scaler: Any) -> None:
        """Step, unless `flag` (float32, no dimensions, on the device) is 1.

        Args:
            flag: see above.
            skip: the same on the host, if it has been read.
            scaler: an enabled `torch.amp.GradScaler`, or None.
        """
        decides_late = skip is None and self._makes_state()
        skip = bool(flag.item()) if decides_late else skip
        if skip is None:
            self._step_by_flag(flag, scaler)
        elif skip:
            if scaler is not None:
                unscale(scaler, self.optimizer)  # `update` wants to know of it, and of infinities
        else:
            _step(self.optimizer, scaler)
            if decides_late:
                self._stateless.update(id(param) for param in self._stepped() if not self._state_of(param))

    def _step_by_flag(self, flag: Tensor, scaler: Any) -> None:
        if self._fused:
            with _flagged(self.optimizer, flag):
                _step(self.optimizer, scaler)
        elif scaler is not None:
            with infinite(scaler, self.optimizer, flag):
                scaler.step(self.optimizer)
        else:
            self._step_and_put_back(flag)

    @torch.no_grad()
    def _step_and_put_back(self, flag: Tensor) -> None:
        params, skip = self._stepped(), flag > 0
        states = [(param, key) for param in params for key in self._state_of(param) if self._is_kept(param, key, flag)]
        kept = [_local(param).clone() for param in params]
        kept_states = [_local(self.optimizer.state[param][key]).clone() for param, key in states]
        self.optimizer.step()
        for tensor, before in zip(params, kept, strict=True):
            _put_back(tensor, before, skip)
        for (param, key), before in zip(states, kept_states, strict=True):
            _put_back(self.optimizer.state[param][key], before, skip)

    def _is_kept(self, param: Tensor, key: str, flag: Tensor) -> bool:
        value = self._state_of(param)[key]
        if isinstance(value, (bool, str)):
            return False
        what = f"{key!r} of {type(self.optimizer).__name__}"
        if not isinstance(value, Tensor):
            raise ContractViolation(
                f"snapshot=True cannot put back {what}, which is no tensor but {type(value).__name__}: leave it out"
            )
        if value.device != flag.device:
            raise ContractViolation(
                f"snapshot=True cannot put back {what}, which lives on {value.device} and not on {flag.device}: make"
                " the optimizer with capturable=True, or leave snapshot out"
            )
        return True

    def _makes_state(self) -> bool:
        return any(not self._state_of(param) and id(param) not in self._stateless for param in self._stepped())

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(param, {})
        return {key: value for key, value in state.items() if value is not None}

    def _stepped(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]


def _step(optimizer: Optimizer, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)


@contextmanager
def _flagged(optimizer: Optimizer, flag: Tensor) -> Iterator[None]:
    """Raise `found_inf` to at least `flag` in this optimizer's steps, after whoever else has set it."""

    def raise_found_inf(fused: Any, *_: Any) -> None:
        found = getattr(fused, "found_inf", None)
        fused.found_inf = flag if found is None else torch.maximum(found.to(flag.device), flag).clamp(max=1.0)

    before: Any = getattr(optimizer, "found_inf", None)
    handle = optimizer.register_step_pre_hook(raise_found_inf)
    try:
        yield
    finally:
        handle.remove()
        if before is not None:
            optimizer.found_inf = before  # type: ignore[attr-defined]  # torch's own way to hand it over
        elif hasattr(optimizer, "found_inf"):  # a GradScaler has taken it away itself
            del optimizer.found_inf


def _local(tensor: Any) -> Tensor:
    """A sharded tensor's part on this rank."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _put_back(tensor: Tensor, before: Tensor, skip: Tensor) -> None:
    after = _local(tensor)
    after.copy_(torch.where(skip, before, after))
