"""The errors crossdock raises on purpose, one root over them.

CrossdockError
├── ConfigError (ValueError)            a setting that cannot work, found before anything is opened
├── InvalidInput (ValueError)           tensors or arguments of one call, refused before any communication
├── ContractViolation (RuntimeError)    ranks that called different things, or a dispatcher used against its rules
├── PeerTimeout (TimeoutError)          ranks that died, stopped or did not come within `timeout_s`
├── CapacityOverflow (RuntimeError)     rows that did not fit the row capacity
└── BackendUnavailable (ImportError)    a backend that was asked for by name and cannot serve
"""

from __future__ import annotations

from collections.abc import Iterable


class CrossdockError(Exception):
    """Root of every error that crossdock raises on purpose."""


class ConfigError(CrossdockError, ValueError):
    """A setting that cannot work; the message has the value, the limit and what to change."""


class InvalidInput(CrossdockError, ValueError):
    """An argument of this call that cannot work; raised before any communication."""


class _BlamesRanks(CrossdockError):
    """An error that names ranks of the dispatcher's group (`ranks`, in ascending order)."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))


class ContractViolation(_BlamesRanks, RuntimeError):
    """Ranks that disagree about a call, or a dispatcher used against its rules; `ranks` are those that differ."""


class PeerTimeout(_BlamesRanks, TimeoutError):
    """Ranks that died, were stopped, or did not take part in a call in time; `ranks` are those that were missing."""


class CapacityOverflow(_BlamesRanks, RuntimeError):
    """More rows arrived than the row capacity holds; `ranks` is the rank whose experts they were for."""


class BackendUnavailable(CrossdockError, ImportError):
    """A backend asked for by name cannot serve here, or `lacks` something; with the reason and what would fix it."""

    def __init__(self, backend: str, reason: str, fix: str = "", *, lacks: str = "") -> None:
        what = f"offers no {lacks}" if lacks else "is not available here"
        super().__init__(f"backend {backend!r} {what}: {reason}" + (f"; {fix}" if fix else ""))
        self.backend, self.reason, self.fix = backend, reason, fix
