"""crossdock: one token dispatcher for expert-parallel mixture-of-experts models on PyTorch.

Importing it loads no Triton, no CUDA and no vendor library, and starts nothing.
"""

from __future__ import annotations

from .backends.base import Backend
from .dispatcher import LayerView, TokenDispatcher
from .errors import (
    BackendUnavailable,
    CapacityOverflow,
    ConfigError,
    ContractViolation,
    CrossdockError,
    InvalidInput,
    PeerTimeout,
)
from .overflow import OverflowGuard
from .select import Explanation, explain
from .types import Dispatched, DispatcherConfig, DispatcherStats, DispatchHandle, RowCapacity

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendUnavailable",
    "CapacityOverflow",
    "ConfigError",
    "ContractViolation",
    "CrossdockError",
    "DispatchHandle",
    "Dispatched",
    "DispatcherConfig",
    "DispatcherStats",
    "Explanation",
    "InvalidInput",
    "LayerView",
    "OverflowGuard",
    "PeerTimeout",
    "RowCapacity",
    "TokenDispatcher",
    "explain",
]
