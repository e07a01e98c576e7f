"""Input buffers: the same bits without a copy, never what was overwritten, never before everyone has read."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

from crossdock.kernels import arrange, publish, pull
from crossdock.kernels.signal import launch_tell
from tests.backends.test_symmetric_fused import as_on_a_gpu

TOP_K, HIDDEN, EXPERTS = 2, 8, 4
WORST_CASE = cd.RowCapacity.worst_case()
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def config(**changes: Any) -> cd.DispatcherConfig:
    settings: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_dim": HIDDEN,
        "dtype": torch.float32,
        "num_max_tokens_per_rank": 24,
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


def lent(dispatcher: cd.TokenDispatcher, x: torch.Tensor) -> torch.Tensor:
    """`x` in an input buffer; in grad mode its gradient goes through."""
    return dispatcher.input_buffer(x.shape[0]).copy_(x)


def refused(act: Callable[[], Any]) -> str:
    """What an `InvalidInput` says."""
    try:
        act()
    except cd.InvalidInput as error:
        return str(error)
    return "taken"


# -- the same bits ----------------------------------------------------------------------------------------------------


def _step(dispatcher: cd.TokenDispatcher, given: Inputs, *, lends: bool) -> list[torch.Tensor]:
    """Rows up to the last offset, their scores, counts, output, and both gradients."""
    x, scores = given[0].clone().requires_grad_(), given[1].clone().requires_grad_()
    routed = dispatcher.dispatch(lent(dispatcher, x) if lends else x, scores, given[2])
    out = dispatcher.combine(routed.rows * 2, routed.handle)
    grads = torch.autograd.grad((out.float() * torch.arange(out.shape[1])).sum(), (x, scores))
    end = int(routed.expert_offsets[-1])
    return [part.detach() for part in (routed.rows[:end], routed.scores[:end], routed.tokens_per_expert, out, *grads)]


def _both(rank: int, settings: dict[str, Any], fused: bool) -> tuple[list[bool], bool]:
    """Whether every result of steps that lend is that of steps that do not; and whether both count the same.

    `fused`: by kernels that wait and tell by themselves, as on a GPU.
    """
    counts = (24, 7 * rank) if fused else (24, 1, 7 * rank)
    found, sent = [], []
    for lends in (False, True):
        with as_on_a_gpu() if fused else nullcontext(), opened(**settings) as dispatcher:
            made = dispatcher.config
            steps = [
                _step(dispatcher, inputs(rank, number, made.hidden_dim, made.dtype), lends=lends) for number in counts
            ]
            stats = dispatcher.stats()
        found.append([part for step in steps for part in step])
        sent.append((stats.sent_bytes, stats.sent_rows_bytes, stats.host_syncs, stats.calls))
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)], sent[0] == sent[1]


_HALF = {"dtype": torch.bfloat16}
_SMALL: dict[str, Any] = {"row_capacity": WORST_CASE}
_GENERAL = _SMALL | {"hidden_dim": 12}  # which the kernels for small batches do not take
in_full = partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("settings", "fused"),
    [
        ({"expert_alignment": 4}, False),
        in_full(_SMALL | _HALF, False),
        (_GENERAL, False),
        (_GENERAL | _HALF, True),
        in_full(_HALF | {"reduction": "exact"}, False),
        in_full(_HALF | {"reduction": "exact"}, True),
        in_full(_SMALL | {"expert_alignment": 4}, False),
        in_full(_GENERAL | _HALF | {"reduction": "exact"}, False),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "fused" if value else "",
)
def test_the_bits_and_the_bytes_are_those_of_an_ordinary_x(ranks: Ranks, settings: dict[str, Any], fused: bool):
    for same, counts_alike in ranks(2).run(_both, settings, fused):
        assert all(same) and counts_alike, same


def test_one_rank_alone_may_lend(ranks: Ranks):
    assert ranks(2).run(_one_lends) == [True, True]


def _one_lends(rank: int) -> bool:
    given, found = inputs(rank, 9), []
    with opened() as dispatcher:
        for lends in (False, rank == 1):
            found.append(_step(dispatcher, given, lends=lends))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _equally_many(rank: int) -> bool:
    """Capacities that depend on the call, and the calibrating dispatch with its round of its own."""
    same = []
    for capacity in (cd.RowCapacity.calibrated(2.0), cd.RowCapacity.balanced(4.0)):
        with opened(row_capacity=capacity, equal_token_counts=True, hidden_dim=12, on_overflow="drop") as dispatcher:
            for number in (11, 5):
                given = inputs(rank, number, 12)
                found = [_step(dispatcher, given, lends=lends) for lends in (True, False)]
                same += [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    return all(same)


def test_the_bits_are_the_same_under_other_capacities(ranks: Ranks):
    assert ranks(2).run(_equally_many) == [True, True]


# -- without a copy ---------------------------------------------------------------------------------------------------


@contextmanager
def _copied() -> Iterator[list[int]]:
    """Of how many tokens every launch that lays out rows is told."""
    tokens: list[int] = []

    def noting(launch: Callable[..., None]) -> Callable[..., None]:
        def launching(kernel: Any, grid: Any, device: Any, *args: Any, **options: Any) -> None:
            given = dict(zip(inspect.signature(kernel).parameters, args, strict=False))
            if kernel is publish.publish_rows_kernel or options.get("COPIES"):
                tokens.append((given["tokens"] - 3) // 2)
            launch(kernel, grid, device, *args, **options)

        return launching

    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (publish, arrange):
            monkeypatch.setattr(module, "launch", noting(module.launch))
        yield tokens


def _copies(rank: int, fused: bool) -> tuple[list[int], bool, int]:
    """What a lent and an ordinary dispatch copied; whether rows were read from where they were written; the address."""
    x, scores, ids = inputs(rank, 9)
    with as_on_a_gpu() if fused else nullcontext(), opened() as dispatcher, torch.no_grad(), _copied() as copied:
        first, second = dispatcher.input_buffer(9), dispatcher.input_buffer(9)
        routed = dispatcher.dispatch(second.copy_(x), scores, ids)
        dispatcher.dispatch(x, scores, ids)
        there = torch.equal(first, x) and len(routed.rows) > 0
        return copied, there, first.data_ptr() - second.data_ptr()


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_copied_and_the_address_stays(ranks: Ranks, fused: bool):
    assert ranks(2).run(_copies, fused) == [([0, 9], True, 0)] * 2


# -- what was overwritten is refused ----------------------------------------------------------------------------------

DISPATCHED, OTHER = "has been dispatched or overwritten since it was lent", "is not the view of 5 tokens that was lent"


def _stale(rank: int) -> list[tuple[str, str]]:
    """What was expected, and what came."""
    x, scores, ids = inputs(rank, 5)
    told: list[tuple[str, str]] = []
    with opened() as dispatcher:

        def again(view: torch.Tensor, expected: str) -> None:
            number = view.shape[0]
            told.append((expected, refused(lambda: dispatcher.dispatch(view, scores[:number], ids[:number]))))

        with torch.no_grad():
            view = lent(dispatcher, x)
            dispatcher.dispatch(view, scores, ids)
            again(view, DISPATCHED)
            view = lent(dispatcher, x)
            dispatcher.dispatch(x, scores, ids)
            again(view, DISPATCHED)
            again(view[1:], DISPATCHED)
            if rank == 0:  # its peers go on
                again(dispatcher.input_buffer(5)[:4], OTHER)
                again(dispatcher.input_buffer(5)[1:], OTHER)
        routed = dispatcher.dispatch(x.clone().requires_grad_(), scores, ids)
        out = dispatcher.combine(routed.rows, routed.handle)
        view = lent(dispatcher, x)
        out.sum().backward()
        again(view, DISPATCHED)
        with torch.no_grad():
            early, late = lent(dispatcher, x[:3]), lent(dispatcher, x)
            again(early, OTHER)
            same = torch.equal(dispatcher.dispatch(late, scores, ids).rows, dispatcher.dispatch(x, scores, ids).rows)
        told.append(("the same", "the same" if same else "other rows"))
    return told


def test_a_view_that_was_overwritten_is_refused_and_the_next_call_works(ranks: Ranks):
    told = ranks(2).run(_stale)
    assert [len(of_rank) for of_rank in told] == [8, 6]
    for expected, came in (pair for of_rank in told for pair in of_rank):
        assert expected in came


def _saved(rank: int) -> list[str]:
    """What a backward says for which autograd has saved a lent view: one that was overwritten, and one that was not."""
    x, scores, ids = inputs(rank, 5)
    weight, told = torch.ones(HIDDEN, HIDDEN, requires_grad=True), []
    with opened() as dispatcher:
        again = partial(dispatcher.input_buffer, 1)
        for overwrite in (partial(dispatcher.dispatch, x, scores, ids), again, lambda: None):
            view = lent(dispatcher, x)
            product = view @ weight
            overwrite()
            try:
                (grad,) = torch.autograd.grad(product.sum(), weight)
                told.append("right" if torch.allclose(grad, x.sum(0)[:, None].expand(HIDDEN, HIDDEN)) else "wrong")
            except RuntimeError as error:
                told.append(str(error))
    return told


def test_what_autograd_has_saved_of_it_is_never_silently_something_else(ranks: Ranks):
    for *overwritten, kept in ranks(2).run(_saved):
        assert all("modified by an inplace operation" in message for message in overwritten), overwritten
        assert kept == "right"


# -- autograd, recomputation, compilers -------------------------------------------------------------------------------


def _as_a_leaf(rank: int) -> list[bool]:
    x, scores, ids = inputs(rank, 6)
    with opened() as dispatcher:
        found = []
        for lends in (False, True):
            leaf = (lent(dispatcher, x) if lends else x.clone()).requires_grad_()
            routed = dispatcher.dispatch(leaf, scores, ids)
            dispatcher.combine(routed.rows * 3, routed.handle).sum().backward()
            assert leaf.grad is not None
            found.append(leaf.grad)
        with torch.inference_mode():
            plain = dispatcher.dispatch(x, scores, ids).rows
            in_buffer = dispatcher.dispatch(lent(dispatcher, x), scores, ids).rows
        return [torch.equal(*found), torch.equal(plain, in_buffer)]


def test_a_leaf_gets_its_gradient_and_inference_mode_will_do(ranks: Ranks):
    assert ranks(2).run(_as_a_leaf) == [[True, True]] * 2


def _combined(rank: int) -> tuple[str, bool]:
    """The buffer as the experts' output: what grad mode says, and whether it is right without."""
    with opened(row_capacity=cd.RowCapacity.exact()) as dispatcher:
        x, scores, ids = inputs(rank, 3)
        routed = dispatcher.dispatch(x, scores, ids)
        buffer = dispatcher.input_buffer(min(routed.rows.shape[0], dispatcher.config.num_max_tokens_per_rank))
        rows = buffer.copy_(routed.rows.detach()[: buffer.shape[0]])
        if rows.shape != routed.rows.shape:
            raise AssertionError("the buffer is too small for this test")
        message = refused(lambda: dispatcher.combine(rows, routed.handle))
        with torch.no_grad():
            routed = dispatcher.dispatch(x, scores, ids)
            same = dispatcher.input_buffer(routed.rows.shape[0]).copy_(routed.rows)
            out = dispatcher.combine(same, routed.handle)
            return message, torch.equal(out, dispatcher.combine(routed.rows, routed.handle))


