"""Without its operator an eager call is the same: results, gradients, errors, what is saved; and it stays cheap."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import crossdock as cd
from crossdock.eager import is_plain_call
from crossdock.testing import assert_bit_equal
from tests.conftest import Ranks

HIDDEN_DIM, NUM_EXPERTS, TOP_K = 16, 4, 2


class Observer(TorchDispatchMode):
    """Sees every operator, so none may be left out; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionObserver(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def opened(backend: str = "local", **fields: Any) -> cd.TokenDispatcher:
    known: dict[str, Any] = {"dtype": torch.float32, "num_max_tokens_per_rank": 32, "timeout_s": 20.0}
    config = cd.DispatcherConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, hidden_dim=HIDDEN_DIM, **(known | fields))
    return cd.TokenDispatcher(config, backend=backend)


@pytest.fixture
def dispatcher() -> Iterator[cd.TokenDispatcher]:
    with opened() as dispatcher:
        yield dispatcher


def inputs(
    num_tokens: int = 7, scores: torch.dtype = torch.float32, ids: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN_DIM, generator=generator, requires_grad=True)
    topk_scores = torch.rand(num_tokens, TOP_K, generator=generator).to(scores).requires_grad_()
    return x, topk_scores, torch.randint(-1, NUM_EXPERTS, (num_tokens, TOP_K), generator=generator).to(ids)


# -- the same call ----------------------------------------------------------------------------------------------------


def _step(dispatcher: cd.TokenDispatcher, apply_scores: bool, *tensors: Tensor) -> dict[str, Tensor]:
    """Everything that a forward gives, and a backward where grad mode is on."""
    x, scores, ids = tensors
    routed = dispatcher.dispatch(x, scores, ids)
    out = dispatcher.combine(routed.rows * 2, routed.handle, apply_scores=apply_scores)
    told = {
        "rows": routed.rows,
        "scores": routed.scores,
        "counts": routed.tokens_per_expert,
        "offsets": routed.expert_offsets,
        "end": routed.handle.rows_end,
        "out": out,
        **{f"layout {place}": tensor for place, tensor in enumerate(routed.handle.layout)},
    }
    for name, tensor in list(told.items()):
        told[f"{name} requires grad"] = torch.tensor(tensor.requires_grad)
    if out.requires_grad:
        both = out.square().sum() + (routed.scores * 3).sum()
        told["dx"], told["ds"] = torch.autograd.grad(both, [x, scores], retain_graph=True)
        told["dx again"], told["ds again"] = torch.autograd.grad(both, [x, scores])
    return {name: tensor.detach() for name, tensor in told.items()}


