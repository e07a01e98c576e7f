"""Wrong use that a sentence must meet, and unusual use that must simply work."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.distributed as dist
from torch import Tensor

import crossdock as cd
from crossdock.testing import Seat, assert_bit_equal
from tests.conftest import Ranks
from tests.contract.conftest import On, every_backend
from tests.contract.trials import make_config, refused

CONFIG = make_config(4, 2, 8, timeout_s=10.0)
IDS = torch.tensor([[0, 2], [1, 3], [2, 0]])
FAR = pytest.mark.parametrize("backend", ["loopback", "all_to_all"])


def inputs(grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Three tokens for experts of both ranks: rows of 1s, 2s and 3s, all scores a half."""
    x = torch.tensor([1.0, 2.0, 3.0]).unsqueeze(1).repeat(1, 8)
    return x.requires_grad_(grad), torch.full((3, 2), 0.5).requires_grad_(grad), IDS.clone()


def round_trip(dispatcher: cd.TokenDispatcher | Any, *args: Any) -> Tensor:
    routed = dispatcher.dispatch(*(args or inputs()))
    return dispatcher.combine(routed.rows, routed.handle)


def still_works(dispatcher: cd.TokenDispatcher) -> None:
    x, scores, ids = inputs(grad=True)
    out = round_trip(dispatcher, x, scores, ids)
    out.sum().backward()
    assert_bit_equal(out.detach(), x.detach(), "out")
    assert x.grad is not None
    assert_bit_equal(x.grad, torch.ones(3, 8), "gradient of x")


@pytest.fixture
def alone() -> Iterator[cd.TokenDispatcher]:
    """A dispatcher of one rank, which must still work when the test is done."""
    with cd.TokenDispatcher(CONFIG) as dispatcher:
        yield dispatcher
        still_works(dispatcher)


# -- handles ----------------------------------------------------------------------------------------------------------


def handles_in_another_order(seat: Seat, backward: bool) -> str:
    """Two calls of one layer, alike but for the dispatch they belong to; rank 1 takes the second one first."""
    with seat.open(CONFIG) as dispatcher:
        layer = dispatcher.layer("moe")
        routed = [layer.dispatch(*inputs()) for _ in range(2)]
        order = routed if seat.rank == 0 else routed[::-1]
        if not backward:
            return refused(lambda: [layer.combine(r.rows, r.handle) for r in order], cd.ContractViolation)
        out = {id(r): layer.combine(r.rows, r.handle) for r in routed}
        return refused(lambda: [out[id(r)].sum().backward() for r in order], cd.ContractViolation)


@FAR
@pytest.mark.parametrize("backward", [False, True], ids=["combine", "backward"])
def test_handles_used_in_another_order_are_told_apart(on: On, backend: str, backward: bool):
    messages = on(backend, 2)(handles_in_another_order, backward)
    told = "the dispatch whose handle is used is call 0 on ranks [0], call 1 on ranks [1]"
    assert [told in message for message in messages] == [True, True]
    assert all(("combine_backward of" in message) == backward for message in messages)
    on(backend, 2)(open_and_use)  # the ranks live, and may open another


def open_and_use(seat: Seat) -> None:
    with seat.open(CONFIG) as dispatcher:
        still_works(dispatcher)


def pickled_handle(seat: Seat) -> tuple[bytes, bool]:
    with seat.open(CONFIG) as dispatcher, torch.no_grad():
        routed = dispatcher.dispatch(*inputs())
        sent = pickle.dumps(routed.handle)
        out = dispatcher.combine(routed.rows, pickle.loads(sent))
        return sent, torch.equal(out, dispatcher.combine(routed.rows, routed.handle))


def strange_handles(seat: Seat, handles: list[bytes]) -> list[str]:
    with seat.open(CONFIG) as dispatcher, torch.no_grad():
        rows = dispatcher.dispatch(*inputs()).rows
        messages = [refused(partial(dispatcher.combine, rows, pickle.loads(sent))) for sent in handles]
        still_usable = torch.equal(round_trip(dispatcher), inputs()[0])
        return [*messages, str(still_usable)]


@FAR
def test_only_its_own_handles_come_back_from_a_pickle(on: On, backend: str):
    sent, same = zip(*on(backend, 2)(pickled_handle), strict=True)
    assert same == (True, True)
    for *messages, still_usable in on(backend, 2)(strange_handles, list(sent)):
        assert messages == ["this handle (layer '') belongs to another dispatcher"] * 2
        assert still_usable == "True"


