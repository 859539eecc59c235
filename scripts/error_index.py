"""The error index of the documentation: every typed error of zero and accelz, with its messages, from source.

A message is the text given to an error's class, with what is filled in by its name: 'unit {unit}'. A text
that is made elsewhere is looked up: what a name of the module stands for, or what a function of it returns.
`problems()` are classes that docs/debug.md does not explain; `make lints` runs `python -m
scripts.error_index`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.paths import ROOT

SOURCES = {"zero": ROOT / "zero/src/zero", "accelz": ROOT / "accelz/src/accelz"}
EXPLAINED = ROOT / "docs/debug.md"
_PUBLIC = re.compile(r'^    "(\w+Error)",$', re.MULTILINE)
_ROW = re.compile(r"^\| `(\w+Error)`([^|]*)\| (.*) \| (.*) \|$", re.MULTILINE)


@dataclass
class ErrorClass:
    """name: of the class. home: its package. cause: its docstring."""

    name: str
    home: str
    cause: str = ""
    advice: list[tuple[str, str, str]] = field(default_factory=list)
    """Rows of docs/debug.md: when (or nothing), what it means, what to do."""
    messages: dict[str, str] = field(default_factory=dict)
    """Text → the room that raises it."""


class Module:
    """One source file: its values and functions, by name, to look up the texts that they make."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.values = {
            target.id: node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.functions = {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)
        }

    def texts(self, node: ast.expr, depth: int = 3) -> list[str]:
        """The texts that an expression may be; empty if it has none of its own."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return ["".join(map(_part, parts))]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                firsts, lasts = self.texts(left, depth), self.texts(right, depth)
                return [f + s for f in firsts or [_name(left)] for s in lasts or [_name(right)]]
            case ast.IfExp(body=body, orelse=orelse):
                return self.texts(body, depth) + self.texts(orelse, depth)
            case ast.Name(id=name) if name in self.values and depth:
                return self.texts(self.values[name], depth - 1)
            case ast.Call(func=ast.Attribute(value=value, attr="format" | "strip" | "rstrip")):
                return self.texts(value, depth)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if depth:
                made = self.functions.get(name)
                returned = [n.value for n in ast.walk(made) if isinstance(n, ast.Return)] if made else []
                return [text for value in returned if value for text in self.texts(value, depth - 1)]
        return []


def _part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else _name(node)


def _name(node: ast.expr) -> str:
    """What is filled in, by the name of where it comes from."""
    match node:
        case ast.FormattedValue(value=value):
            return _name(value)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"{{{name.strip('_')}}}"
        case ast.Call(func=ast.Name(id="some" | "printable" | "str" | "repr"), args=[first, *_]):
            return _name(first)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return f"{{{name.strip('_')}}}"
        case ast.Subscript(value=value):
            return _name(value)
    return "{…}"


def index() -> dict[str, ErrorClass]:
    """Every public error class, by name."""
    classes: dict[str, ErrorClass] = {}
    for home, folder in SOURCES.items():
        for name in _PUBLIC.findall((folder / "__init__.py").read_text(encoding="utf-8")):
            classes[name] = ErrorClass(name, home)
    for name, when, cause, cure in _ROW.findall(EXPLAINED.read_text(encoding="utf-8")):
        if name in classes:
            classes[name].advice.append((when.strip(), cause, cure))
    for home, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            _read(Module(path), _room(home, path.relative_to(folder)), classes)
    return dict(sorted(classes.items()))


def _room(home: str, path: Path) -> str:
    return f"{home}.{path.parts[0].removesuffix('.py')}"


def _read(module: Module, room: str, classes: dict[str, ErrorClass]) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            classes[node.name].cause = ast.get_docstring(node) or ""
        if isinstance(node, ast.Call) and node.args and (name := _called(node.func)) in classes:
            for text in module.texts(node.args[0]):
                classes[name].messages.setdefault(" ".join(text.split()), room)


def _called(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def problems() -> Iterator[str]:
    for error in index().values():
        if not error.cause:
            yield f"{error.home}.{error.name} has no docstring, which says the cause"
        if not error.advice and error.name not in {"ZeroError", "AccelzError"}:
            yield f"{EXPLAINED.relative_to(ROOT)}: no row says what {error.name} means and what to do"


def page(error: ErrorClass) -> str:
    """A class as a page of the site."""
    lines = [f"# {error.name}", "", f"`{error.home}.{error.name}`: {error.cause}", ""]
    for when, cause, cure in error.advice:
        lines += [f"**{when.strip() or 'It means'}:** {cause}.", "", f"**What to do:** {cure}.", ""]
    lines += ["## Messages", ""] if error.messages else []
    rooms = sorted(set(error.messages.values()))
    for room in rooms:
        texts = sorted(text for text, where in error.messages.items() if where == room)
        lines += [f"From `{room}`:", "", *(f"- {_code(text)}" for text in texts), ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`` {text} ``"


def overview(errors: dict[str, ErrorClass]) -> str:
    lines = [
        "# Error index",
        "",
        "Every error class and message, taken from the source. In braces stands what a ",
    ]
    lines[-1] += "message fills in. [Debug](../debug.md) says what to do in general."
    lines += ["", "| error | what it means | messages |", "| --- | --- | --- |"]
    for error in errors.values():
        cause = error.cause.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| [{error.name}]({error.name}.md) | {cause} | {len(error.messages)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    found = list(problems())
    print("\n".join(found) or "error index: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
