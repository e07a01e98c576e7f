"""Activation checkpointing that replays the layout of the forward.

Under activation checkpointing torch runs a region again in backward. A dispatch that runs again inside a region
checkpointed with what this module offers moves its rows along the layout that the forward made: no counts are
exchanged, nothing waits on the host, and the extents are those of the forward, whatever the router says now.

    from torch.utils.checkpoint import checkpoint
    out = checkpoint(block, x, use_reentrant=False, context_fn=crossdock.recompute.context_fn)

    out = crossdock.recompute.checkpoint(block, x, use_reentrant=True)  # the reentrant kind has no contexts

Every rank recomputes the same regions in the same order: the rows move again, and that is a call like any other.

What is kept for a dispatch until its region's graph is gone, on the device of the rows: its layout (some int64 for
every slot and row, the same tensors that an uncheckpointed backward saves), 4 bytes for every row (its score), and 12
bytes for every local expert. Never rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch.utils.checkpoint

from ..errors import ConfigError
from .frames import Frame, Region

__all__ = ["ContextFn", "checkpoint", "context_fn"]

ContextFn: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def context_fn(inner: ContextFn | None = None, *, check_ids: bool = False) -> tuple[Region, Region]:
    """The contexts of one region for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=...)`.

    The forward runs under the first, every recomputation under the second. Arguments are bound with
    `functools.partial`.

    Args:
        inner: a `context_fn` of someone else's, to be used as well, such as
            `functools.partial(create_selective_checkpoint_contexts, policy)`.
        check_ids: refuse a recomputation whose router names other experts than the forward's. Otherwise the forward's
            choice stands (a near-tie may well fall the other way). On a GPU it costs a host synchronisation in every
            recomputed dispatch, and is for looking into a router.

    Raises:
        ConfigError: an `inner` that cannot be called.

    In the recomputation: ContractViolation, where it dispatches other layers, another number of times, or another
    number of tokens.
    """
    if inner is not None and not callable(inner):
        raise ConfigError(f"inner must be a function that returns two contexts, got {inner!r}")
    in_forward, in_recompute = (nullcontext(), nullcontext()) if inner is None else inner()
    frame = Frame(check_ids)
    return Region(frame, replays=False, beside=in_forward), Region(frame, replays=True, beside=in_recompute)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    context_fn: ContextFn | None = None,
    check_ids: bool = False,
    **options: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint`, of either kind, with replay.

    Args:
        function: what to run, now and again in backward.
        *args: on what.
        use_reentrant: torch's older kind, which runs the whole function again and cannot save operators selectively.
        context_fn: contexts of someone else's, as `inner` of the function `context_fn`; for `use_reentrant=False` only.
        check_ids: see the function `context_fn`.
        **options: all else that torch's `checkpoint` takes.
    """
    if use_reentrant:
        if context_fn is not None:
            raise ConfigError("context_fn is for use_reentrant=False: the reentrant kind has no contexts")
        function = _Reentrant(function, check_ids)
    else:
        options["context_fn"] = partial(_contexts, context_fn, check_ids=check_ids)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **options)


_contexts = context_fn  # `checkpoint` has a parameter of this name


class _Reentrant:
    """A function whose first call is recorded; every later one replays it."""

    def __init__(self, function: Callable[..., Any], check_ids: bool) -> None:
        self._function, self._frame, self._called = function, Frame(check_ids), False

    def __call__(self, *args: Any) -> Any:
        region = Region(self._frame, replays=self._called, beside=nullcontext())
        self._called = True
        with region:
            return self._function(*args)