def test_a_handle_of_another_dispatcher_is_refused(alone: cd.TokenDispatcher):
    with cd.TokenDispatcher(CONFIG) as other:
        routed = other.dispatch(*inputs())
    assert "belongs to another dispatcher" in refused(lambda: alone.combine(routed.rows, routed.handle))
    assert "got NoneType" in refused(lambda: alone.combine(routed.rows, None))  # type: ignore[arg-type]


def written_over(seat: Seat, config: cd.DispatcherConfig, grad: bool) -> bool:
    """A step whose scores are written over between its calls; whether its handle shares memory with the caller."""
    with seat.open(config) as dispatcher, torch.set_grad_enabled(grad):
        x, scores, ids = inputs(grad)
        given = scores * 1
        routed = dispatcher.dispatch(x, given, ids)
        assert routed.handle.row_scores.data_ptr() != routed.scores.data_ptr()
        shares = routed.handle.topk_scores.data_ptr() == given.data_ptr()
        given.zero_()
        routed.scores.zero_()
        out = dispatcher.combine(routed.rows, routed.handle)
        assert_bit_equal(out.detach(), x.detach(), "out")
        if grad:
            dx, ds = torch.autograd.grad(out.sum(), [x, scores])
            assert_bit_equal(dx, torch.ones(3, 8), "gradient of x")
            assert_bit_equal(ds, 8 * x.detach()[:, :2], "gradient of the scores")
        return shares


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("capacity", [cd.RowCapacity.exact(), cd.RowCapacity.worst_case()], ids=["exact", "worst_case"])
@every_backend(1, 2)
def test_writing_to_scores_after_dispatch_changes_nothing(
    on: On, backend: str, ep_size: int, capacity: cd.RowCapacity, reduction: Any, grad: bool
):
    config = dataclasses.replace(CONFIG, row_capacity=capacity, reduction=reduction)
    shares = on(backend, ep_size)(written_over, config, grad)
    assert shares == [not grad and reduction == "fast" and backend != "local"] * ep_size


