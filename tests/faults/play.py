"""What a rank does in these trials: exact steps, one fault, and an account of how its peers' fault reached it.

Every function here runs in ranks of their own. Values are small integers in float32, so a right result is right to the
bit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import crossdock as cd

TIMEOUT_S = 1.2
LIMIT_S = TIMEOUT_S + 5.0  # what is promised, from the moment in which a rank entered the call
LAYER = "blocks.7.moe"
HIDDEN, TOP_K, MAX_TOKENS = 8, 2, 32


@dataclass(frozen=True, kw_only=True)
class Account:
    """How a call ended on one rank.

    Attributes:
        error: class of what it raised; "" if it returned an exact result.
        ranks: whom the error names.
        message: its text.
        took_s: from entering the call to its end.
        repeats: whether later calls, `check()` and `stats()` raised the same again.
        close_s: how long `close()` took.
        reopened: whether a dispatcher opened afterwards was exact; None where none was.
    """

    error: str = ""
    ranks: tuple[int, ...] = ()
    message: str = ""
    took_s: float = 0.0
    repeats: bool = False
    close_s: float = 0.0
    reopened: bool | None = None


def config(**changes: Any) -> cd.DispatcherConfig:
    """Two experts a rank of four, three where `num_experts` says so."""
    settings: dict[str, Any] = {
        "num_experts": 8,
        "top_k": TOP_K,
        "hidden_dim": HIDDEN,
        "dtype": torch.float32,
        "num_max_tokens_per_rank": MAX_TOKENS,
        "timeout_s": TIMEOUT_S,
    }
    return cd.DispatcherConfig(**(settings | changes))


@dataclass(frozen=True)
class Batch:
    """Tokens of one rank, and what expert e, which multiplies by e + 1, makes of them."""

    x: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(cls, rank: int, num_tokens: int, num_experts: int = 8) -> Batch:
        token = torch.arange(num_tokens)
        x = (16.0 * rank + token + 1).unsqueeze(1).repeat(1, HIDDEN)
        ids = torch.stack([(token + rank) % num_experts, (3 * token + 5 * rank + 1) % num_experts], dim=1)
        return cls(x, torch.tensor([[1.0, 0.5]]).repeat(num_tokens, 1), ids)

    @property
    def expected(self) -> torch.Tensor:
        return (self.scores * (self.ids + 1)).sum(1, keepdim=True) * self.x


def experts(dispatcher: cd.TokenDispatcher, routed: cd.Dispatched) -> torch.Tensor:
    first = dispatcher.ep_rank * dispatcher.num_local_experts
    factor = torch.arange(first + 1, first + 1 + dispatcher.num_local_experts)
    by_row = factor.repeat_interleave(routed.tokens_per_expert)
    spare = routed.rows.shape[0] - by_row.shape[0]  # rows behind the last offset, where there is a capacity
    return routed.rows * torch.cat([by_row, by_row.new_zeros(spare)]).unsqueeze(1)


def step(
    dispatcher: cd.TokenDispatcher,
    *,
    num_tokens: int = 5,
    layer: str = LAYER,
    apply_scores: bool = True,
    **options: Any,
) -> None:
    """Dispatch, experts, combine, and the result is right to the bit."""
    batch = Batch.of(dispatcher.ep_rank, num_tokens, dispatcher.config.num_experts)
    routed = dispatcher.layer(layer).dispatch(batch.x, batch.scores, batch.ids, **options)
    out = dispatcher.layer(layer).combine(experts(dispatcher, routed), routed.handle, apply_scores=apply_scores)
    if apply_scores and not torch.equal(out, batch.expected):
        raise AssertionError(f"wrong result on rank {dispatcher.ep_rank}: {out[:, 0].tolist()}")


def observe(dispatcher: cd.TokenDispatcher, work: Callable[[], object]) -> Account:
    """Run `work`, which a peer's fault should end, and what a user might do after that."""
    begun = time.monotonic()
    try:
        work()
    except (cd.PeerTimeout, cd.ContractViolation) as error:
        account = Account(
            error=type(error).__name__, ranks=error.ranks, message=str(error), took_s=time.monotonic() - begun
        )
        repeats = all(
            _raises_again(error, call) for call in (lambda: step(dispatcher), dispatcher.check, dispatcher.stats)
        )
        return close(dispatcher, replace(account, repeats=repeats))
    return close(dispatcher, Account(took_s=time.monotonic() - begun))


def _raises_again(error: cd.PeerTimeout | cd.ContractViolation, call: Callable[[], object]) -> bool:
    try:
        call()
    except (cd.PeerTimeout, cd.ContractViolation) as again:
        return type(again) is type(error) and str(again) == str(error) and again.ranks == error.ranks
    return False


def close(dispatcher: cd.TokenDispatcher, account: Account) -> Account:
    begun = time.monotonic()
    dispatcher.close()
    dispatcher.close()
    return replace(account, close_s=time.monotonic() - begun)


def reopen(account: Account, group: Any = None, timeout_s: float = 10.0) -> Account:
    """Open another dispatcher over the same ranks, or over the survivors, and use it."""
    with cd.TokenDispatcher(config(num_experts=12, timeout_s=timeout_s), group) as dispatcher:
        step(dispatcher)
        step(dispatcher, num_tokens=3)
        dist.barrier(group)
    return replace(account, reopened=True)


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def assert_named(
    accounts: dict[int, Account], at_fault: tuple[int, ...], error: str, *words: str, limit_s: float = LIMIT_S
) -> None:
    """Every survivor raised `error`, in time, naming exactly the ranks at fault, with the words in its message."""
    for rank, account in accounts.items():
        told = f"rank {rank}: {account}"
        assert (account.error, account.ranks) == (error, at_fault), told
        assert account.took_s < limit_s, told
        assert account.repeats, told
        assert account.close_s <= TIMEOUT_S, told
        for word in words:
            assert word in account.message, told
