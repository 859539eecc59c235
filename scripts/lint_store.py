"""Fail if anything but accelz.ranks.bounded_store reaches for one of torch's stores.

A call to such a store has no limit if the store's host is silent. What holds a BoundedStore cannot make one;
how a store is got hold of is checked here, by name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORES = {"TCPStore", "FileStore", "PrefixStore", "_get_default_store"}
EXEMPT = {"accelz/src/accelz/ranks/bounded_store.py", "accelz/src/accelz/conformance/cluster.py"}
"""The second hosts the store of the kit's own ranks in a process that ends them when they hang."""


def problems(path: Path, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for used in _names(node):
            if used in STORES:
                yield f"{name}:{getattr(node, 'lineno', 0)}: {used} has no limit; go through bounded_store"
        if isinstance(node, ast.Attribute) and node.attr == "for_torch" and name != _GIVES_IT_TO_TORCH:
            yield f"{name}:{node.lineno}: calls to a native store have no limit; only torch is given one"


_GIVES_IT_TO_TORCH = "accelz/src/accelz/ranks/attempts.py"


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return []


def main() -> int:
    sources = sorted(path for path in ROOT.glob("*/src/**/*.py"))
    named = {path: path.relative_to(ROOT).as_posix() for path in sources}
    found = [what for path, name in named.items() if name not in EXEMPT for what in problems(path, name)]
    print("\n".join(found) or "store lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
