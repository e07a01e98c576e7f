"""A layer's name as a small tensor, so that a compiled block does not depend on it.

As a string it would be a constant of the compiled graph: every layer compiled by itself would be compiled anew, up to
torch's limit of recompilations. As a tensor all layers share one graph.
"""

from __future__ import annotations

import torch

from .errors import ConfigError

MAX_NAME_BYTES = 128


def encode_name(name: str) -> torch.Tensor:
    """`[MAX_NAME_BYTES]` uint8 on the CPU: the name in UTF-8, filled up with zeros.

    Raises:
        ConfigError: a name that is too long, or that is no text.

    >>> decode_name(encode_name("blocks.3.moe"))
    'blocks.3.moe'
    """
    if not isinstance(name, str) or "\0" in name:
        raise ConfigError(f"a layer's name must be a string without zero characters, got {name!r}")
    try:
        letters = name.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ConfigError(f"a layer's name must be text that UTF-8 can write, got {name!r}") from error
    if len(letters) > MAX_NAME_BYTES:
        raise ConfigError(f"a layer's name must have at most {MAX_NAME_BYTES} bytes, {name!r} has {len(letters)}")
    with torch.inference_mode(False):  # it is saved for backward
        return torch.tensor([*letters, *[0] * (MAX_NAME_BYTES - len(letters))], dtype=torch.uint8, device="cpu")


def decode_name(encoded: torch.Tensor) -> str:
    """The name that `encode_name` encoded."""
    return encoded.numpy().tobytes().rstrip(b"\0").decode()
