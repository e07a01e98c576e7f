"""Importing torch's compiler late: when there is a default group already, which that import would keep for ever.

`torch.distributed.nn.functional`, which comes with it, takes the default group of that moment as a default argument of
its functions. A group that lives on after `destroy_process_group` keeps its threads, and a thread of Gloo's that ends
its last exchange while the interpreter ends takes the process with it. Imported before there is a group, those
arguments are None, which stands for the default group as well; so they become None.
"""

from __future__ import annotations

import importlib
import sys
from types import FunctionType

import torch.distributed as dist

_KEEPER = "torch.distributed.nn.functional"


def import_dynamo() -> None:
    """Import `torch._dynamo`, which takes seconds the first time.

    Where it is new, functions of `torch.distributed.nn.functional` that would hold the default group hold None.
    """
    is_new = _KEEPER not in sys.modules
    importlib.import_module("torch._dynamo")
    if is_new and _KEEPER in sys.modules and dist.is_available() and dist.is_initialized():
        for function in vars(sys.modules[_KEEPER]).values():
            if isinstance(function, FunctionType) and function.__defaults__:
                function.__defaults__ = tuple(
                    None if isinstance(default, dist.ProcessGroup) else default for default in function.__defaults__
                )
