"""Fail if anything outside zero's tiers asks which tier one is, so that a new tier is added in one room.

A tier knows what it is like (`near`, `stored`, ...) and does what differs. The settings, where a tier is a
word, may compare the words; nothing else may, nor compare the tiers themselves with one that is named.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "zero" / "src" / "zero"
EXEMPT = {"tiers", "config"}
WORDS = {"device", "host", "disk"}
TIERS = {"ON_DEVICE", "ON_HOST", "ON_DISK"}


def problems(path: Path, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            found = [tier for operand in _compared(node) if (tier := _tier(operand))]
            yield from (f"{name}:{node.lineno}: asks whether a tier is {tier}" for tier in found)
        if isinstance(node, (ast.MatchValue, ast.MatchSingleton)) and (tier := _tier(node.value)):
            yield f"{name}:{node.lineno}: asks whether a tier is {tier}"


def _compared(node: ast.Compare) -> Iterator[ast.AST]:
    """What is compared; of `word in keys`, where the keys are not written out, nothing."""
    operands = [node.left, *node.comparators]
    displays = (ast.Tuple, ast.List, ast.Set)
    if isinstance(node.ops[0], (ast.In, ast.NotIn)) and not isinstance(operands[1], displays):
        return
    for operand in operands:
        yield from operand.elts if isinstance(operand, displays) else [operand]


def _tier(node: object) -> str:
    """The tier that a node names; "" for none."""
    if isinstance(node, ast.Constant) and node.value in WORDS:
        return repr(node.value)
    return node.id if isinstance(node, ast.Name) and node.id in TIERS else ""


def main() -> int:
    paths = {path: path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py"))}
    found = [
        problem
        for path, place in paths.items()
        if place.parts[0] not in EXEMPT
        for problem in problems(path, place.as_posix())
    ]
    print("\n".join(found) or "tier lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
