"""The public names: one sorted list a package, complete, documented."""

from __future__ import annotations

import inspect
import types

import pytest

import crossdock
import crossdock.testing

PACKAGES = [crossdock, crossdock.testing]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_is_sorted_and_complete(package: types.ModuleType):
    public = [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, types.ModuleType)
    ]
    modules_named = [name for name in package.__all__ if isinstance(getattr(package, name), types.ModuleType)]
    dunders_named = [name for name in package.__all__ if name.startswith("__")]
    assert package.__all__ == sorted({*public, *modules_named, *dunders_named})


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_documented(package: types.ModuleType):
    undocumented = [
        name
        for name in package.__all__
        if not name.startswith("__") and not (inspect.getdoc(getattr(package, name)) or "").strip()
    ]
    assert undocumented == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_method_is_documented(package: types.ModuleType):
    classes = [
        value for value in vars(package).values() if inspect.isclass(value) and value.__name__ in package.__all__
    ]
    undocumented = [
        f"{owner.__name__}.{name}"
        for owner in classes
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod))
        and not (inspect.getdoc(getattr(owner, name)) or "").strip()
    ]
    assert undocumented == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_classes_and_functions_say_where_they_are_public(package: types.ModuleType):
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__name__ == name
            assert value.__module__.startswith("crossdock")
