"""Copies of functions that find other names than their module's, so that kernels can be given their helpers."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any


def rebound(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of `function` that finds `names` before its module's own globals."""
    plain: Any = function
    copy = types.FunctionType(plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__)
    copy.__kwdefaults__, copy.__annotations__ = plain.__kwdefaults__, plain.__annotations__
    copy.__module__, copy.__qualname__, copy.__doc__ = plain.__module__, plain.__qualname__, plain.__doc__
    return copy
