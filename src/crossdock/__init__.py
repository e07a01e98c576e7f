"""crossdock: one token dispatcher for expert-parallel mixture-of-experts models on PyTorch.

Importing it loads no Triton, no CUDA and no vendor library, and starts nothing.
"""

from __future__ import annotations

from .backends.base import Backend, BackendTraits
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
from .overflow import GuardStats, OverflowGuard
from .select import Candidate, Explanation, explain
from .types import (
    Dispatched,
    DispatcherConfig,
    DispatcherStats,
    DispatchHandle,
    DispatchLayer,
    LayerStats,
    RowCapacity,
)

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendTraits",
    "BackendUnavailable",
    "Candidate",
    "CapacityOverflow",
    "ConfigError",
    "ContractViolation",
    "CrossdockError",
    "DispatchHandle",
    "DispatchLayer",
    "Dispatched",
    "DispatcherConfig",
    "DispatcherStats",
    "Explanation",
    "GuardStats",
    "InvalidInput",
    "LayerStats",
    "LayerView",
    "OverflowGuard",
    "PeerTimeout",
    "RowCapacity",
    "TokenDispatcher",
    "explain",
]