_CAPACITIES = {"exact": cd.RowCapacity.exact(), "worst_case": cd.RowCapacity.worst_case()}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("apply_scores", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("capacity", _CAPACITIES)
@pytest.mark.parametrize(
    "kinds", [{}, {"num_tokens": 0}, {"scores": torch.float64, "ids": torch.int32}], ids=["plain", "empty", "cast"]
)
def test_with_and_without_the_operator_are_the_same(grad: bool, apply_scores: bool, capacity: str, kinds: Any):
    with opened(row_capacity=_CAPACITIES[capacity]) as dispatcher, torch.set_grad_enabled(grad):
        without = _step(dispatcher, apply_scores, *inputs(**kinds))
        with Observer() as observer:
            seen = _step(dispatcher, apply_scores, *inputs(**kinds))
        calls = [name for name in observer.seen if "crossdock" in name]
        assert len(calls) == (6 if grad else 2), calls
        assert list(without) == list(seen)
        for name in without:
            told = slice(int(without["end"])) if name in ("rows", "scores") else ...  # behind it anything may stand
            assert_bit_equal(without[name][told], seen[name][told], name)
        assert dispatcher.stats().calls == 2 * (6 if grad else 2)


@pytest.mark.parametrize("ways", [nullcontext, Observer], ids=["without", "with"])
class TestBothWays:
    """What holds without the operator, and holds with it."""

    def test_a_second_derivative_is_refused(self, dispatcher, ways: Callable[[], AbstractContextManager[Any]]):
        x, scores, ids = inputs()
        with ways():
            routed = dispatcher.dispatch(x, scores, ids)
            out = dispatcher.combine(routed.rows * routed.rows, routed.handle)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            with pytest.raises(cd.ContractViolation, match="no second derivative"):
                grad.sum().backward()

    def test_a_graph_goes_back_once(self, dispatcher, ways):
        x, scores, ids = inputs()
        with ways():
            routed = dispatcher.dispatch(x, scores, ids)
            out = dispatcher.combine(routed.rows, routed.handle)
            out.sum().backward()
            with pytest.raises(RuntimeError, match="a second time"):
                out.sum().backward()

    def test_what_is_saved_may_not_be_written(self, dispatcher, ways):
        x, scores, ids = inputs()
        with ways():
            routed = dispatcher.dispatch(x, scores, ids)
            rows = routed.rows * 2
            out = dispatcher.combine(rows, routed.handle)
            rows.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()

    def test_the_caller_may_write_to_what_is_its_own(self, dispatcher, ways):
        x, scores, ids = inputs()
        with ways(), torch.no_grad():
            kept = scores.clone()
            first = dispatcher.dispatch(x, kept, ids)
            wanted = dispatcher.combine(first.rows, first.handle)
            second = dispatcher.dispatch(x, kept, ids)
            for tensor in (kept, second.scores, second.tokens_per_expert, second.expert_offsets):
                tensor.zero_()
            assert_bit_equal(dispatcher.combine(second.rows, second.handle), wanted, "combined after the writes")

    def test_writing_to_scores_leaves_the_backward_as_it_was(self, dispatcher, ways):
        x, scores, ids = inputs()
        with ways():
            gradients = []
            for writes in (False, True):
                routed = dispatcher.dispatch(x, scores, ids)
                if writes:
                    routed.scores.zero_()
                out = dispatcher.combine(routed.rows, routed.handle)
                gradients.append(torch.autograd.grad(out.sum(), [x, scores]))
            for found, wanted in zip(*gradients, strict=True):
                assert_bit_equal(found, wanted, "gradient")

    def test_saved_tensors_may_be_kept_elsewhere(self, dispatcher, ways):
        packed: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Any:
            packed.append(tuple(tensor.shape))
            return tensor.detach().numpy().copy()

        x, scores, ids = inputs()
        routed = dispatcher.dispatch(x, scores, ids)
        wanted = torch.autograd.grad(dispatcher.combine(routed.rows * 2, routed.handle).sum(), [x, scores])
        with ways():
            with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
                routed = dispatcher.dispatch(x, scores, ids)
                out = dispatcher.combine(routed.rows * 2, routed.handle)
            for found, gradient in zip(torch.autograd.grad(out.sum(), [x, scores]), wanted, strict=True):
                assert_bit_equal(found, gradient, "gradient")
        num_layout = len(routed.handle.layout)
        assert len(packed) == (3 + num_layout) + (5 + num_layout)

    def test_a_combine_of_other_rows_leaves_the_dispatch_alone(self, dispatcher, ways):
        x, scores, ids = inputs()
        with ways():
            routed = dispatcher.dispatch(x, scores, ids)
            other = routed.rows.detach().requires_grad_()
            dispatcher.combine(other, routed.handle, apply_scores=False).sum().backward()
            assert other.grad is not None and x.grad is None
            assert dispatcher.stats().calls == 3

    def test_a_wrong_call_is_refused_and_the_next_one_runs(self, dispatcher, ways):
        x, scores, ids = inputs()
        with ways():
            with pytest.raises(cd.InvalidInput, match="outside -1..3"):
                dispatcher.dispatch(x, scores, ids + NUM_EXPERTS)
            with pytest.raises(cd.InvalidInput, match="the dtype of this dispatcher"):
                dispatcher.dispatch(x.double(), scores, ids)
            assert len(dispatcher.dispatch(x, scores, ids).rows) == int((ids >= 0).sum())


def test_values_that_are_not_yet_in_memory_are_moved_as_they_are(dispatcher: cd.TokenDispatcher):
    x, scores, ids = inputs()
    negated = torch.complex(torch.zeros_like(x.detach()), x.detach()).conj().imag  # a view that stands for -x
    assert negated.is_neg() and not is_plain_call(negated)
    with torch.no_grad():
        assert_bit_equal(
            dispatcher.dispatch(negated, scores, ids).rows, dispatcher.dispatch(-x, scores, ids).rows, "rows"
        )


# -- when the operator is needed ---------------------------------------------------------------------------------------


@contextmanager
def _fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


@pytest.mark.parametrize(
    "around", [Observer, FunctionObserver, _fake, torch._C._AutoDispatchBelowAutograd, lambda: torch.device("cpu")]
)
def test_whoever_looks_at_operators_sees_ours(around: Callable[[], Any]):
    assert is_plain_call(torch.zeros(1))
    with around():
        assert not is_plain_call(None)
    assert is_plain_call(torch.zeros(1), None, torch.nn.Parameter(torch.zeros(1)))


def test_tensors_that_are_more_than_themselves_need_the_operator():
    with FakeTensorMode():
        fake = torch.zeros(1)
    wrapped = [
        torch.zeros(1).as_subclass(Subclass),
        fake,
        torch._efficientzerotensor(1),
        torch._to_functional_tensor(torch.zeros(1)),
    ]
    assert [is_plain_call(torch.zeros(1), tensor) for tensor in wrapped] == [False] * 4


def test_tracers_see_the_operator(dispatcher: cd.TokenDispatcher):
    told: list[bool] = []

    def program(x: Tensor) -> Tensor:
        told.append(is_plain_call(torch.zeros(1)))
        return x + 1

    for pre_dispatch in (False, True):
        make_fx(program, pre_dispatch=pre_dispatch)(torch.zeros(2))
    torch.func.vmap(program)(torch.zeros(2))
    torch.compile(program, fullgraph=True, backend="eager", dynamic=False)(torch.zeros(2))
    assert told == [False] * 4


# -- what a call costs ------------------------------------------------------------------------------------------------

_PACKAGE = str(Path(cd.__file__).parent)
# What only asks, and makes nothing.
_QUESTIONS = {
    "dim",
    "stride",
    "numel",
    "element_size",
    "is_contiguous",
    "numpy",
    "is_floating_point",
    "data_ptr",
    "untyped_storage",
}
# Calls of torch that one eager call of ours makes, by backend: dispatch without grad, with it, and combine. Four of a
# dispatch of `symmetric` are the interpreter's, which asks in three launches whether ids and scores are contiguous.
_MOST_CALLS = {"local": (43, 43, 37), "symmetric": (30, 29, 4)}


def _torch_calls(program: Callable[[], Any]) -> Counter[str]:
    """How often `program` calls functions of torch and methods of tensors from within the package, by name."""
    counts: Counter[str] = Counter()

    def see(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename.startswith(_PACKAGE):
            owner = getattr(function, "__qualname__", "")
            if "TensorBase" in owner or "VariableFunctions" in owner or isinstance(function.__self__, Tensor):
                counts[function.__name__] += function.__name__ not in _QUESTIONS

    sys.setprofile(see)
    try:
        program()
    finally:
        sys.setprofile(None)
    return +counts


def _calls_of_torch(rank: int, backend: str) -> list[Counter[str]]:
    x, scores, ids = inputs()
    # So many tokens that no rank has a way of its own for few of them.
    with opened(backend, row_capacity=cd.RowCapacity.worst_case(), num_max_tokens_per_rank=1024) as dispatcher:
        routed = dispatcher.dispatch(x, scores, ids)
        dispatcher.combine(routed.rows, routed.handle)  # whatever is made once is there
        with torch.no_grad():
            without_grad = _torch_calls(lambda: dispatcher.dispatch(x, scores, ids))
            combined = _torch_calls(lambda: dispatcher.combine(routed.rows, routed.handle))
        return [without_grad, _torch_calls(lambda: dispatcher.dispatch(x, scores, ids)), combined]


@pytest.mark.parametrize("backend", _MOST_CALLS)
def test_an_eager_call_makes_no_more_calls_of_torch_than_it_did(ranks: Ranks, backend: str):
    """Each costs the host 1 us, on slow machines 10 (docs/measurements.md)."""
    if backend == "symmetric":
        pytest.importorskip("triton", reason="the kernels need triton, which is published for Linux only")
    (counts,) = ranks(1).run(_calls_of_torch, backend)
    told = [dict(sorted(count.items())) for count in counts]
    assert all(count.total() <= most for count, most in zip(counts, _MOST_CALLS[backend], strict=True)), told
    if backend == "symmetric":  # its kernels write the scores of rows twice, and `fast` reads none of slots
        assert not counts[0]["clone"] + counts[0]["copy_"] and counts[1]["clone"] == 1, told