def kept_scores(seat: Seat) -> None:
    """What else than the caller's own memory a handle has without grad mode, and what comes of it."""
    with seat.open(CONFIG) as dispatcher:
        x, scores, ids = inputs(grad=True)
        with torch.no_grad():
            routed = dispatcher.dispatch(x, scores, ids)
            cast = dispatcher.dispatch(x, scores.double(), ids)
        assert routed.handle.topk_scores.data_ptr() == scores.data_ptr() and not routed.handle.topk_scores.requires_grad
        assert cast.handle.topk_scores.dtype == torch.float32
        out = dispatcher.combine(routed.rows.requires_grad_(), routed.handle)
        out.sum().backward()  # the scores were given without grad mode
        assert scores.grad is None and routed.rows.grad is not None

        def program(x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            routed = dispatcher.dispatch(x, scores, ids)
            scores.zero_()
            return dispatcher.combine(routed.rows, routed.handle), routed.handle.topk_scores

        with torch.no_grad():
            out, kept = torch.compile(program, fullgraph=True, backend="aot_eager")(x, scores, ids)
        assert_bit_equal(out, x.detach(), "out")
        assert kept.tolist() == [[0.5, 0.5]] * 3 and scores.tolist() == [[0.0, 0.0]] * 3


def later_scores(seat: Seat) -> None:
    """A buffer of scores that takes part in another step, with a history or a shape of its own, before the combine."""
    with seat.open(CONFIG) as dispatcher:
        x, scores, ids = inputs(grad=False)
        gate = torch.ones(1, requires_grad=True)

        def refill(buffer: Tensor) -> object:
            return buffer.copy_(gate.expand(3, 2))

        changes: list[Callable[[Tensor], object]] = [
            refill,
            lambda buffer: buffer.requires_grad_(),
            lambda buffer: buffer.resize_(7, 2),
            lambda buffer: buffer.set_(torch.empty(0).untyped_storage()),
            lambda buffer: setattr(buffer, "data", torch.rand(1, 2)),
        ]
        for change in changes:
            buffer = scores.clone()
            with torch.no_grad():
                routed = dispatcher.dispatch(x, buffer, ids)
            change(buffer)
            assert copy.deepcopy(routed.handle).topk_scores.shape == (3, 2)
            out = dispatcher.combine(routed.rows.requires_grad_(), routed.handle)
            assert_bit_equal(out.detach(), x, "out")
            out.sum().backward()
            assert gate.grad is None and (not buffer.is_leaf or buffer.grad is None)
        compiled = torch.compile(dispatcher.combine, fullgraph=True, backend="aot_eager")
        assert_bit_equal(compiled(routed.rows.detach(), routed.handle), x, "out of a compiled combine")


@every_backend(2)
def test_what_becomes_of_scores_after_dispatch_does_not_matter(on: On, backend: str, ep_size: int):
    on(backend, ep_size)(later_scores)


def kept_memory(seat: Seat) -> None:
    with seat.open(CONFIG) as dispatcher, torch.no_grad():
        x, scores, ids = inputs(grad=False)
        many = torch.zeros(3, 64)
        many[:, :2] = scores
        kept = dispatcher.dispatch(x, many[:, :2], ids).handle.topk_scores
        assert kept.untyped_storage().nbytes() == scores.nbytes
        assert_bit_equal(kept, scores, "what is kept")


@every_backend(2)
def test_a_handle_keeps_no_more_memory_alive_than_its_scores(on: On, backend: str, ep_size: int):
    on(backend, ep_size)(kept_memory)


@every_backend(2)
def test_without_grad_mode_a_handle_may_share_the_scores(on: On, backend: str, ep_size: int):
    on(backend, ep_size)(kept_scores)


# -- outputs that a loss leaves out -----------------------------------------------------------------------------------


def gradients(seat: Seat, left_out: str) -> Tensor:
    """Gradients of two experts' weights over a handle combined twice; rank 1 may leave outputs out of its loss."""
    with seat.open(CONFIG) as dispatcher:
        weights = torch.ones(2, requires_grad=True)
        routed = dispatcher.dispatch(*inputs())
        out = [dispatcher.combine(routed.rows * w, routed.handle) for w in weights]
        if seat.rank == 0 or left_out == "none":
            (out[0].sum() + 2 * out[1].sum()).backward()
        elif left_out == "both":
            dispatcher.join_backward(routed.handle)
        else:
            (out[0].sum() + 0 * out[1].sum()).backward()
        dispatcher.check()
        assert weights.grad is not None
        return weights.grad


@FAR
def test_joining_the_backward_of_a_handle_combined_twice(on: On, backend: str):
    # Half of every token goes to either rank's experts: 24 of the 48 that a rank's rows and elements add up to.
    assert [grad.tolist() for grad in on(backend, 2)(gradients, "none")] == [[48.0, 96.0], [48.0, 96.0]]
    assert [grad.tolist() for grad in on(backend, 2)(gradients, "both")] == [[24.0, 48.0], [24.0, 48.0]]
    assert [grad.tolist() for grad in on(backend, 2)(gradients, "second")] == [[48.0, 48.0], [48.0, 48.0]]


# -- transforms, modes and devices ------------------------------------------------------------------------------------


def dual_numbers(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with fwAD.dual_level():
        call(fwAD.make_dual(x, x))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "dual": dual_numbers,
    "grad": lambda call, x: torch.func.grad(lambda a: call(a).sum())(x),
    "vmap": lambda call, x: torch.func.vmap(call)(x.unsqueeze(0)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch 2.14's own transforms do
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(alone: cd.TokenDispatcher, transform: str):
    x, scores, ids = inputs()
    routed = alone.dispatch(x, scores, ids)
    for call, tensor in (
        (lambda a: alone.dispatch(a, scores, ids).rows, x),
        (lambda a: alone.combine(a, routed.handle), routed.rows.detach()),
    ):
        message = refused(partial(TRANSFORMS[transform], call, tensor))
        assert "have no forward-mode derivative and do not run under torch.func transforms" in message


@contextmanager
def meta_as_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "device": lambda: torch.device("meta"),
    "default device": meta_as_default,
    "inference": torch.inference_mode,
}


def used_in_modes(seat: Seat) -> None:
    with seat.open(CONFIG) as dispatcher:
        for name, mode in MODES.items():
            x, scores, ids = inputs(grad=True)
            with mode():
                layer = dispatcher.layer(name)
            for calls_inside in (False, True) if name != "inference" else (False,):
                with mode() if calls_inside else torch.enable_grad():
                    out = round_trip(layer, x, scores, ids)
                    out.backward(torch.ones(3, 8, device="cpu"))
                assert_bit_equal(out.detach(), x.detach(), name)
            with torch.inference_mode():
                assert_bit_equal(round_trip(layer), x.detach(), name)


@pytest.mark.parametrize(("backend", "ep_size"), [("local", 1), ("all_to_all", 2)])
def test_views_and_calls_in_any_mode(on: On, backend: str, ep_size: int):
    on(backend, ep_size)(used_in_modes)


class Subclass(torch.Tensor):
    """Any tensor class of a caller's."""


@every_backend(2)
def test_tensors_of_a_subclass(on: On, backend: str, ep_size: int):
    on(backend, 2)(with_a_subclass)


def with_a_subclass(seat: Seat) -> None:
    with seat.open(CONFIG) as dispatcher:
        x, scores, ids = inputs()
        leaf = x.as_subclass(Subclass).requires_grad_()
        out = round_trip(dispatcher, leaf, scores.as_subclass(Subclass), ids)
        out.sum().backward()
        assert torch.equal(out.detach().as_subclass(Tensor), x)
        assert torch.equal(leaf.grad.as_subclass(Tensor), torch.ones(3, 8))  # type: ignore[union-attr]


def test_a_device_may_be_named_with_a_number():
    with cd.TokenDispatcher(CONFIG, device="cpu:0") as dispatcher:
        still_works(dispatcher)


# -- arguments --------------------------------------------------------------------------------------------------------

X, SCORES, _ = inputs()
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "sparse": ({"x": X.to_sparse()}, "x must be a strided tensor, got torch.sparse_coo"),
    "nested": ({"x": torch.nested.nested_tensor([X], layout=torch.jagged)}, "x must be a strided tensor, got"),
    "list": ({"topk_scores": [[0.5]]}, "topk_scores must be a tensor, got list"),
    "None": ({"topk_expert_ids": None}, "topk_expert_ids must be a tensor, got NoneType"),
    "numpy": ({"x": X.numpy()}, "x must be a tensor, got ndarray"),
    "float bound": ({"num_tokens_per_rank": 8.0}, "num_tokens_per_rank must be an integer or None, got 8.0"),
    "negative bound": ({"num_tokens_per_rank": -1}, "num_tokens_per_rank (-1) must lie in 0..num_max_tokens"),
    "float counts": (
        {"num_local_tokens_per_expert": torch.tensor([2.0, 1.0, 2.0, 1.0])},
        "num_local_tokens_per_expert must be int32 or int64, got torch.float32",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_dispatch(alone: cd.TokenDispatcher, changes: dict[str, Any], sentence: str):
    arguments = {"x": X, "topk_scores": SCORES, "topk_expert_ids": IDS} | changes
    assert sentence in refused(lambda: alone.dispatch(**arguments))


def test_arguments_of_combine(alone: cd.TokenDispatcher):
    rows, _, handle = alone.dispatch(*inputs())
    for apply_scores in (None, 1):
        message = refused(partial(alone.combine, rows, handle, apply_scores=apply_scores))  # type: ignore[arg-type]
        assert message == f"apply_scores must be True or False, got {apply_scores}"
    assert "rows must be a strided tensor" in refused(lambda: alone.combine(rows.detach().to_sparse(), handle))
    assert "rows must be a tensor" in refused(lambda: alone.combine(rows.detach().numpy(), handle))


def test_what_a_dispatch_returns_as_a_whole_is_refused(alone: cd.TokenDispatcher):
    routed, needs = alone.dispatch(*inputs()), "needs the handle of a dispatch, got Dispatched: pass its .handle"
    given: Any = routed
    assert refused(lambda: alone.combine(routed.rows, given)) == f"combine {needs}"
    assert refused(lambda: alone.join_backward(given)) == f"join_backward {needs}"
    assert (
        refused(lambda: alone.combine(given, routed.handle)) == "rows must be a tensor, got Dispatched: pass its .rows"
    )


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("timeout_s", 1e7, "timeout_s must be a positive number of at most 1e+06, got 10000000.0"),
        ("timeout_s", 0, "timeout_s must be a positive number"),
        ("timeout_s", float("nan"), "timeout_s must be a positive number"),
        ("timeout_s", True, "timeout_s must be a positive number"),
        ("expert_alignment", 2**40, "expert_alignment must be at most 2147483647, got 1099511627776"),
        ("top_k", True, "top_k must be a positive integer, got True"),
        ("hidden_dim", 8.0, "hidden_dim must be a positive integer, got 8.0"),
        ("zero_tail", 1, "zero_tail must be True or False, got 1"),
        ("equal_token_counts", numpy.bool_(True), "equal_token_counts must be True or False, got "),
    ],
)
def test_settings(field: str, value: object, sentence: str):
    assert sentence in refused(lambda: dataclasses.replace(CONFIG, **{field: value}), cd.ConfigError)  # type: ignore[arg-type]


# -- names ------------------------------------------------------------------------------------------------------------


def test_names(alone: cd.TokenDispatcher):
    for name in ("a\0", "\0", None, b"moe", 3):
        message = refused(partial(alone.layer, name), cd.ConfigError)  # type: ignore[arg-type]
        assert message == f"a layer's name must be a string without zero characters, got {name!r}"
    message = refused(partial(alone.layer, "moe \ud800"), cd.ConfigError)
    assert message == r"a layer's name must be text that UTF-8 can write, got 'moe \ud800'"
    assert "has 130" in refused(lambda: alone.layer("ü" * 65), cd.ConfigError)
    assert alone.layer("ü" * 64).name == "ü" * 64


def dispatched_as(seat: Seat, names: list[str]) -> str:
    with seat.open(CONFIG) as dispatcher:
        return refused(lambda: dispatcher.layer(names[seat.rank]).dispatch(*inputs()), cd.ContractViolation)


@FAR
def test_long_names_are_told_apart(on: On, backend: str):
    start = "model.decoder.transformer.blocks." + "nested." * 6
    at_the_end, at_the_start = [f"{start}{i}.moe" for i in range(2)], [f"{i}{start}" for i in range(2)]
    for message in on(backend, 2)(dispatched_as, at_the_end):
        shown = [repr(name[-48:]) for name in at_the_end]
        assert f"layer is {shown[0]} on ranks [0], {shown[1]} on ranks [1]" in message
    for message in on(backend, 2)(dispatched_as, at_the_start):
        assert "layer names differ" in message


# -- copies, processes and groups -------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A module as models have them."""

    def __init__(self, dispatcher: cd.TokenDispatcher) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.dispatcher, self.layer = dispatcher, dispatcher.layer("moe")


def test_copies_share_the_dispatcher_and_pickles_are_refused(alone: cd.TokenDispatcher):
    block = Block(alone)
    copied = copy.deepcopy(block)
    assert copied.weight is not block.weight
    assert copied.dispatcher is alone
    assert copied.layer.dispatcher is alone
    for thing, sentence in (
        (alone, "TokenDispatcher(backend='local', rank 0 of 1) cannot be pickled: it is open in this process alone"),
        (block.layer, "LayerView('moe' of TokenDispatcher(backend='local', rank 0 of 1)) cannot be pickled: its disp"),
        (block, "cannot be pickled"),
    ):
        assert sentence in refused(partial(pickle.dumps, thing), cd.ContractViolation)


FORKED: dict[str, Callable[[cd.TokenDispatcher], object]] = {
    "calls": lambda dispatcher: dispatcher.dispatch(*inputs()),
    "closes": lambda dispatcher: dispatcher.close(),
    "exits": lambda dispatcher: atexit._run_exitfuncs(),
}


def fork_in_a_rank(seat: Seat, what: str) -> str:
    """What the child of rank 1 says; both ranks go on."""
    with seat.open(CONFIG) as dispatcher:
        still_works(dispatcher)
        said = forked(lambda: FORKED[what](dispatcher)) if seat.rank == 1 else ""
        still_works(dispatcher)
        return said


def forked(call: Callable[[], object]) -> str:
    """Run a call in a forked child, which ends at once, and return the error it met."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            call()
        except cd.CrossdockError as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.wait()
    return said


@pytest.mark.parametrize("what", FORKED)
def test_a_forked_child_disturbs_nobody(on: On, what: str):
    said = on("all_to_all", 2)(fork_in_a_rank, what)[1]
    refusal = r"ContractViolation: this dispatcher was opened by process \d+; a forked child \(\d+\) cannot use it"
    assert re.fullmatch(refusal if what == "calls" else "", said)


def opened_outside(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        cd.TokenDispatcher(CONFIG, group).close()
        dist.destroy_process_group(group)
        return ""
    return refused(lambda: cd.TokenDispatcher(CONFIG, group), cd.ConfigError)


def test_a_process_outside_the_group_is_told_so(ranks: Ranks):
    assert ranks(2).run(opened_outside)[1] == "this process (global rank 1) is not a member of the group it passed"