def test_the_experts_output_may_not_lie_in_it_in_grad_mode(ranks: Ranks):
    for message, same in ranks(2).run(_combined):
        assert "rows lie in an input buffer" in message
        assert same


def _as_a_gradient(rank: int) -> list[bool]:
    """Nobody need do so, and right it is all the same: a whole view, and parts of one that a copy would overwrite."""
    x, scores, ids = inputs(rank, 6)
    grad, same = torch.arange(6.0 * HIDDEN).view(6, HIDDEN), []
    with opened() as dispatcher:
        buffer = dispatcher.input_buffer(24)
        for place in (buffer[:6], buffer[2:8], buffer[:12:2]):
            leaf, found = x.clone().requires_grad_(), []
            for given in (grad, place.copy_(grad)):
                routed = dispatcher.dispatch(leaf, scores, ids)
                out = dispatcher.combine(routed.rows, routed.handle)
                place.copy_(grad)
                found.append(torch.autograd.grad(out, leaf, given)[0])
            same.append(torch.equal(*found))
    return same


def test_a_gradient_may_lie_in_it(ranks: Ranks):
    assert ranks(2).run(_as_a_gradient) == [[True] * 3] * 2


def _recomputed(rank: int) -> tuple[list[bool], str]:
    x, scores, ids = inputs(rank, 6)
    with opened() as dispatcher:

        def block(given: torch.Tensor, lends: bool) -> torch.Tensor:
            rows = given * 3
            routed = dispatcher.dispatch(lent(dispatcher, rows) if lends else rows, scores, ids)
            return dispatcher.combine(routed.rows, routed.handle)

        found = []
        for lends in (False, True):
            leaf = x.clone().requires_grad_()
            out: Any = leaf
            for _ in range(2):
                out = recompute.checkpoint(block, out, lends)
            out.sum().backward()
            assert leaf.grad is not None
            found.append((out.detach(), leaf.grad))

        def late(given: torch.Tensor) -> torch.Tensor:
            routed = dispatcher.dispatch(given, scores, ids)
            return dispatcher.combine(routed.rows, routed.handle)

        out = recompute.checkpoint(late, lent(dispatcher, x.clone().requires_grad_()))
        dispatcher.input_buffer(2)
        try:
            out.sum().backward()
            message = "recomputed"
        except RuntimeError as error:
            message = str(error)
        return [torch.equal(*pair) for pair in zip(*found, strict=True)], message


