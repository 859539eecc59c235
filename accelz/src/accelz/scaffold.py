"""`accelz new`: writes a backend package that installs, is discovered, and says what to implement next.

The templates are the files below `templates/`, with one folder for each part of a package. A `$word` in them
stands for a value of `_values`; a line that consists of a `$word` whose value is empty is left out.
"""

from __future__ import annotations

import keyword
import re
import shutil
import string
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from accelz import discovery
from accelz.errors import AccelzError
from accelz.hooks import API_VERSION
from accelz.version import __version__

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".tmpl"
RESERVED = frozenset({"cpu", "cuda", "hpu", "sim", "xpu", "zero"})
"""Names whose distribution, accelz-NAME, is a first-party package."""
TAKEN = frozenset({"accelz", "privateuseone", "torch"})
"""Names that mean something else beside a backend, in commands, imports and messages."""


class ScaffoldError(AccelzError):
    """A package cannot be written, and nothing has been written."""


@dataclass(frozen=True)
class Package:
    """The package that `accelz new` is asked for.

    name: the backend's name, a lower-case identifier. torch_device: whether `torch.get_device_module` serves
    the device, so that no roles need be written. device_type: torch's name for the device; None means `name`
    if torch_device is set, else a stand-in on the host. library: the module that makes it a device of torch,
    only with torch_device. collectives: the name of its communication library in torch.distributed; None
    stages collectives through the host.
    """

    name: str
    torch_device: bool = False
    device_type: str | None = None
    library: str | None = None
    collectives: str | None = None

    @property
    def module(self) -> str:
        return f"accelz_{self.name}"

    @property
    def distribution(self) -> str:
        return self.module.replace("_", "-")

    @property
    def library_distribution(self) -> str:
        """The distribution that has the library here, or what most projects call it where the library is not
        installed; "" where no distribution has it, so that pip would find none.
        """
        root = (self.library or "").partition(".")[0]
        usual = root.replace("_", "-")
        named = metadata.packages_distributions().get(root, [])
        if named or not root or find_spec(root) is None:
            return named[0] if len(set(named)) == 1 else usual  # several share a namespace
        return usual if any(metadata.distributions(name=usual)) else ""


def write(package: Package, out: Path) -> Path:
    """Write the package to the new folder `out`/accelz_NAME and return that folder.

    An installed package of the same distribution does not matter: installing this one replaces it.
    Raises ScaffoldError, with nothing written, if the name cannot be used, if options do not fit together, or
    if the folder exists already or cannot be made.
    """
    _check_names(package)
    target = out / package.module
    if not out.is_dir():
        raise ScaffoldError(f"there is no folder {out}; create it, or choose another one with --out")
    try:
        if target.exists():
            raise ScaffoldError(f"{target} already exists; remove it, or choose another folder with --out")
        with tempfile.TemporaryDirectory(prefix=f".{package.module}-", dir=out) as folder:
            made = Path(folder, package.module)
            _fill(made, package)
            made.rename(target)
    except OSError as error:
        raise ScaffoldError(f"{target} cannot be written: {error}") from error
    return target


def _check_names(package: Package) -> None:
    name = package.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.endswith("_") or keyword.iskeyword(name):
        raise ScaffoldError(
            f"{name!r} cannot be a backend's name: it must be a lower-case Python identifier of letters, "
            "digits and _, such as foo, because it becomes accelz_foo and ACCELZ_DEVICE=foo"
        )
    if name in TAKEN:
        raise ScaffoldError(
            f"{name!r} cannot be a backend's name: it means something else here; name it after the device"
        )
    if name in RESERVED:
        raise ScaffoldError(
            f"{name!r} is reserved: accelz-{name} is a first-party package; choose another name"
        )
    owners = [e.dist.name if e.dist else e.value for e in discovery.installed(name)]
    if others := [owner for owner in owners if owner != package.distribution]:
        raise ScaffoldError(
            f"{name!r} is the name of an installed backend, {others[0]}; choose another name, or uninstall it"
        )
    if package.library is not None and not package.torch_device:
        raise ScaffoldError("--library requires --torch-device; without it, import the library in _load")
    for option, value, dotted in (
        ("--device-type", package.device_type, False),
        ("--library", package.library, True),
        ("--collectives", package.collectives, False),
    ):
        parts = (value.split(".") if dotted else [value]) if value is not None else []
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            raise ScaffoldError(f"{option} is {value!r}; it must be an identifier")


def _fill(target: Path, package: Package) -> None:
    values = _values(package)
    for source, relative in _sources(package):
        path = target.joinpath(*(package.module if part == "package" else part for part in relative.parts))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == SUFFIX:
            path.with_suffix("").write_text(
                _rendered(source.read_text(encoding="utf-8"), values), encoding="utf-8"
            )
        else:
            shutil.copyfile(source, path)


def _sources(package: Package) -> Iterator[tuple[Path, Path]]:
    parts = ["common", "torch_device" if package.torch_device else "roles"]
    for part in parts:
        for source in sorted(TEMPLATES.joinpath(part).rglob("*")):
            if source.is_file():
                yield source, source.relative_to(TEMPLATES / part)


def _rendered(text: str, values: dict[str, str]) -> str:
    empty = "|".join(name for name, value in values.items() if not value)
    text = re.sub(rf"^ *\$({empty})\n", "", text, flags=re.MULTILINE) if empty else text
    return string.Template(text).substitute(values)


def _values(package: Package) -> dict[str, str]:
    name, module = package.name, package.module
    kind = package.device_type or name
    library = package.library or f"torch_{name}"
    staged = package.collectives is None
    major, minor = __version__.split(".")[:2]
    own = f'accelz.Collectives("cpu:gloo,{kind}:{package.collectives}")'
    collectives = "HostStaged(accelz.host_collectives())" if staged else own
    stand_in = f'a stand-in: your device\'s name in torch goes here, such as "{name}:0"'
    return {
        "name": name,
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "package": module,
        "distribution": package.distribution,
        "accelz_range": f">={major}.{minor},<{major}.{int(minor) + 1}",
        "api_version": str(API_VERSION),
        "device_type": kind,
        "device": f"{kind}:0" if package.device_type else "cpu",
        "device_remark": "bind() moves to another one" if package.device_type else stand_in,
        "library": library,
        "library_root": library.partition(".")[0],
        "collectives": collectives.replace("accelz.", ""),
        "collectives_of_accelz": collectives,
        "and_collectives": "" if staged else ", Collectives",
        "and_host": ", host_collectives" if staged else "",
        "and_library": f', "{package.library_distribution}"' if package.library_distribution else "",
        "staged_import": "from accelz.gloo import HostStaged" if staged else "",
    }
