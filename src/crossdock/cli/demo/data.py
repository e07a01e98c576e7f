"""Real text as bytes: the sources and documentation strings of Python's standard library, or a path of the user's."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from crossdock.errors import InvalidInput

_MAX_BYTES = 8_000_000  # far more than a demo reads; keeps a whole disk passed as --data from being read
_MIN_BYTES = 20_000
_HELD_OUT = 0.05
# Tables and test data rather than text that someone wrote to be read.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "__pycache__",
}


@dataclass(frozen=True, eq=False)
class Text:
    """Text to learn from, and text that is held out to measure what was learned.

    Attributes:
        source: where it came from, for people.
        train: `[N]` uint8.
        held_out: `[M]` uint8: stretches of all parts of the text, none of them in `train`.
    """

    source: str
    train: Tensor
    held_out: Tensor

    def batch(self, num_sequences: int, seq_len: int, generator: torch.Generator, *, held_out: bool = False) -> Tensor:
        """Random sequences: `[num_sequences, seq_len + 1]` int64 on the CPU, each with the byte that follows it."""
        text = self.held_out if held_out else self.train
        starts = torch.randint(len(text) - seq_len, (num_sequences, 1), generator=generator)
        return text[starts + torch.arange(seq_len + 1)].long()


@cache
def load_text(path: Path | None) -> Text:
    """The text of a file, of all text files of a folder, or (None) of the standard library; read once by a process.

    Raises:
        InvalidInput: a path that cannot be read or holds too little text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    source = f"the standard library of Python {sysconfig.get_python_version()}" if path is None else str(path)
    content = b"".join(_contents(root, "*.py" if path is None else "*"))[:_MAX_BYTES]
    if len(content) < _MIN_BYTES:
        raise InvalidInput(f"{source} holds {len(content)} bytes of UTF-8 text, the demo needs at least {_MIN_BYTES}")
    return Text(source, *_split(torch.frombuffer(bytearray(content), dtype=torch.uint8)))


def _contents(root: Path, pattern: str) -> Iterator[bytes]:
    size = 0
    for file in [root] if root.is_file() else sorted(root.rglob(pattern)):
        hidden = _LEFT_OUT.intersection(file.relative_to(root).parts) or file.name.startswith(".")
        if size < _MAX_BYTES and file.is_file() and not hidden:
            content = _text_of(file)
            size += len(content)
            yield content


def _text_of(file: Path) -> bytes:
    """The file's bytes; empty if it is not UTF-8 text or may not be read."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES)
        content.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in content else content


def _split(content: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the text into 40 stretches and hold out the end of each, so that both parts see all kinds of it."""
    stretches = content[: len(content) // 40 * 40].reshape(40, -1)
    border = int(stretches.shape[1] * (1 - _HELD_OUT))
    return stretches[:, :border].reshape(-1), stretches[:, border:].reshape(-1)