def test_a_region_that_lends_is_recomputed_and_one_that_was_given_the_view_is_refused(ranks: Ranks):
    for same, message in ranks(2).run(_recomputed):
        assert all(same)
        assert "modified by an inplace operation" in message


def _compiled(rank: int) -> tuple[bool, list[str]]:
    x, scores, ids = inputs(rank, 6)
    with opened(row_capacity=WORST_CASE, hidden_dim=HIDDEN) as dispatcher, torch.no_grad():

        def there_and_back(given: torch.Tensor) -> torch.Tensor:
            routed = dispatcher.dispatch(given, scores, ids)
            return dispatcher.combine(routed.rows, routed.handle)

        def fill(view: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return there_and_back(view.copy_(given))

        expected = there_and_back(x)
        compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)(lent(dispatcher, x))
        view = dispatcher.input_buffer(6)
        filled = refused(lambda: torch.compile(fill, backend="aot_eager", fullgraph=True)(view, x))
        try:
            torch.compile(dispatcher.input_buffer, backend="aot_eager")(6)
            message = "taken"
        except cd.ContractViolation as error:
            message = str(error)
        return torch.equal(expected, compiled), [filled, message]


def test_a_compiled_region_dispatches_a_view_and_neither_fills_nor_lends_one(ranks: Ranks):
    for same, (filled, lent_inside) in ranks(2).run(_compiled, timeout_s=100.0):
        assert same
        assert "an input buffer of 6 tokens is lent, and a compiled dispatch brings other rows" in filled
        assert lent_inside == "input_buffer cannot be called inside a compiled region: lend and fill it outside"


