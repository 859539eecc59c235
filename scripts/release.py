"""Makes the wheels of a release: `python -m scripts.release https://HOST/OWNER/NAME --out dist`.

The URL is that of the public repository. It is written into the packages' metadata, and into the links of
their READMEs, which an index shows without the files beside them. Wheels with a native library get the
manylinux tag of the oldest glibc that has all of its symbols: to serve older systems, build on one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
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
    name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return wheel.with_name(Path(name).name)


def build(package: str, url: str, out: Path) -> Path:
    version = (ROOT / "VERSION").read_text().strip()
    blob = f"{url}/blob/v{version}"
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("__pycache__", "build", "dist")
        sources = shutil.copytree(ROOT / package, Path(folder, package), ignore=ignored)
        for name, change in (("pyproject.toml", with_urls), ("README.md", absolute_links)):
            path = sources / name
            of = (url, blob) if change is with_urls else (package, blob)
            path.write_text(change(path.read_text(), *of))
        made = Path(folder, "wheels")
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", str(made), str(sources)], check=True)
        (wheel,) = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        ready = tagged(wheel)
        return Path(shutil.move(ready, out / ready.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    given = parser.parse_args()
    for package in PACKAGES:
        print(build(package, given.url.rstrip("/"), given.out))


if __name__ == "__main__":
    main()
