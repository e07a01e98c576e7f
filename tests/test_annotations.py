"""What public names return and hold is public too, so that a program can be annotated with `crossdock` alone."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator

import pytest

import crossdock as cd

FOR_AUTHORS = {"Backend"}  # who writes one finds what it is handed in `crossdock.backends.base`


def hints(value: object) -> Iterator[object]:
    """What a function returns; what the methods, properties and fields of a class give."""
    if inspect.isfunction(value):
        yield typing.get_type_hints(value).get("return")
    if not inspect.isclass(value):
        return
    for name, part in inspect.getmembers(value):
        function = part.fget if isinstance(part, property) else part
        if not name.startswith("_") and (inspect.isfunction(function) or inspect.ismethod(function)):
            yield typing.get_type_hints(function).get("return")
    if dataclasses.is_dataclass(value):
        shown = typing.get_type_hints(value)
        yield from (shown[field.name] for field in dataclasses.fields(value) if not field.name.startswith("_"))


def classes(hint: object) -> Iterator[type]:
    """Those of ours that an annotation names, however deep."""
    if isinstance(hint, type) and hint.__module__.startswith("crossdock"):
        yield hint
    for argument in typing.get_args(hint):
        yield from classes(argument)


@pytest.mark.parametrize("name", [name for name in cd.__all__ if name not in FOR_AUTHORS])
def test_what_a_public_name_gives_is_public(name: str):
    given = {found for hint in hints(getattr(cd, name)) for found in classes(hint)}
    assert {each.__name__ for each in given} <= set(cd.__all__)


def test_what_is_looked_for_is_found():
    assert {found for hint in hints(cd.DispatcherStats) for found in classes(hint)} == {cd.LayerStats}
    assert {found for hint in hints(cd.OverflowGuard) for found in classes(hint)} == {cd.GuardStats}
