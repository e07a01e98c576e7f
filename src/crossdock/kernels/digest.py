"""A digest of the kernels' code, by which a record of a run on GPUs tells which kernels it was made with."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

_LEFT_OUT = (Path(__file__).name, "interpret.py", "launch.py")


def kernels_digest() -> str:
    """Hexadecimal digest of this package: of the syntax of its modules, without docstrings and comments.

    Left out are this module, what no GPU runs, and the launcher, which knows no kernel and has GPU tests of its own.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in _LEFT_OUT:
            digest.update(f"{path.name}\n{syntax(path.read_text())}\n".encode())
    return digest.hexdigest()


def syntax(source: str) -> str:
    r"""The syntax tree of a module in words, the same whatever its comments, docstrings and layout are.

    >>> syntax("def f():  # one\n    'two'\n    return 1") == syntax("def f():\n    return (1)")
    True
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]) and _has_docstring(node):
            del body[0]
    return _told(tree)


def _told(value: object) -> str:
    """A tree in words. Fields that are empty are left out: newer Pythons have more of them."""
    if isinstance(value, ast.AST):
        fields = [f"{name}={_told(field)}" for name, field in ast.iter_fields(value) if field not in (None, [])]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_told, value))}]"
    return repr(value)


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


def _is_docstring(statement: ast.AST) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)
