"""What the adapters use of Lightning's private names is listed in one place, and is there."""

from __future__ import annotations

import ast
import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest

from zero.integrations import fabric, lightning

MODULES = [fabric, lightning]


def resolve(name: str) -> Any:
    """The object of a dotted name; `X()` is an object of a class that is made without arguments."""
    parts = name.split(".")
    length = next(i for i, part in enumerate(parts) if part[0] == "_" or part[0].isupper())
    found: Any = importlib.import_module(".".join(parts[:length]))
    for part in parts[length:]:
        found = getattr(found, part.removesuffix("()"))
        found = found() if part.endswith("()") else found
    return found


@pytest.mark.parametrize("name", [name for module in MODULES for name in module.PRIVATE_NAMES])
def test_a_private_name_is_there(name: str) -> None:
    try:
        resolve(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(
            f"Lightning no longer has {name}, which zero.integrations uses: see what took its place, and "
            f"mend the adapter ({error})"
        )


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_private_names_are_listed(module: ModuleType) -> None:
    tree = list(ast.walk(ast.parse(inspect.getsource(module))))
    own = {node.name for node in tree if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    attributes = [node for node in tree if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    used = {node.attr for node in attributes} - own
    used |= {alias.name for node in tree if isinstance(node, ast.ImportFrom) for alias in node.names}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private <= {name.rsplit(".", 1)[1] for name in module.PRIVATE_NAMES}
