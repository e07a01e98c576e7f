"""The dispatcher: opened once over a group, then dispatch and combine through light views, one per layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import autograd
from .backends.base import Backend
from .errors import BackendUnavailable, ConfigError, ContractViolation
from .group.members import resolve_members
from .inputs import check_before_casting, check_combine
from .names import decode_name, encode_name
from .opened import open_first
from .recompute.frames import count_dispatch
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
        spec = make_spec(config, members)
        with torch.inference_mode(False):  # what is made here serves calls in any mode
            chosen, self._open = open_first(config, members, spec, choose(config, spec, members, backend))
        self._backend_name = chosen.name
        self._group = group

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
            self._open.set_policy(name, on_overflow)
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
        return self._nameless().dispatch(
            x, topk_scores, topk_expert_ids, num_local_tokens_per_expert, num_tokens_per_rank=num_tokens_per_rank
        )

    def combine(self, rows: Tensor, handle: DispatchHandle, *, apply_scores: bool = True) -> Tensor:
        """`LayerView.combine` of the layer named ""."""
        return self._nameless().combine(rows, handle, apply_scores=apply_scores)

    def join_backward(self, handle: DispatchHandle) -> None:
        """`LayerView.join_backward` of the layer named ""."""
        self._nameless().join_backward(handle)

    def input_buffer(self, num_tokens: int) -> Tensor:
        """Lend the memory from which peers read this rank's rows: fill it, dispatch it, and dispatch copies nothing.

        For a producer that writes where it is told to: a kernel of yours, or an operation with `out=`. No rank needs to
        ask where others do. Returns `[num_tokens, hidden_dim]` of the configured dtype with anything in it, at the same
        address every time. It may be written at once: every rank has read what was there, on a GPU by the time that
        the current stream gets here, without a wait of the host.

        The next dispatch of exactly this view, on any layer, takes the rows from where they are; results and gradients
        are those of an ordinary `x`. The view is good for that one dispatch. Any other dispatch and the backward of any
        combine overwrite it, and a later call of `input_buffer` takes it back; all views show the same memory. Do not
        write to it once it is dispatched, and do not touch it after `close`. What autograd has saved of it (where a
        router multiplies it by weights that need a gradient, say) may be overwritten before the backward, which torch
        then refuses.

        Raises:
            BackendUnavailable: a backend that lends none, as all but `symmetric`; dispatch an ordinary tensor there.
            InvalidInput: a number outside 0..`num_max_tokens_per_rank`.
            PeerTimeout: on a CPU, of ranks that do not read what is there; on a GPU later calls raise it.
            ContractViolation: inside a compiled region, from a second thread, or after `close`.
        """
        if torch.compiler.is_compiling():
            raise ContractViolation("input_buffer cannot be called inside a compiled region: lend and fill it outside")
        buffer = self._open.input_buffer(num_tokens)
        if buffer is None:
            raise BackendUnavailable(self.backend_name, "input_buffer is not offered", "dispatch an ordinary tensor")
        return buffer

    def _nameless(self) -> LayerView:
        return LayerView(self, self._open.nameless)

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
        """Bytes of persistent storage for communication on this rank, all allocated when it was opened."""
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

    def stats(self) -> DispatcherStats:
        """What this rank has done so far; on a GPU it waits for the device. Raises what `check` raises."""
        self.check()
        stats = self._open.stats()
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
                stacklevel=2,
            )
        try:
            if self._open.close.alive and self._open.session.fault is None:
                self._open.look()
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
        return self._open.calibrate(lambda: step(*args, **kwargs))

    def recalibrate(self) -> None:
        """Let every layer measure its next eager dispatch anew (`row_capacity` calibrated); on all ranks alike."""
        self._open.recalibrate(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenDispatcher:
        """A copied model shares the dispatcher."""
        return self

    def __reduce__(self) -> Any:
        raise ContractViolation(f"{self!r} cannot be pickled: it is open in this process alone; keep its config")

    def __repr__(self) -> str:
        return f"TokenDispatcher(backend={self.backend_name!r}, rank {self.ep_rank} of {self.ep_size})"


class LayerView:
    """One layer's way into a shared dispatcher: the same calls, with the layer's name in every error."""

    def __init__(self, dispatcher: TokenDispatcher, encoded_name: Tensor) -> None:
        self._dispatcher, self._encoded_name = dispatcher, encoded_name
        self._open = dispatcher._open

    @property
    def name(self) -> str:
        """The layer's name."""
        return decode_name(self._encoded_name)

    def recalibrate(self) -> None:
        """Let this layer measure its next eager dispatch anew (`row_capacity` calibrated); on all ranks alike."""
        self._open.recalibrate(self.name)

    @property
    def dispatcher(self) -> TokenDispatcher:
        """The dispatcher that this view shares with others."""
        return self._dispatcher

    def dispatch(
        self,
        x: Tensor,
        topk_scores: Tensor,
        topk_expert_ids: Tensor,
        num_local_tokens_per_expert: Tensor | None = None,
        *,
        num_tokens_per_rank: int | None = None,
    ) -> Dispatched:
        """Send every token's row to the experts it names.

        Args:
            x: `[T, hidden_dim]` of the configured dtype; T may be 0 and may differ between ranks.
            topk_scores: `[T, top_k]` float32; other float dtypes are cast.
            topk_expert_ids: `[T, top_k]` int32 or int64 global ids; -1 is no expert, and a repeated id counts each
                time.
            num_local_tokens_per_expert: `[num_experts]`, this rank's histogram of the ids, where the caller has it: a
                cross-check under `exact` (of its shape alone on a GPU), ignored otherwise.
            num_tokens_per_rank: this call's bound on T, the same on every rank. Left out, the group agrees by itself
                under `exact`; the sync-free capacities take T where `equal_token_counts=True` declares it to be
                everyone's, and else `num_max_tokens_per_rank`.

        Raises:
            InvalidInput: before any communication.
            CapacityOverflow: an earlier dispatch has dropped rows, under `on_overflow="raise"`.
            ContractViolation, PeerTimeout: ranks that differ, or are missing.
        """
        check_before_casting(self._open.config, x, topk_scores, topk_expert_ids, num_tokens_per_rank)
        # A copy in any case: the handle outlives what the caller does to its tensor.
        scores = topk_scores.clone() if topk_scores.dtype == torch.float32 else topk_scores.to(torch.float32)
        bound = -1 if num_tokens_per_rank is None else num_tokens_per_rank
        count_dispatch(self._open.key, self)
        rows, row_scores, counts, offsets, number, rows_end, *layout = autograd.call_dispatch(
            x,
            scores,
            topk_expert_ids,
            num_local_tokens_per_expert,
            self._anchor(),
            self._open.key,
            self._encoded_name,
            bound,
        )
        handle = DispatchHandle(
            encoded_layer=self._encoded_name,
            num_tokens=x.shape[0],
            num_rows=rows.shape[0],
            topk_scores=scores,
            row_scores=(row_scores.detach() if row_scores.requires_grad else row_scores).clone(),
            rows_end=rows_end,
            dispatch_number=number,
            dispatcher_key=self._open.key,
            layout=tuple(layout),
        )
        return Dispatched(rows=rows, tokens_per_expert=counts, expert_offsets=offsets, scores=row_scores, handle=handle)

    def combine(self, rows: Tensor, handle: DispatchHandle, *, apply_scores: bool = True) -> Tensor:
        """Bring the experts' rows home: `[T, hidden_dim]`, every token's rows added up in the order of its slots.

        Args:
            rows: `[R, hidden_dim]`, in the order in which they were dispatched.
            handle: of that dispatch; may be combined again, and in any order with others.
            apply_scores: multiply every row by its slot's score; False where the experts did.

        Raises:
            InvalidInput: before any communication.
            ContractViolation, PeerTimeout: ranks that differ, or are missing.
        """
        check_combine(self._open.config, self._open.key, rows, handle, apply_scores)
        out = autograd.call_combine(
            rows,
            handle.topk_scores,
            handle.row_scores,
            handle.rows_end,
            handle.dispatch_number,
            handle.layout,
            self._anchor(),
            self._open.key,
            self._encoded_name,
            apply_scores,
        )
        if not torch.compiler.is_compiling() and out.grad_fn is not None:
            self._open.note_combined(handle, out.grad_fn)
        return out

    def join_backward(self, handle: DispatchHandle) -> None:
        """Take part in the backward of a combine whose output this rank's loss leaves out, with a gradient of zero.

        Call it where the other ranks call `backward()`. The experts of this rank get the gradients of the other ranks'
        tokens, as they would in a backward of its own. It is the whole backward of that output: where this rank has a
        loss over the same graph, add `0 * out.sum()` to that loss instead.

        Raises:
            ContractViolation: the handle was not combined in grad mode here, or its backward has already run.
        """
        nodes = self._open.take_combined(handle)
        if not nodes:
            raise ContractViolation(
                f"join_backward found no backward left for this handle (layer {handle.layer!r}): it was not combined in"
                " grad mode, its output was dropped with its graph, or it was compiled (then add 0 * out.sum() to the"
                " loss)"
            )
        config = self._open.config
        zero = handle.row_scores.new_zeros((handle.num_tokens, config.hidden_dim), dtype=config.dtype)
        _backward_from(nodes, zero)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerView:
        """A copied model shares the dispatcher."""
        return self

    def __reduce__(self) -> Any:
        raise ContractViolation(f"{self!r} cannot be pickled: its dispatcher is open in this process alone")

    def __repr__(self) -> str:
        return f"LayerView({self.name!r} of {self._dispatcher!r})"

    def _anchor(self) -> Tensor | None:
        return self._open.anchor if torch.is_grad_enabled() else None


def _backward_from(nodes: list[Any], grad: Tensor) -> None:
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in nodes]
    try:
        torch.autograd.backward(edges, [grad] * len(edges))
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ContractViolation("join_backward came late: the backward of this combine has already run here") from error
