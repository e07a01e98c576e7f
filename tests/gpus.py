"""What tests on GPUs share: how their ranks start, and a context in which the host must not wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def on_gpus(num_ranks: int) -> dict[str, Any]:
    """How to start ranks: a GPU and NCCL each where there are enough, else on shared ones."""
    if torch.cuda.device_count() >= num_ranks:
        return {"backend": "nccl"}
    return {"backend": "gloo", "device_type": "cuda"}


@contextmanager
def host_sync_is_an_error() -> Iterator[None]:
    """Let torch raise where it notices that the host waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
