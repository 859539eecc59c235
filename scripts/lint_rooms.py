"""Fail if a room of zero or accelz imports one that is not below it, or if modules import each other.

Training imports no conversion of weights (`TOOLS`), and files are read without torch (`LIGHT`).

A room is a package or a module directly under one of the two. Their order is that of the tables in
docs/architecture.md and docs/architecture-accelz.md, lowest first, and the order of a package's modules that
of the table in its docstring, if it has one; so this check also keeps the tables complete and correct.
Imports inside functions count, those for types alone do not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"zero": ROOT / "zero" / "src", "accelz": ROOT / "accelz" / "src"}
TABLES = {"zero": ROOT / "docs/architecture.md", "accelz": ROOT / "docs/architecture-accelz.md"}
TOOLS = {"sources", "consolidate"}
USERS = TOOLS | {"planning", "cli"}
ON_SAVING = {"zero.whole.export"}
"""What may import the rooms of conversion, rooms and a module: a job that only trains loads all others."""
FLOORS = {"zero": 10, "accelz": 11}
"""How many rooms may import one another in a chain."""
LIGHT = ("zero.files", "zero.sources")
HEAVY = {"zero.files.dtypes"}
"""All modules of these packages, except these modules, import no torch, and nothing that does."""
ON_DEMAND = {"zero.config": {"zero.config.training"}}
"""What packages import only when a name of theirs is asked for."""


def modules(package: str) -> dict[str, Path]:
    """The dotted name and the file of every module in a package."""
    source = SOURCES[package]
    paths = sorted((source / package).rglob("*.py"))
    names = (".".join(path.relative_to(source).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The known modules that a file imports. A module imported by name from its package counts as itself."""
    found = set()
    for node in _running(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                name if (name := f"{node.module}.{alias.name}") in known else node.module
                for alias in node.names
            }
    return found & set(known)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node`, except those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from _running(child)


def cycles(graph: dict[str, set[str]]) -> Iterator[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "modules that import each other: " + " -> ".join(reversed(error.args[1]))


def misplaced(graph: dict[str, set[str]], order: list[str]) -> Iterator[str]:
    """Rooms that are missing from the table or only there, and imports of rooms that are not below."""
    (package,) = {name.split(".")[0] for name in graph}
    rooms = {_room(name) for name in graph} - {package, "__main__"}
    table = TABLES[package].name
    yield from (f"{table} has no room {room!r}" for room in sorted(rooms - set(order)))
    yield from (f"{table} has {room!r}, but {package} does not" for room in sorted(set(order) - rooms))
    place = {room: i for i, room in enumerate(order)}
    for name, below in sorted(graph.items()):
        for other in sorted(below):
            room, used = _room(name), _room(other)
            if used == package and room in place:
                yield f"{name} imports {package} itself, which is above all rooms"
            elif room != used and place.get(used, -1) >= place.get(room, len(place)):
                yield f"{name} imports {other}: {used!r} is not below {room!r}"


def rooms_below(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    below: dict[str, set[str]] = {}
    for name, others in graph.items():
        below.setdefault(_room(name), set()).update(_room(other) for other in others)
    packages = {name.split(".")[0] for name in graph}
    return {room: under - packages - {room} for room, under in below.items() if room not in packages}


def too_high(graph: dict[str, set[str]], floors: int) -> Iterator[str]:
    """The longest chain of rooms that import one another, if it is longer than the house may be high."""
    below = rooms_below(graph)
    chains: dict[str, list[str]] = {}
    for room in TopologicalSorter(below).static_order():
        chains[room] = [room, *max((chains[other] for other in below[room]), key=len, default=[])]
    longest = max(chains.values(), key=len)
    if len(longest) > floors:
        yield f"{len(longest)} floors, and there may be {floors}: " + " -> ".join(longest)


def converting(graph: dict[str, set[str]]) -> Iterator[str]:
    """Imports of the rooms of conversion by rooms that a training job loads."""
    for name, below in sorted(graph.items()):
        for other in sorted(below):
            if _room(other) in TOOLS and _room(name) not in USERS and name not in ON_SAVING:
                yield f"{name} imports {other}: training converts no weights"


def heavy(graph: dict[str, set[str]], using_torch: set[str]) -> Iterator[str]:
    """What imports torch, or accelz, below the packages that need neither. using_torch: modules that do."""
    left = sorted(name for name in graph if name.startswith(LIGHT) and name not in HEAVY)
    reached = {name: name for name in left}  # with the module that imports each
    while left:
        name = left.pop()
        if name in using_torch:
            yield f"{name} imports torch, and {reached[name]} does without"
        packages = {name.rpartition(".")[0]} & graph.keys()  # importing a module imports its package
        known = reached.keys() | ON_DEMAND.get(name, set()) | {"zero"}
        for other in sorted((graph[name] | packages) - known):
            reached[other] = name
            left.append(other)


def uses_torch(path: Path) -> bool:
    nodes = list(_running(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] in ("torch", "accelz") for name in names)


def disordered(package: str, listed: list[list[str]], graph: dict[str, set[str]]) -> Iterator[str]:
    """What is wrong with the table of a package's modules, which are listed a row at a time, lowest first:
    modules that are missing or only there, and imports of modules in later rows."""
    inside = f"{package}."
    row = {name: i for i, names in enumerate(listed) for name in names}
    short = {name: name.removeprefix(inside).split(".")[0] for name in graph if name.startswith(inside)}
    yield from (f"the docstring of {package} has no {name!r}" for name in sorted({*short.values()} - {*row}))
    yield from (f"the docstring of {package} has {name!r}" for name in sorted({*row} - {*short.values()}))
    for name in sorted(short):
        for other in sorted(graph[name] & set(short)):
            if row.get(short[other], -1) > row.get(short[name], len(row)):
                yield f"{name} imports {other}, which comes after it in the docstring of {package}"


def listed_modules(docstring: str) -> list[list[str]]:
    """The names at the beginning of each row of a docstring's table; none without a table."""
    _, found, table = docstring.partition("Modules, lowest first:\n\n")
    rows = table.partition("\n\n")[0].splitlines() if found else []
    return [match[0].split(", ") for line in rows if (match := re.match(r"\w+(, \w+)*", line))]


def _room(name: str) -> str:
    """The room of a module; for the package itself, the package."""
    return [*name.split("."), name][1]


def written_order(package: str) -> list[str]:
    """The rooms of a package in the order of its table: the names in backquotes in the first column."""
    lines = TABLES[package].read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return [name.rstrip("/") for cell in cells for name in re.findall(r"`([a-z_]+/?)`", cell)]


def main() -> int:
    found: list[str] = []
    for package in SOURCES:
        known = modules(package)
        graph = {name: imported(path, known) - {name} for name, path in known.items()}
        wrong = [*cycles(graph), *misplaced(graph, written_order(package))]
        found += wrong or too_high(graph, FLOORS[package])
        if package == "zero":
            found += converting(graph)
            found += heavy(graph, {name for name, path in known.items() if uses_torch(path)})
        for name, path in known.items():
            listed = listed_modules(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
            found += disordered(name, listed, graph) if listed else []
    print("\n".join(found) or "room lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
