"""Whose line a warning points at."""

from __future__ import annotations

import os
import sys

import torch

_OURS_AND_TORCHS = tuple(f"{os.path.dirname(file)}{os.sep}" for file in (__file__, torch.__file__))


def level_of_caller() -> int:
    """The `stacklevel`, for who warns, of the first frame that is neither this package's nor torch's.

    `warnings.warn` can skip files by itself from Python 3.12 on.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS_AND_TORCHS) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level