# -- who may lend -----------------------------------------------------------------------------------------------------


def _numbers(rank: int) -> list[str]:
    with opened() as dispatcher:
        assert dispatcher.input_buffer(24).shape == (24, HIDDEN) and dispatcher.input_buffer(0).shape == (0, HIDDEN)
        wrong: tuple[Any, ...] = (25, -1, 2.0, True, None)
        return [refused(partial(dispatcher.input_buffer, number)) for number in wrong]


def test_a_number_that_cannot_be_is_refused(ranks: Ranks):
    bounds = "of an input buffer must lie in 0..num_max_tokens_per_rank (24)"
    kinds = [f"num_tokens of an input buffer must be an integer, got {value}" for value in ("2.0", "True", "None")]
    for told in ranks(2).run(_numbers):
        assert told == [f"num_tokens (25) {bounds}", f"num_tokens (-1) {bounds}", *kinds]


def _offered(rank: int) -> str:
    with cd.TokenDispatcher(config(), backend="all_to_all") as dispatcher:
        return _asked(dispatcher)


def _asked(dispatcher: cd.TokenDispatcher) -> str:
    try:
        dispatcher.input_buffer(3)
    except cd.BackendUnavailable as error:
        return str(error)
    return "lent"


def test_other_backends_offer_none(ranks: Ranks):
    told = {"all_to_all": ranks(2).run(_offered)[0]}
    with cd.TokenDispatcher(config(), backend="local") as alone:
        told["local"] = _asked(alone)
    with cd.TokenDispatcher(config(), LoopbackGroup(1).member(0), backend="loopback") as member:
        told["loopback"] = _asked(member)
    for name, message in told.items():
        assert message.startswith(f"backend {name!r} is not available here: input_buffer is not offered; dispatch an")


