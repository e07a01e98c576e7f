"""What an opening imports late keeps no group alive."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, sys, weakref
import torch, torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
keeper = "torch.distributed.nn.functional"
assert keeper not in sys.modules, "torch imports it by itself now: this test tells nothing"
{late}
group = weakref.ref(dist.group.WORLD)
functions = vars(sys.modules[keeper]).values()
held = sum(group() in (getattr(function, "__defaults__", None) or ()) for function in functions)
summed = sys.modules[keeper].all_reduce(torch.ones(2))  # with the default group still
dist.destroy_process_group()
gc.collect()
print(held, group() is None, summed.tolist())
"""
OPENING = """
import crossdock as cd
config = cd.DispatcherConfig(num_experts=4, top_k=1, hidden_dim=8, dtype=torch.float32, num_max_tokens_per_rank=4)
with cd.TokenDispatcher(config, backend="all_to_all"):
    pass
"""


@pytest.mark.parametrize(
    ("late", "told"),
    [
        pytest.param(OPENING, "0 True [1.0, 1.0]", id="an opening"),
        pytest.param("import torch._dynamo", "{held} False [1.0, 1.0]", id="torch alone", marks=pytest.mark.full),
    ],
)
def test_a_destroyed_group_is_gone(late: str, told: str):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(late=late)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    held = done.stdout.split()[0]
    assert done.stdout.strip() == told.format(held=held) and (int(held) > 0) == ("held" in told)
