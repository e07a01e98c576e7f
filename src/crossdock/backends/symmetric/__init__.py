"""Own kernels over memory that all ranks see: one NVLink domain, or on a CPU the shared memory of one host.

On a CPU the same kernels run in Triton's interpreter, so that they can be tried with real ranks without a GPU. They are
far slower there than `all_to_all`, so it is taken there only where it is asked for by name.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ...types import SUPPORTED_DTYPES
from ..base import EVERY_ROW_CAPACITY, Backend, BackendTraits, GroupFacts, Link, Preference, Transport, TransportSpec


class SymmetricBackend(Backend):
    """Dispatch and combine that push rows through symmetric memory."""

    name = "symmetric"
    traits = BackendTraits(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset(SUPPORTED_DTYPES),
        row_capacities=EVERY_ROW_CAPACITY,
        capturable=True,
        ranks_share_gpus=True,
        needs="triton, and all ranks on one host",
    )

    def preference_on(self, device: torch.device | None) -> Preference:
        """On a CPU its kernels are interpreted, which is for tests."""
        return "preferred" if device is not None and device.type == "cuda" else "never"

    def describe(self, spec: TransportSpec, device: torch.device | None) -> str:
        from .plan import Plan

        return "" if device is None else str(Plan.of(spec, device))

    def refusal(self, spec: TransportSpec, group: GroupFacts) -> str | None:
        if group.transport == "none":
            return "torch.distributed is not initialised"
        if group.transport not in ("gloo", "nccl"):
            return f"it needs a torch.distributed group, not {group.transport}"
        if find_spec("triton") is None:
            return "its kernels need triton, which is not installed (it is published for Linux only)"
        return super().refusal(spec, group)

    def open(self, spec: TransportSpec, link: Link) -> Transport:
        from .transport import SymmetricTransport

        device = link.members.device
        assert device is not None  # a process group has one
        return SymmetricTransport(spec, link, device)

    @staticmethod
    def workspace_bytes(spec: TransportSpec) -> int:
        """Bytes of shared memory that one rank allocates for this spec when it opens, and no more later."""
        from .buffers import workspace_bytes

        return workspace_bytes(spec)
