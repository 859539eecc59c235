"""Which entries of a model are read or saved: all, those that are trained, or those of some names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from zero.errors import UsageError, some
from zero.sharding.state_entries import StateEntries


@dataclass(frozen=True)
class Selection:
    """trainable_only: leave out frozen parameters, buffers and extra state. include: shell patterns of names;
    without any, all names. A tied parameter is chosen by any of its names, and has all of them."""

    trainable_only: bool = False
    include: tuple[str, ...] = ()

    @classmethod
    def of(cls, trainable_only: bool, include: str | Iterable[str] | None) -> Selection:
        """The selection that a caller asks for. Raises UsageError for no patterns, and for what is none."""
        if include is None:
            return cls(trainable_only)
        patterns = (include,) if isinstance(include, str) else tuple(include)
        if not patterns:
            raise UsageError("include is empty: leave it out to take all names, or give a pattern")
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise UsageError(
                    "include takes shell patterns of names, such as '*.lora_*' or a list of them, got "
                    f"{type(pattern).__name__}"
                )
        return cls(trainable_only, patterns)

    def chosen(self, entries: StateEntries, trained: Collection[nn.Parameter]) -> set[str]:
        """The names of the chosen entries. Raises UsageError for a pattern that matches none, and for none.

        trained: the parameters that the engine trains.
        """
        for pattern in self.include:
            if not any(fnmatchcase(name, pattern) for name in entries.names):
                raise UsageError(
                    f"include: {pattern!r} matches no parameter or buffer; the model has "
                    f"{some(list(entries.names))}"
                )
        found = {
            name
            for parameter, names in entries.parameters.items()
            if self._has(names) and (parameter in trained or not self.trainable_only)
            for name in names
        }
        if not self.trainable_only:
            found |= {name for name in (*entries.buffers, *entries.rest) if self._has((name,))}
        if not found and entries.names:
            raise UsageError(
                "no parameter is left: trainable_only and include leave out all of "
                f"{some(list(entries.names))}"
            )
        return found

    def _has(self, names: Iterable[str]) -> bool:
        return not self.include or any(fnmatchcase(n, pattern) for n in names for pattern in self.include)


EVERYTHING = Selection()
