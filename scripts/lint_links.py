"""Fail if the documentation links to what is not there, or names a file of the project that is not there.

Links are followed to files and to headings within them. In the documents for contributors, names in
backquotes that look like files or folders of the project (`tiers/tier.py`, `test_parity.py`, `zero/tiers/`)
have to be the end of the path of at least one.

Run as `python -m scripts.lint_links`, in the project's root.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from scripts.paths import ROOT

FOR_CONTRIBUTORS = ("CONTRIBUTING.md", "docs/architecture", "docs/invariants.md", "docs/decisions/")
_HIDDEN = (".ci", ".github")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^( {0,3})```.*?^\1```", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|toml|yml|yaml|h|cpp|cu)))`")


def project_files(root: Path = ROOT) -> list[str]:
    """The files of the project, by their paths from the root; not what tools and builds leave in it."""
    names = []
    for folder, below, files in os.walk(root):
        below[:] = [
            name for name in below if name in _HIDDEN or not name.startswith((".", "__", "build", "runs"))
        ]
        names += [Path(folder, name).relative_to(root).as_posix() for name in files]
    return sorted(names)


def problems(name: str, files: list[str], root: Path = ROOT) -> Iterator[str]:
    """What is wrong with a document, given by its path from the root."""
    text = _CODE.sub("", (root / name).read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if "://" not in link and not link.startswith("mailto:"):
            yield from (f"{name}: {link}: {reason}" for reason in _broken(name, link, root))
    if name.startswith(FOR_CONTRIBUTORS):
        paths = _ends(tuple(files))
        yield from (f"{name}: there is no {each}" for each in _NAME.findall(text) if each not in paths)


def headings(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", _CODE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).lower() for line in lines)
    return {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in plain}


def _broken(name: str, link: str, root: Path) -> Iterator[str]:
    place, _, anchor = link.partition("#")
    target = (root / name).parent / place if place else root / name
    if not target.exists():
        yield "no such file"
    elif anchor and target.suffix == ".md" and anchor not in headings(target.read_text(encoding="utf-8")):
        yield "no such heading"


@cache
def _ends(files: tuple[str, ...]) -> set[str]:
    """The ends of all paths of files, and of folders with a slash after them."""
    paths = {PurePosixPath(name) for name in files}
    folders = {folder for path in paths for folder in path.parents} - {PurePosixPath()}
    found = {"/".join(path.parts[i:]) for path in paths for i in range(len(path.parts))}
    return found | {f"{'/'.join(each.parts[i:])}/" for each in folders for i in range(len(each.parts))}


def main() -> int:
    files = project_files()
    documents = [name for name in files if name.endswith(".md")]
    found = [problem for name in documents for problem in problems(name, files)]
    print("\n".join(found) or "link lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
