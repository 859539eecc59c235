"""Makes a release: `python -m scripts.release https://HOST/OWNER/NAME --out dist`. See docs/release.md.

Wheels and source archives of all packages are built twice and have to have the same bytes; each has to carry
its licence. The URL is that of the public repository: it is written into the packages' metadata, and into the
links of their READMEs, which an index shows without the files beside them. Wheels with a native library get
the manylinux tag of the oldest glibc that has all of its symbols: to serve older systems, build on one.
scripts/try_release.py installs what was made and uses it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from scripts.paths import ROOT

PACKAGES = ("accelz", "accelz_cpu", "accelz_cuda", "accelz_xpu", "accelz_hpu", "zero")
SYSTEM = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
"""What a wheel may use of a system under any manylinux tag, as far as glibc's version allows it."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s]+)(?=\))")
_SYMBOL = re.compile(rb"GLIBC_(\d+)\.(\d+)")
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")


class ReleaseError(Exception):
    """A release cannot be made."""


def absolute_links(text: str, folder: str, blob: str) -> str:
    """A README's relative links as ones into the repository. folder: that of the README, from the root."""

    def into_repository(link: re.Match[str]) -> str:
        path, hash_, heading = link[1].partition("#")
        target = (ROOT / folder / path).resolve()
        if not target.exists():
            raise ReleaseError(f"{folder}/README.md links to {link[1]}, which is not there")
        return f"{blob}/{target.relative_to(ROOT).as_posix()}{hash_}{heading}"

    return _LINK.sub(into_repository, text)


def with_urls(pyproject: str, url: str, blob: str) -> str:
    """The metadata with the addresses that an index shows beside a package."""
    urls = {
        "Documentation": f"{blob}/docs/index.md",
        "Changelog": f"{blob}/CHANGELOG.md",
        "Issues": f"{url}/issues",
        "Repository": url,
    }
    table = "\n".join(["[project.urls]", *(f'{name} = "{value}"' for name, value in urls.items())])
    return f"{pyproject.rstrip()}\n\n{table}\n"


def glibc(library: bytes) -> tuple[int, int]:
    """The oldest version of glibc that has all symbols that a native library takes from it."""
    return max(((int(major), int(minor)) for major, minor in _SYMBOL.findall(library)), default=(2, 17))


def manylinux(library: Path) -> str:
    """The platform tag of a native library. Raises ReleaseError if it needs more of a system than glibc."""
    shown = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    if foreign := sorted(set(_NEEDED.findall(shown)) - SYSTEM):
        raise ReleaseError(f"{library.name} needs {', '.join(foreign)} of the system: link it statically")
    header = subprocess.run(["readelf", "-h", library], capture_output=True, text=True, check=True).stdout
    machine = "aarch64" if "AArch64" in header else "x86_64"
    major, minor = glibc(library.read_bytes())
    return f"manylinux_{max(major, 2)}_{max(minor, 17)}_{machine}"


def tagged(wheel: Path) -> Path:
    """The wheel under the name and with the metadata of its manylinux tag; as it is if it is pure Python."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        libraries = [Path(archive.extract(n, folder)) for n in archive.namelist() if n.endswith(".so")]
        tags = {manylinux(library) for library in libraries}
    if not tags:
        return wheel
    tag = max(tags, key=lambda tag: int(tag.split("_")[2]))
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(wheel)]
    variables = os.environ | _time()
    name = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.strip()
    return wheel.with_name(Path(name).name)


def build(package: str, url: str, out: Path) -> tuple[Path, Path]:
    """The package's wheel and source archive, in `out`; their files have the commit's time."""
    version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    blob = f"{url}/blob/v{version}"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("__pycache__", "build", "dist", "*.egg-info")
        sources = shutil.copytree(ROOT / package, Path(folder, package), ignore=ignored)
        if package == "zero":  # whose wheel has its tests: see zero/hatch_build.py
            shutil.copytree(ROOT / "tests", Path(folder, "tests"), ignore=ignored)
        for name, change in (("pyproject.toml", with_urls), ("README.md", absolute_links)):
            path = sources / name
            of = (url, blob) if change is with_urls else (package, blob)
            path.write_text(change(path.read_text(encoding="utf-8"), *of), encoding="utf-8")
        archive = _made(sources, "sdist", out)
        wheel = tagged(_made(sources, "wheel", Path(folder)))
        return Path(shutil.move(wheel, out / wheel.name)), archive


def _made(sources: Path, kind: str, out: Path) -> Path:
    """A wheel or an sdist, by the package's own build backend, in a process of its own."""
    backend = tomllib.loads((sources / "pyproject.toml").read_text(encoding="utf-8"))["build-system"][
        "build-backend"
    ]
    call = f"import {backend} as backend; print(backend.build_{kind}({str(out.resolve())!r}))"
    command, variables = [sys.executable, "-c", call], _environment(sources)
    done = subprocess.run(command, check=False, cwd=sources, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"no {kind} of {sources.name} can be built:\n{done.stdout}{done.stderr}")
    return out / done.stdout.split()[-1]


def _environment(sources: Path) -> dict[str, str]:
    """What makes a build say nothing of when and where it was made."""
    flags = f"-ffile-prefix-map={sources}=. -ffile-prefix-map={tempfile.gettempdir()}=."
    own = _time() | {"CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} {flags}".strip(), "PYTHONHASHSEED": "0"}
    return os.environ | own


def _time() -> dict[str, str]:
    """The time of every file in an archive: SOURCE_DATE_EPOCH, otherwise the commit's. Seconds since 1970."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return {"SOURCE_DATE_EPOCH": given}
    command = ["git", "log", "-1", "--format=%ct"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {"SOURCE_DATE_EPOCH": found.stdout.strip()}


def names(archive: Path) -> list[str]:
    """The files in a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return opened.namelist()
    with tarfile.open(archive) as opened:
        return opened.getnames()


def problems(first: list[Path], second: list[Path]) -> Iterator[str]:
    """What is wrong with two builds of one release: archives without a licence, and those that differ."""
    for archive, again in zip(first, second, strict=True):
        if not any(name.endswith("/LICENSE") for name in names(archive)):
            yield f"{archive.name} has no LICENSE"
        if archive.name != again.name or archive.read_bytes() != again.read_bytes():
            yield f"{archive.name} has other bytes when it is built again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    given = parser.parse_args()
    if given.out.is_dir() and any(given.out.iterdir()):
        sys.exit(f"{given.out} is not empty: a release is made into an empty folder")
    os.environ |= _time()  # of both builds
    with tempfile.TemporaryDirectory() as again:
        builds = [
            [made for package in PACKAGES for made in build(package, given.url.rstrip("/"), out)]
            for out in (given.out, Path(again))
        ]
        if found := list(problems(*builds)):
            sys.exit("\n".join(found))
    print("\n".join(f"{made.stat().st_size:>9,}  {made.name}" for made in builds[0]))


if __name__ == "__main__":
    main()
