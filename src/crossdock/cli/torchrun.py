"""Whether the ranks are torchrun's, and how many."""

from __future__ import annotations

import os

from crossdock.errors import ConfigError


def world_size_of_torchrun() -> int | None:
    """The world's size under torchrun, or a launcher that sets the same variables; else None.

    Raises:
        ConfigError: it is no number.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal():
        raise ConfigError(f"the environment variable WORLD_SIZE must be a number of ranks, got {text!r}")
    return int(text)


def ranks_of_torchrun(asked: int | None) -> int | None:
    """The world's size under torchrun, which a user may name; None without torchrun.

    Raises:
        ConfigError: it is no number, or `asked` is another one.
    """
    there = world_size_of_torchrun()
    if there is not None and asked not in (None, there):
        raise ConfigError(f"--ranks {asked} differs from torchrun's {there} ranks: leave --ranks out")
    return there


def num_ranks_here(num_ranks: int) -> int:
    """How many of the ranks this host has: all, unless torchrun says otherwise."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() else num_ranks
