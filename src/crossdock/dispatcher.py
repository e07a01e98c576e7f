"""The dispatcher: opened once over a group, then dispatch and combine through light views, one per layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .backends.base import Backend
from .callers import level_of_caller
from .calls import LayerCalls
from .errors import BackendUnavailable, ConfigError, ContractViolation
from .group.members import resolve_members
from .names import encode_name
from .opened import open_first
from .select import choose, make_spec
from .types import Dispatched, DispatcherConfig, DispatcherStats, DispatchHandle, OnOverflow, check_choice

_T = TypeVar("_T")


class TokenDispatcher:
    """Dispatches tokens to the experts of a group and combines their results.

    Opening is collective over `group`: all members open together, agree on configuration and backend, and get a
    communicator of their own. All calls are collective too; each is compared across the group, and a rank that is
    missing or differs becomes an error on every other rank within `timeout_s` plus 5 s.

    Args:
        config: the same on every rank.
        group: a ProcessGroup; None is the default group if torch.distributed is initialised, else one rank alone.
        backend: a name, a `Backend` object, or "auto".
        device: where the rows live; None takes the group's device.

    Raises:
        ConfigError, BackendUnavailable: before anything is opened.
        PeerTimeout, ContractViolation: members that did not come, or asked for something else.

    Example, alone:
        >>> config = DispatcherConfig(
        ...     num_experts=4, top_k=2, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=16
        ... )
        >>> ids = torch.tensor([[0, 1], [3, -1], [1, 2]])
        >>> with TokenDispatcher(config) as dispatcher:
        ...     routed = dispatcher.dispatch(torch.ones(3, 8), torch.ones(3, 2), ids)
        ...     out = dispatcher.combine(routed.rows, routed.handle)
        >>> out[:, 0].tolist()
        [2.0, 1.0, 2.0]
    """

    def __init__(
        self,
        config: DispatcherConfig,
        group: Any = None,
        backend: str | Backend = "auto",
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(config, DispatcherConfig):
            raise ConfigError(f"config must be a DispatcherConfig, got {type(config).__name__}")
        members = resolve_members(group, device)
        if backend == "auto" and members.transport == "none":
            _warn_of_a_lonely_rank()
        spec = make_spec(config, members)
        with torch.inference_mode(False):  # what is made here serves calls in any mode
            chosen, self._open = open_first(config, members, spec, choose(config, spec, members, backend))
        self._backend_name = chosen.name
        self._group = group
        self._nameless = LayerCalls(self._open, encode_name(""))

    # -- calls ------------------------------------------------------------------------------------------------------

    def layer(self, name: str, *, on_overflow: OnOverflow | None = None) -> LayerView:
        """A light view for one layer; its name is in every error. Any number of views share this dispatcher.

        `on_overflow` is this layer's own policy from now on, in every view of that name; None leaves it as it is, at
        first the configuration's.

        Raises:
            ConfigError: an `on_overflow` that does not exist.
        """
        view = LayerView(self, encode_name(name))
        if on_overflow is not None:
            check_choice("on_overflow", on_overflow, ("raise", "skip_step", "drop"))
            self._open.accounts.set_policy(name, on_overflow)
        return view

    def dispatch(
        self,
        x: Tensor,
        topk_scores: Tensor,
        topk_expert_ids: Tensor,
        num_local_tokens_per_expert: Tensor | None = None,
        *,
        num_tokens_per_rank: int | None = None,
    ) -> Dispatched:
        """`LayerView.dispatch` of the layer named ""."""
        return self._nameless.dispatch(
            x, topk_scores, topk_expert_ids, num_local_tokens_per_expert, num_tokens_per_rank=num_tokens_per_rank
        )

    def combine(self, rows: Tensor, handle: DispatchHandle, *, apply_scores: bool = True) -> Tensor:
        """`LayerView.combine` of the layer named ""."""
        return self._nameless.combine(rows, handle, apply_scores=apply_scores)

    def join_backward(self, handle: DispatchHandle) -> None:
        """`LayerView.join_backward` of the layer named ""."""
        self._nameless.join_backward(handle)

    def input_buffer(self, num_tokens: int) -> Tensor:
        """`[num_tokens, hidden_dim]` of a buffer that the dispatcher keeps for `x`, at the same address every time.

        For a producer that writes where it is told to: a kernel of yours, or an operation with `out=`. It is of the
        configured dtype and part of `workspace_bytes`. All layers share it, and it holds what was written last. A view
        of it, or a part of one, is dispatched like any other `x`, and as often as you like.

        Nothing else writes there and no peer reads there, so it may be filled again as soon as a dispatch has returned:
        on a GPU, in the order of its stream. Where another stream is current here than in the last call, it waits for
        what that call does on the device. No other rank needs to ask for it, and no host waits.

        For autograd every call is a write: a backward that needs what an earlier view held (where a router multiplied
        it by weights that need a gradient, say) is refused by torch. Do not touch a view after `close`.

        Raises:
            BackendUnavailable: a backend that has none, as all but `symmetric`; dispatch an ordinary tensor there.
            InvalidInput: a number outside 0..`num_max_tokens_per_rank`.
            ContractViolation: inside a compiled region, from a second thread, or after `close`.
            PeerTimeout, ContractViolation, CapacityOverflow: the dispatcher's first fault again.
        """
        if torch.compiler.is_compiling():
            raise ContractViolation("input_buffer cannot be called inside a compiled region: call it outside")
        buffer = self._open.input_buffer(num_tokens)
        if buffer is None:
            fix = "dispatch an ordinary tensor"
            raise BackendUnavailable(self.backend_name, "it keeps no buffer for x", fix, lacks="input_buffer")
        return buffer

    # -- facts and state --------------------------------------------------------------------------------------------

    @property
    def config(self) -> DispatcherConfig:
        """What it was opened with."""
        return self._open.config

    @property
    def group(self) -> Any:
        """What it was opened over, as it was passed; None stands for the default group, or one rank alone."""
        return self._group

    @property
    def backend_name(self) -> str:
        """The backend that serves."""
        return self._backend_name

    @property
    def workspace_bytes(self) -> int:
        """Bytes of persistent storage for communication on this rank, all allocated when it was opened.

        On a CPU `all_to_all` and `loopback` also keep memory of rows that nobody holds any longer, for the next call:
        up to 128 MiB a dispatcher.
        """
        return self._open.transport.workspace_bytes

    @property
    def device(self) -> torch.device | None:
        """Where the rows live; None before the first dispatch of one rank without torch.distributed."""
        return self._open.device

    @property
    def ep_rank(self) -> int:
        """Rank of this process inside the group."""
        return self._open.spec.rank

    @property
    def ep_size(self) -> int:
        """How many ranks the experts are sharded over."""
        return self._open.spec.ep_size

    @property
    def num_local_experts(self) -> int:
        """Experts on this rank: ids `ep_rank * num_local_experts` and up."""
        return self._open.spec.num_local_experts

    def check(self) -> None:
        """Raise the dispatcher's first fault, or what the device has told of since; does not wait.

        Call it after the replay of a graph, which raises nothing itself.

        Raises:
            CapacityOverflow: rows were dropped, under `on_overflow="raise"`; all peers raise it too.
            InvalidInput: expert ids that only the device could see.
            ContractViolation, PeerTimeout: of a call for which the host did not wait.
        """
        self._open.check()

    def stats(self, *, wait: bool = True) -> DispatcherStats:
        """What this rank has done so far. Raises what `check` raises.

        What a GPU counts (tokens, rows and what was sent, in sum and by layer) comes in one copy, for which the host
        waits. With `wait=False` it does not: that is of the last copy that has come, at first zeros and no layers, and
        a newer one is asked for. What the host knows by itself (calls, its own waits, bytes held and kept, steps that a
        guard has read) is of now. Inside the capture of a graph nothing is asked for.

        Raises:
            ContractViolation: inside a capture, with `wait`.
        """
        self.check()
        stats = self._open.statistics.read(wait=wait)
        self._open.look()  # the device has come to here by now
        return stats

    def close(self, *, graphs_destroyed: bool = False) -> None:
        """Free everything. Idempotent, waits for no peer, and may come before or after `destroy_process_group`.

        Where a CUDA graph has captured a call, its storage stays mapped for as long as the process lives, and a warning
        says so: a replay may still come. With `graphs_destroyed=True` you say that none will, and all is freed.

        Raises:
            CapacityOverflow, InvalidInput: as `check`, where nothing has told of it before; all is freed then as well.
        """
        if graphs_destroyed:
            self._open.allow_unmapping()
        elif self._open.is_captured and self._open.close.alive:
            warnings.warn(
                "a CUDA graph has captured calls of this dispatcher, so its storage stays mapped: once the graph is"
                " gone, close(graphs_destroyed=True) frees it",
                ResourceWarning,
                stacklevel=level_of_caller(),
            )
        try:
            if self._open.close.alive and self._open.session.fault is None:
                self._open.look(at_the_end=True)
        finally:
            self._open.close()

    def __enter__(self) -> TokenDispatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._open.close()

    def calibrate(self, step: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Run `step` (a forward, say) with `exact` dispatches, and size every layer by the most it asked for in it.

        For `row_capacity` calibrated, on all ranks alike, with batches as large and as skewed as they come. Layers that
        do not dispatch in `step` measure their next eager dispatch. Under the other kinds nothing is calibrated, which
        a warning says. Returns what `step` returns.
        """
        capacity = self.config.row_capacity
        if capacity.kind != "calibrated":
            warnings.warn(
                f"row_capacity {capacity} is fixed by the configuration: nothing is calibrated, and no factor applies",
                stacklevel=2,
            )
            return step(*args, **kwargs)
        return self._open.sizes.calibrate(lambda: step(*args, **kwargs))

    def recalibrate(self) -> None:
        """Let every layer measure its next eager dispatch anew (`row_capacity` calibrated); on all ranks alike.

        Raises the dispatcher's first fault, which no other size mends.
        """
        self._open.session.raise_fault()
        self._open.sizes.forget(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDispatcher:
        """A copied model shares the dispatcher."""
        return self

    def __reduce__(self) -> Any:
        raise ContractViolation(f"{self!r} cannot be pickled: it is open in this process alone; keep its config")

    def __repr__(self) -> str:
        return f"TokenDispatcher(backend={self.backend_name!r}, rank {self.ep_rank} of {self.ep_size})"


def _warn_of_a_lonely_rank() -> None:
    """Whoever was started among others has most likely forgotten to join them."""
    if dist.is_available() and dist.is_torchelastic_launched():
        warnings.warn(
            "torchrun has started this process, and torch.distributed is not initialised: the dispatcher serves this"
            " rank alone. Call torch.distributed.init_process_group first, or ask for backend='local' if that is meant",
            stacklevel=level_of_caller(),
        )


class LayerView(LayerCalls):
    """One layer's way into a shared dispatcher: the same calls, with the layer's name in every error."""

    def __init__(self, dispatcher: TokenDispatcher, encoded_name: Tensor) -> None:
        super().__init__(dispatcher._open, encoded_name)
        self._dispatcher = dispatcher

    @property
    def dispatcher(self) -> TokenDispatcher:
        """The dispatcher that this view shares with others."""
        return self._dispatcher

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerView:
        """A copied model shares the dispatcher."""
        return self

    def __reduce__(self) -> Any:
        raise ContractViolation(f"{self!r} cannot be pickled: its dispatcher is open in this process alone")

    def __repr__(self) -> str:
        return f"LayerView({self.name!r} of {self._dispatcher!r})"