def _strangers(rank: int) -> list[str]:
    """What is said to a second thread, to a forked child, and once the dispatcher is closed."""
    told, (x, scores, ids) = [], inputs(rank, 4)

    def ask() -> None:
        try:
            dispatcher.input_buffer(3)
            told.append("lent")
        except cd.ContractViolation as error:
            told.append(str(error))

    with opened() as dispatcher:
        transport: Any = dispatcher._open.transport
        dispatch = transport.dispatch

        def asking(*args: Any) -> Any:
            ask()  # as another thread would while this one is inside
            return dispatch(*args)

        transport.dispatch = asking
        dispatcher.layer("moe").dispatch(x, scores, ids)
        told.append(_from_a_fork(lambda: dispatcher.input_buffer(3)))
        del transport.dispatch
        dispatcher.dispatch(x, scores, ids)
    ask()
    return told


def _from_a_fork(act: Callable[[], Any]) -> str:
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            act()
            os.write(writes, b"lent")
        except cd.ContractViolation as error:
            os.write(writes, str(error).encode())
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


# -- readers that are slow --------------------------------------------------------------------------------------------


def _slow_reader(rank: int, delay_s: float, timeout_s: float) -> tuple[float, float, bool, tuple[int, ...], str]:
    """Rank 1 tells late that it has read: when; until when `input_buffer` took; are rows right; who was blamed; how."""
    x, scores, ids = inputs(rank, 9)
    blamed: tuple[int, ...] = ()
    told_at, message = 0.0, ""

    def late(*args: Any, **options: Any) -> None:
        nonlocal told_at
        if rank == 1:
            time.sleep(delay_s)
        told_at = time.monotonic()  # the same clock on all ranks
        launch_tell(*args, **options)

    dispatcher = opened(timeout_s=timeout_s)
    with torch.no_grad():
        expected = dispatcher.dispatch(x, scores, ids).rows
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(pull, "launch_tell", late)
            rows = dispatcher.dispatch(x, scores, ids).rows
        try:
            if rank == 0:
                dispatcher.input_buffer(9).fill_(float("nan"))
            else:
                time.sleep(0.5)  # until the lender has told its verdict
                dispatcher.check()
        except cd.PeerTimeout as error:
            blamed, message = error.ranks, str(error)
            with pytest.raises(cd.PeerTimeout, match="were missing in call 1"):
                dispatcher.check()
        lent_at = time.monotonic()
        dispatcher.close()
    return told_at, lent_at, torch.equal(rows, expected), blamed, message


