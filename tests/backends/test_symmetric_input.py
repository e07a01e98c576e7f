"""Input buffers: views of them are dispatched like any tensor, and their producer may write again once that is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import crossdock as cd
from crossdock import recompute
from crossdock.testing import LoopbackGroup, run_ranks
from tests.conftest import Ranks
from tests.gpus import host_sync_is_an_error, on_gpus

pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")

from crossdock.kernels import move
from tests.backends.test_symmetric_fused import as_on_a_gpu

TOP_K, HIDDEN, EXPERTS, MAX_TOKENS = 2, 8, 4, 24
WORST_CASE = cd.RowCapacity.worst_case()
OVERWRITTEN = "modified by an inplace operation"
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def config(**changes: Any) -> cd.DispatcherConfig:
    settings: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_dim": HIDDEN,
        "dtype": torch.float32,
        "num_max_tokens_per_rank": MAX_TOKENS,
        "timeout_s": 20.0,
    }
    return cd.DispatcherConfig(**(settings | changes))


def opened(**changes: Any) -> cd.TokenDispatcher:
    return cd.TokenDispatcher(config(**changes), backend="symmetric")


def inputs(rank: int, num_tokens: int, hidden_dim: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(100 * num_tokens + rank)
    x = torch.randn(num_tokens, hidden_dim, generator=generator).to(dtype)
    scores = torch.rand(num_tokens, TOP_K, generator=generator)
    return x, scores, torch.randint(-1, EXPERTS, (num_tokens, TOP_K), generator=generator)


def filled(dispatcher: cd.TokenDispatcher, x: torch.Tensor) -> torch.Tensor:
    """`x` in an input buffer; in grad mode its gradient goes through."""
    return dispatcher.input_buffer(x.shape[0]).copy_(x)


def spoil(dispatcher: cd.TokenDispatcher) -> None:
    """Overwrite the whole buffer, as its producer may."""
    dispatcher.input_buffer(dispatcher.config.num_max_tokens_per_rank).fill_(float("nan"))


def said(act: Callable[[], Any]) -> str:
    """What an act raises; "nothing" where it does not."""
    try:
        act()
    except (cd.CrossdockError, RuntimeError) as error:
        return str(error)
    return "nothing"


# -- what is dispatched -----------------------------------------------------------------------------------------------


def _train(
    dispatcher: cd.TokenDispatcher, given: Inputs, *, fills: bool, recomputes: bool = False
) -> list[torch.Tensor]:
    """Output and gradients of two layers, whose inputs lie in the same buffer where it `fills` one."""
    x, scores = given[0].clone().requires_grad_(), given[1].clone().requires_grad_()

    def layer(given_rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = given_rows * 3
        routed = dispatcher.dispatch(filled(dispatcher, rows) if fills else rows, scores, given[2])
        if fills:
            spoil(dispatcher)
        return dispatcher.combine(routed.rows * 2, routed.handle)

    out: Any = x
    for _ in range(2):
        out = recompute.checkpoint(layer, out, scores) if recomputes else layer(out, scores)
    weights = torch.arange(x.shape[1], device=x.device)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), (x, scores))]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _both(rank: int, settings: dict[str, Any], fused: bool, recomputes: bool) -> list[bool]:
    """Whether layers that fill a buffer, on all ranks and on one alone, bring what others do.

    `fused`: by kernels that wait and tell by themselves, as on a GPU.
    """
    same = []
    with as_on_a_gpu() if fused else nullcontext(), opened(**settings) as dispatcher:
        made = dispatcher.config
        for number, fills in ((18, True), (7 * rank, rank == 1)):
            given = inputs(rank, number, made.hidden_dim, made.dtype)
            expected = _train(dispatcher, given, fills=False)
            same.append(_equal(_train(dispatcher, given, fills=fills, recomputes=recomputes), expected))
    return same


_HALF = {"dtype": torch.bfloat16}
_SMALL: dict[str, Any] = {"row_capacity": WORST_CASE}
_GENERAL = _SMALL | {"hidden_dim": 12} | _HALF  # which the kernels for small batches do not take


@pytest.mark.parametrize(
    ("settings", "fused", "recomputes"),
    [
        ({"expert_alignment": 4}, False, False),
        (_SMALL, False, True),
        (_GENERAL, True, False),
        pytest.param(_HALF | {"reduction": "exact"}, False, True, marks=pytest.mark.full),
    ],
    ids=["aligned", "small-recomputed", "fused", "exact-recomputed"],
)
def test_layers_that_share_the_buffer_bring_the_same_bits(
    ranks: Ranks, settings: dict[str, Any], fused: bool, recomputes: bool
):
    assert ranks(2).run(_both, settings, fused, recomputes) == [[True, True]] * 2


def _parts(rank: int, settings: dict[str, Any]) -> list[bool]:
    """Whether views and parts of them bring what copies bring: all at once, again, and after other calls."""
    with opened(**settings) as dispatcher, torch.inference_mode():
        made, same = dispatcher.config, []
        x, scores, ids = inputs(rank, MAX_TOKENS, made.hidden_dim, made.dtype)
        view = filled(dispatcher, x)
        parts = (slice(0, MAX_TOKENS), slice(0, 9), slice(5, 12), slice(1, MAX_TOKENS, 3), slice(4, 4))
        for again in (parts, parts[1:3]):
            routed = [dispatcher.dispatch(view[part], scores[part], ids[part]) for part in again]
            for part, of_view in zip(again, routed, strict=True):
                of_copy = dispatcher.dispatch(x[part].clone(), scores[part], ids[part])
                end = int(of_copy.expert_offsets[-1])
                same.append(torch.equal(of_view.rows[:end], of_copy.rows[:end]))
                out = dispatcher.combine(of_view.rows * 2, of_view.handle)
                same.append(torch.equal(out, dispatcher.combine(of_copy.rows * 2, of_copy.handle)))
        return [*same, torch.equal(view, x)]


@pytest.mark.parametrize("settings", [{}, _SMALL, _GENERAL], ids=["exact", "small", "general"])
def test_views_and_parts_of_them_are_dispatched_as_often_as_one_likes(ranks: Ranks, settings: dict[str, Any]):
    assert ranks(2).run(_parts, settings) == [[True] * 15] * 2


def _pushed_from(rank: int) -> list[str]:
    """Where rows were pushed from: a view of the buffer first, then an ordinary tensor."""
    x, scores, ids = inputs(rank, 9)
    addresses: list[int] = []
    original = move.Moves.__new__

    def noting(cls: Any, x: torch.Tensor, *args: Any, **named: Any) -> Any:
        addresses.append(x.data_ptr())
        return original(cls, x, *args, **named)

    with pytest.MonkeyPatch.context() as monkeypatch, opened() as dispatcher, torch.no_grad():
        monkeypatch.setattr(move.Moves, "__new__", noting)
        names = {dispatcher.input_buffer(1).data_ptr(): "the buffer", x.data_ptr(): "x"}
        dispatcher.dispatch(filled(dispatcher, x), scores, ids)
        dispatcher.dispatch(x, scores, ids)
    return [names.get(address, "elsewhere") for address in addresses]


def test_nothing_is_copied_and_the_address_stays(ranks: Ranks):
    assert ranks(2).run(_pushed_from) == [["the buffer", "x"]] * 2


# -- autograd and compilers -------------------------------------------------------------------------------------------

Bring = Callable[[torch.Tensor], torch.Tensor]
# What autograd has saved, where a `Bring` has put it; what was made of it; what needs it for its gradient.
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _by_a_router(dispatcher: cd.TokenDispatcher, given: Inputs, bring: Bring) -> Saved:
    x, weight = bring(given[0]), torch.ones(HIDDEN, HIDDEN, requires_grad=True)
    return x, x @ weight, weight


def _by_a_combine(dispatcher: cd.TokenDispatcher, given: Inputs, bring: Bring) -> Saved:
    x, scores, ids = given[0], given[1].clone().requires_grad_(), given[2]
    routed = dispatcher.dispatch(x, scores, ids)
    rows = bring(routed.rows.detach() * 2)
    return rows, dispatcher.combine(rows, routed.handle), scores


def _by_an_operator(dispatcher: cd.TokenDispatcher, given: Inputs, bring: Bring) -> Saved:
    with torch.device("cpu"):  # a mode; without one no operator is called
        return _by_a_combine(dispatcher, given, bring)


def _by_a_checkpoint(dispatcher: cd.TokenDispatcher, given: Inputs, bring: Bring) -> Saved:
    leaf, scores, ids = given[0].clone().requires_grad_(), *given[1:]

    def region(x: torch.Tensor) -> torch.Tensor:
        routed = dispatcher.dispatch(x, scores, ids)
        return dispatcher.combine(routed.rows.square(), routed.handle)

    x = bring(leaf)
    out: Any = recompute.checkpoint(region, x)
    return x, out, leaf


def _after(rank: int, save: Callable[..., Saved]) -> list[str]:
    """What a backward says, or is, after other rows were dispatched, a view was asked for, and one was written to."""
    given, told = inputs(rank, 5), []
    happenings: tuple[Callable[[cd.TokenDispatcher, torch.Tensor], Any], ...] = (
        lambda dispatcher, view: dispatcher.dispatch(*given),
        lambda dispatcher, view: dispatcher.input_buffer(1),
        lambda dispatcher, view: view.detach().zero_(),
    )
    with opened() as dispatcher:
        _, out, needing = save(dispatcher, given, torch.clone)
        (expected,) = torch.autograd.grad(out.sum(), needing)
        for happen in happenings:
            view, out, needing = save(dispatcher, given, partial(filled, dispatcher))
            happen(dispatcher, view)
            try:
                (grad,) = torch.autograd.grad(out.sum(), needing)
                told.append("right" if torch.equal(grad, expected) else "wrong")
            except RuntimeError as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("save", [_by_a_router, _by_a_combine, _by_an_operator, _by_a_checkpoint])
def test_what_autograd_has_saved_of_it_is_never_silently_something_else(ranks: Ranks, save: Callable[..., Saved]):
    for dispatched, asked, written in ranks(2).run(_after, save):
        assert dispatched == "right"
        assert OVERWRITTEN in asked and OVERWRITTEN in written


def _compiled(rank: int) -> tuple[list[bool], str]:
    x, scores, ids = inputs(rank, 6)
    with opened(row_capacity=WORST_CASE) as dispatcher, torch.no_grad():

        def there_and_back(given: torch.Tensor) -> torch.Tensor:
            routed = dispatcher.dispatch(given, scores, ids)
            return dispatcher.combine(routed.rows, routed.handle)

        def fill(view: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return there_and_back(view.copy_(given))

        compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
        expected = there_and_back(x)
        same = [torch.equal(expected, compiled(there_and_back)(filled(dispatcher, x)))]
        spoil(dispatcher)
        view = dispatcher.input_buffer(6)
        same += [torch.equal(expected, compiled(fill)(view, x)), torch.equal(view, x)]
        return same, said(lambda: torch.compile(dispatcher.input_buffer, backend="aot_eager")(6))


def test_a_compiled_region_dispatches_a_view_and_fills_it_and_cannot_ask_for_one(ranks: Ranks):
    for same, message in ranks(2).run(_compiled, timeout_s=100.0):
        assert all(same)
        assert message == "input_buffer cannot be called inside a compiled region: call it outside"


# -- who may ask ------------------------------------------------------------------------------------------------------


def _numbers(rank: int) -> list[str]:
    with opened() as dispatcher:
        assert dispatcher.input_buffer(24).shape == (24, HIDDEN) and dispatcher.input_buffer(0).shape == (0, HIDDEN)
        wrong: tuple[Any, ...] = (25, -1, 2.0, True, None)
        return [said(partial(dispatcher.input_buffer, number)) for number in wrong]


def test_a_number_that_cannot_be_is_refused(ranks: Ranks):
    bounds = "of an input buffer must lie in 0..num_max_tokens_per_rank (24)"
    kinds = [f"num_tokens of an input buffer must be an integer, got {value}" for value in ("2.0", "True", "None")]
    for told in ranks(2).run(_numbers):
        assert told == [f"num_tokens (25) {bounds}", f"num_tokens (-1) {bounds}", *kinds]


def _offered(rank: int) -> str:
    with cd.TokenDispatcher(config(), backend="all_to_all") as dispatcher:
        return said(lambda: dispatcher.input_buffer(3))


def test_other_backends_offer_none(ranks: Ranks):
    told = {"all_to_all": ranks(2).run(_offered)[0]}
    with cd.TokenDispatcher(config(), backend="local") as alone:
        told["local"] = said(lambda: alone.input_buffer(3))
    with cd.TokenDispatcher(config(), LoopbackGroup(1).member(0), backend="loopback") as member:
        told["loopback"] = said(lambda: member.input_buffer(3))
    for name, message in told.items():
        sentence = f"backend {name!r} offers no input_buffer: it keeps no buffer for x; dispatch an ordinary tensor"
        assert message == sentence


def _strangers(rank: int) -> list[str]:
    """What is said to a second thread, to a forked child, and once the dispatcher is closed."""
    told = []
    with opened() as dispatcher:
        transport: Any = dispatcher._open.transport
        dispatch, ask = transport.dispatch, lambda: dispatcher.input_buffer(3)

        def asking(*args: Any) -> Any:
            told.append(said(ask))  # as another thread would while this one is inside
            return dispatch(*args)

        transport.dispatch = asking
        dispatcher.layer("moe").dispatch(*inputs(rank, 4))
        told.append(_from_a_fork(ask))
        del transport.dispatch
        dispatcher.dispatch(*inputs(rank, 4))
    return [*told, said(ask)]


def _from_a_fork(act: Callable[[], Any]) -> str:
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writes, said(act).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_others_than_the_dispatcher_s_own_thread_are_refused(ranks: Ranks):
    for thread, child, closed in ranks(2).run(_strangers):
        assert thread.startswith("input_buffer was entered from a second thread while dispatch of layer 'moe' (call 0)")
        assert "a forked child" in child and "cannot use it" in child
        assert closed == "this dispatcher is closed"


# -- on GPUs ----------------------------------------------------------------------------------------------------------


def _gpu_config(max_tokens: int) -> cd.DispatcherConfig:
    return config(
        num_experts=16,
        top_k=TOP_K,
        hidden_dim=256,
        dtype=torch.bfloat16,
        num_max_tokens_per_rank=max_tokens,
        row_capacity=WORST_CASE,
    )


def _gpu_inputs(rank: int, seed: int, num_tokens: int) -> Inputs:
    generator = torch.Generator(device="cuda").manual_seed(100 * seed + rank)
    x = torch.randn(num_tokens, 256, device="cuda", generator=generator).bfloat16()
    scores = torch.rand(num_tokens, TOP_K, device="cuda", generator=generator)
    return x, scores, torch.randint(-1, 16, (num_tokens, TOP_K), device="cuda", generator=generator)


def _on_a_gpu(rank: int, max_tokens: int) -> list[str]:
    """What went wrong, in words: in bits, in waits of the host, between streams, in a graph that is replayed."""
    dispatcher = cd.TokenDispatcher(_gpu_config(max_tokens), backend="symmetric", device="cuda")
    wrong = []
    for seed, num_tokens in enumerate((max_tokens, 1, 70 + rank, 40)):
        given = _gpu_inputs(rank, seed, num_tokens)
        expected = _train(dispatcher, given, fills=False)
        if not all(_equal(_train(dispatcher, given, fills=True), expected) for _ in range(2)):
            wrong.append(f"{num_tokens} tokens differ")
    wrong += _behind_a_device_that_is_busy(dispatcher, _gpu_inputs(rank, 9, 64))
    with torch.no_grad():
        wrong += _in_a_graph(dispatcher, rank)
    dispatcher.check()
    dispatcher.close(graphs_destroyed=True)
    return wrong


def _behind_a_device_that_is_busy(dispatcher: cd.TokenDispatcher, given: Inputs) -> list[str]:
    """The host runs ahead; and a dispatch, another stream that fills the buffer, and a dispatch again take turns."""
    wrong, other, (x, scores, ids) = [], torch.cuda.Stream(), given

    def home(routed: cd.Dispatched) -> torch.Tensor:
        return dispatcher.combine(routed.rows, routed.handle)

    expected = _train(dispatcher, given, fills=False)
    expected += [home(dispatcher.dispatch(rows, scores, ids)) for rows in (x * 2, x)]
    torch.cuda.synchronize()
    with host_sync_is_an_error():
        torch.cuda._sleep(200_000_000)
        begun = time.perf_counter()
        found = _train(dispatcher, given, fills=True)
        first = dispatcher.dispatch(filled(dispatcher, x * 2), scores, ids)
        with torch.cuda.stream(other):
            view = filled(dispatcher, x)
        second = dispatcher.dispatch(view, scores, ids)
        found += [home(first), home(second)]
        if time.perf_counter() - begun > 0.05:
            wrong.append("the host waited")
    torch.cuda.synchronize()
    if not _equal(found, expected):
        wrong.append("what was filled behind a busy device differs")
    return wrong


def _in_a_graph(dispatcher: cd.TokenDispatcher, rank: int) -> list[str]:
    """A graph that fills the buffer itself, at the address that it always has."""
    wrong, held = [], _gpu_inputs(rank, 10, 64)

    def pair() -> torch.Tensor:
        routed = dispatcher.dispatch(torch.mul(held[0], 2, out=dispatcher.input_buffer(64)), *held[1:])
        return dispatcher.combine(routed.rows, routed.handle)

    address = dispatcher.input_buffer(64).data_ptr()
    for _ in range(2):
        pair()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pair()
    for seed in range(11, 15):
        for tensor, value in zip(held, _gpu_inputs(rank, seed, 64), strict=True):
            tensor.copy_(value)
        graph.replay()
        spoil(dispatcher)
        graph.replay()
        routed = dispatcher.dispatch(held[0] * 2, *held[1:])
        if not torch.equal(captured, dispatcher.combine(routed.rows, routed.handle)):
            wrong.append(f"replay of {seed} differs")
    if dispatcher.input_buffer(64).data_ptr() != address:
        wrong.append("the address has changed")
    return wrong


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(1, 640), (2, 640), (2, 128)], ids=["alone", "", "small"])
def test_on_gpus_bits_are_the_same_no_host_waits_and_graphs_fill_it_too(num_ranks: int, max_tokens: int):
    assert run_ranks(_on_a_gpu, num_ranks, max_tokens, **on_gpus(num_ranks), timeout_s=120.0) == [[]] * num_ranks
