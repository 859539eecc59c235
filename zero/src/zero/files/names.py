"""Matching stored tensors to a model's parameters and buffers, by name. No values are read here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zero.errors import StateError, UsageError, some
from zero.files.manifest import Manifest, model_key

Rename = Mapping[str, str | None] | Callable[[str], str | None]


@dataclass(frozen=True)
class Saved:
    """A stored parameter or buffer. dtype: named as in safetensors. aliases: its further names."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A parameter or buffer of the model. aliases: its further names, if it is tied. dtype: the only one that
    its values can be stored in, as part of a quantised parameter; None for any that is floating or not."""

    name: str
    shape: tuple[int, ...]
    floating: bool
    aliases: tuple[str, ...] = ()
    dtype: str | None = None


def stored_in(manifest: Manifest) -> list[Saved]:
    """The parameters and buffers of a checkpoint."""
    named = [(p.name, p.aliases) for p in manifest.parameters] + [(b, ()) for b in manifest.buffers]
    entries = [(name, manifest.tensor(model_key(name)), aliases) for name, aliases in named]
    wholes = {p.name: p.shape for p in manifest.parameters if p.shape is not None}
    return [
        Saved(name, wholes.get(name, entry.shape), entry.dtype, aliases) for name, entry, aliases in entries
    ]


def match(
    stored: Iterable[Saved],
    targets: Iterable[Target],
    rename: Rename | None,
    strict: bool,
    same: Callable[[str, str], bool],
    left_out: Sequence[str] = (),
    then: Callable[[str], str | None] = lambda name: name,
) -> dict[str, str]:
    """For each target's name, the name in the checkpoint that its values come from.

    rename: maps a name in the checkpoint to a new name, or to None to leave it out. same: whether two names
    in the checkpoint have the same values, which is required if both go to one tied parameter. left_out:
    names that the checkpoint was to be without, which may be missing. then: maps names that `rename` has
    mapped. Raises UsageError for a rename of names that do not exist, and StateError with all names that are
    missing or unexpected (both only if strict), or do not fit.
    """
    wanted = {name: target for target in targets for name in (target.name, *target.aliases)}
    names = {source: (source.name, *source.aliases) for source in stored}
    renamer = _renamer(rename, {*left_out, *(name for several in names.values() for name in several)})

    def new_name(name: str) -> str | None:
        new = renamer(name)
        return None if new is None else then(new)

    sources: dict[str, str] = {}
    claimed: dict[str, str] = {}
    unexpected, wrong = [], []
    for source, several in names.items():
        renamed = [n for n in map(new_name, several) if n is not None]
        found = [n for n in renamed if n in wanted]
        if renamed and not found:
            unexpected.append(renamed[0])
        for name in found:
            target = wanted[name].name
            other = sources.setdefault(target, source.name)
            again = claimed.setdefault(name, source.name) != source.name
            if again or (other != source.name and not same(other, source.name)):
                wrong.append(f"{name} (both {other} and {source.name} in the checkpoint; rename one to None)")
        for misfitting in dict.fromkeys(wanted[name] for name in found):
            wrong.extend(_misfit(misfitting, source))
    excused = {wanted[n].name for n in map(new_name, left_out) if n in wanted}
    missing = [
        n for n, target in wanted.items() if target.name == n and n not in sources and n not in excused
    ]
    advice = "" if strict else " (rename to None what should keep the value that it has)"
    problems = {f"mismatched{advice}": wrong}
    if strict:
        problems |= {"missing in the checkpoint": missing, "unexpected in the checkpoint": unexpected}
    raise_for(problems, _OTHER_NAMES if missing and unexpected else "")
    return sources


_OTHER_NAMES = (
    ". If tensors of the model are there under other names, pass rename=, a dict or a function from names in "
    "the checkpoint to the model's"
)


def raise_for(problems: Mapping[str, list[str]], advice: str = "") -> None:
    """Raise StateError if any list is not empty."""
    told = [f"{what}: {some(names)}" for what, names in problems.items() if names]
    if told:
        raise StateError(f"the checkpoint does not fit: {'; '.join(told)}{advice}")


def _renamer(rename: Rename | None, names: set[str]) -> Callable[[str], str | None]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    mapping = rename
    unknown = sorted(set(mapping) - names)
    if unknown:
        raise UsageError(f"rename: the checkpoint has nothing called {some(unknown)}")
    return lambda name: mapping.get(name, name)


def _misfit(target: Target, source: Saved) -> list[str]:
    if source.shape != target.shape:
        return [f"{target.name} (shape {source.shape} instead of {target.shape})"]
    if target.dtype not in (None, source.dtype):
        return [f"{target.name} (dtype {source.dtype} instead of {target.dtype}, which its packing needs)"]
    if is_floating(source.dtype) != target.floating:
        return [f"{target.name} (dtype {source.dtype})"]
    return []


def is_floating(dtype: str) -> bool:
    """Whether a dtype, named as in safetensors, is one of floating-point or complex numbers."""
    return dtype.startswith(("F", "BF", "C"))
