"""Hooks of mkdocs.yml: pages of the site that no file under docs/ has, and links that lead out of docs/.

Made at every build: the error index, from the source; CHANGELOG.md and CONTRIBUTING.md as pages; and a page
of each file or folder of the repository that a page links to, so that the site needs no other. In `nav`, a
folder with a slash stands for all of its pages.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import error_index  # noqa: E402

OF_THE_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
_IMAGES = {".svg", ".png"}


def on_config(config: Any) -> Any:
    config.nav = [_expanded(entry) for entry in config.nav]
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(below) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_expanded(each) for each in entry]
    if entry == "errors/":
        return ["errors/index.md", *(f"errors/{name}.md" for name in error_index.index())]
    if entry.endswith("/"):
        names = sorted(path.name for path in (ROOT / "docs" / entry).glob("*.md"))
        return [
            f"{entry}{name}" for name in sorted(names, key=lambda name: name not in {"README.md", "index.md"})
        ]
    return entry


def on_files(files: Files, *, config: Any) -> Files:
    errors = error_index.index()
    made = {"errors/index.md": error_index.overview(errors)}
    made |= {f"errors/{name}.md": error_index.page(error) for name, error in errors.items()}
    made |= {page: (ROOT / source).read_text(encoding="utf-8") for source, page in OF_THE_ROOT.items()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for target in sorted({t for page in files.documentation_pages() for t in _outside(page)}):
        files.append(_copy(config, target))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    name = page.file.src_uri
    return _LINK.sub(lambda link: _link(name, link[1]), markdown)


def _outside(page: File) -> set[Path]:
    """What a page links to in the repository, outside of docs/ and of what else is a page."""
    text = page.content_string
    places = (_target(page.src_uri, link) for link in _LINK.findall(text))
    return {place for place in places if place and _page(place) is None and place.exists()}


def _target(name: str, link: str) -> Path | None:
    """The place in the repository that a link of a page means; None for one that is made at the build."""
    if name.startswith("errors/"):
        return None
    sources = {page: source for source, page in OF_THE_ROOT.items()}
    copied = (
        name.removeprefix("source/").removesuffix(".md") if name.startswith("source/") else f"docs/{name}"
    )
    origin = sources.get(name, copied)
    return Path(os.path.normpath(ROOT / PurePosixPath(origin).parent / link))


def _page(target: Path) -> str | None:
    """The page of the site that a place in the repository is, from the root of docs/."""
    place = target.relative_to(ROOT).as_posix()
    is_page = place.startswith("docs/") and not target.is_dir()
    return OF_THE_ROOT.get(place) or (place.removeprefix("docs/") if is_page else None)


def _link(name: str, link: str) -> str:
    target = _target(name, link)
    if target is None or not target.exists():
        return link
    to = _page(target) or _copied(target)
    return PurePosixPath(os.path.relpath(to, PurePosixPath(name).parent)).as_posix()


def _copied(target: Path) -> str:
    place = target.relative_to(ROOT).as_posix()
    return f"source/{place}" if target.suffix in _IMAGES else f"source/{place}.md"


def _copy(config: Any, target: Path) -> File:
    """A file of the repository as a page, an image as it is, a folder as the list of its files or as what
    changes from script to script."""
    place = target.relative_to(ROOT).as_posix()
    if target.suffix in _IMAGES:
        file = File.generated(config, _copied(target), abs_src_path=str(target))
    elif pairs := _pairs(target):
        file = File.generated(config, _copied(target), content=f"# {place}\n\n{pairs}")
    elif target.is_dir():
        names = sorted(path.name for path in target.iterdir() if not path.name.startswith(("_", ".")))
        listed = "\n".join(f"- `{name}`" for name in names)
        file = File.generated(
            config, _copied(target), content=f"# {place}\n\nIn the repository:\n\n{listed}\n"
        )
    elif target.suffix == ".ipynb":
        file = File.generated(config, _copied(target), content=_notebook(target))
    else:
        fence = f"````{_LANGUAGES.get(target.suffix, 'text')}\n{target.read_text(encoding='utf-8')}\n````"
        file = File.generated(config, _copied(target), content=f"# {place}\n\n{fence}\n")
    file.inclusion = InclusionLevel.NOT_IN_NAV
    return file


def _pairs(folder: Path) -> str:
    """Scripts before and after a change, whole, with what goes and what comes marked."""
    parts = []
    for before in sorted(folder.glob("*_before.py")):
        after = before.with_name(before.name.replace("_before", "_after"))
        texts = [path.read_text(encoding="utf-8").splitlines() for path in (before, after)]
        names, context = (before.name, after.name), max(map(len, texts))
        lines = difflib.unified_diff(*texts, *names, n=context, lineterm="")
        marked = "\n".join(line for line in lines if not line.startswith("@@"))
        parts.append(f"## {before.name} and {after.name}\n\n```diff\n{marked}\n```\n")
    return "\n".join(parts)


def _notebook(path: Path) -> str:
    """A notebook's cells and what they printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", [])) for output in cell.get("outputs", []))
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed else []
    return "\n\n".join(parts) + "\n"