def test_a_reader_that_is_slow_holds_up_the_producer(ranks: Ranks):
    (_, lent_at, *lender), (told_at, _, *reader) = ranks(2).run(_slow_reader, 0.8, 20.0)
    assert lent_at > told_at
    assert lender == reader == [True, (), ""]


def test_a_reader_that_does_not_come_is_named(ranks: Ranks):
    (_, lent_at, same, *told), (told_at, _, same_there, *told_there) = ranks(2).run(_slow_reader, 4.0, 1.0)
    assert same and same_there and lent_at < told_at
    for blamed, message in (told, told_there):
        assert blamed == (1,) and "ranks [1] were missing in call 1 (dispatch of layer '')" in message


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


def _gpu_step(dispatcher: cd.TokenDispatcher, given: Inputs, *, lends: bool) -> list[torch.Tensor]:
    x, scores = given[0].clone().requires_grad_(), given[1].clone().requires_grad_()
    routed = dispatcher.dispatch(lent(dispatcher, x) if lends else x, scores, given[2])
    out = dispatcher.combine(routed.rows * 2, routed.handle)
    weights = torch.arange(256, device="cuda")
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), (x, scores))]


def _on_a_gpu(rank: int, max_tokens: int) -> list[str]:
    """What went wrong, in words: in bits, in waits of the host, in a graph that is replayed."""
    wrong = []
    dispatcher = cd.TokenDispatcher(_gpu_config(max_tokens), backend="symmetric", device="cuda")
    for seed, num_tokens in enumerate((max_tokens, 1, 70 + rank, 40)):
        given = _gpu_inputs(rank, seed, num_tokens)
        found = [_gpu_step(dispatcher, given, lends=lends) for lends in (False, True, True)]
        if not all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)):
            wrong.append(f"{num_tokens} tokens differ")
    given = _gpu_inputs(rank, 9, 64)
    torch.cuda.synchronize()
    with host_sync_is_an_error():
        torch.cuda._sleep(200_000_000)
        begun = time.perf_counter()
        _gpu_step(dispatcher, given, lends=True)
        if time.perf_counter() - begun > 0.05:
            wrong.append("the host waited")
    torch.cuda.synchronize()

    def pair() -> torch.Tensor:
        routed = dispatcher.dispatch(torch.mul(held[0], 2, out=dispatcher.input_buffer(64)), *held[1:])
        return dispatcher.combine(routed.rows, routed.handle)

    with torch.no_grad():
        held = _gpu_inputs(rank, 10, 64)
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
            graph.replay()
            routed = dispatcher.dispatch(held[0] * 2, *held[1:])
            if not torch.equal(captured, dispatcher.combine(routed.rows, routed.handle)):
                wrong.append(f"replay of {seed} differs")
        if dispatcher.input_buffer(64).data_ptr() != address:
            wrong.append("the address has changed")
    dispatcher.check()
    del graph
    dispatcher.close(graphs_destroyed=True)
    return wrong


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(1, 640), (2, 640), (2, 128)], ids=["alone", "", "small"])
def test_on_gpus_bits_are_the_same_no_host_waits_and_graphs_lend_too(num_ranks: int, max_tokens: int):
    assert run_ranks(_on_a_gpu, num_ranks, max_tokens, **on_gpus(num_ranks), timeout_s=120.0) == [[]] * num_ranks
