"""Fail if the engine knows a device: a device module, a vendor library or a device-name string.

Where the engine would need to ask which device this is, accelz lacks an operation or a capability: add it
there. The imports between packages are checked too: accelz must import neither zero nor any backend, no
backend another, and all of them of accelz only what is public: `__all__`, and the modules that its docstring
lists.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import accelz

ROOT = Path(__file__).resolve().parent.parent
DEVICE_MODULES = {"cuda", "xpu", "cpu", "hpu", "mps", "mtia", "xla"}
DEVICE_NAMES = DEVICE_MODULES | {"npu", "sim"}
BACKENDS = {"accelz_cpu", "accelz_cuda", "accelz_xpu", "accelz_hpu", "accelz_sim"}
VENDOR = {"habana_frameworks", "intel_extension_for_pytorch", "torch_xla", "cuda", "pynvml"}
FORBIDDEN_IMPORTS = {
    "zero": BACKENDS | VENDOR,
    "accelz": BACKENDS | VENDOR | {"zero"},
    **{name: (BACKENDS - {name}) | {"zero"} for name in BACKENDS},
}


def problems(path: Path, package: str) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for name in _imports(node):
            if name.split(".")[0] in FORBIDDEN_IMPORTS[package]:
                yield f"{where}: {package} must not import {name}"
        if package != "accelz":
            inner = [name for name in _of_accelz(node) if name not in PUBLIC]
            yield from (f"{where}: {name} is not public (see accelz's docstring)" for name in inner)
        if package == "zero":
            yield from (f"{where}: {what}" for what in _device_knowledge(node))


PUBLIC = {
    "accelz",
    *(f"accelz.{name}" for name in accelz.__all__),
    *re.findall(r"^(accelz\.[\w.]+)  ", accelz.__doc__ or "", re.MULTILINE),
}
"""What others may import of accelz, by full name: itself, its names, and modules."""


def _of_accelz(node: ast.AST) -> list[str]:
    """The full names of what is imported of accelz; of a public module's names, the module."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module in PUBLIC - {"accelz"}:
        found = [f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")]
    elif isinstance(node, ast.ImportFrom):
        found = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "accelz":
        found = [f"accelz.{node.attr}"]
    else:
        found = []
    return [name for name in found if name.split(".")[0] == "accelz"]


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _device_knowledge(node: ast.AST) -> Iterator[str]:
    if (
        isinstance(node, ast.Attribute)
        and node.attr in DEVICE_MODULES
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ):
        yield f"uses torch.{node.attr}; go through accelz"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        head = node.value.split(":")[0]
        if head in DEVICE_NAMES:
            yield f"names the device {node.value!r}; go through accelz"
    if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
        yield "asks is_cuda; go through accelz.capabilities"


def _sources(package: str) -> Path:
    return ROOT / ("examples/sim_backend" if package == "accelz_sim" else package) / "src"


def main() -> int:
    found = [
        problem
        for package in FORBIDDEN_IMPORTS
        for path in sorted(_sources(package).rglob("*.py"))
        for problem in problems(path, package)
    ]
    print("\n".join(found) or "device lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
