"""Settings that answer wrong values and unknown keys with a ConfigError saying what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from zero.config import sizes
from zero.errors import ConfigError, UsageError


class Validated(BaseModel):
    """Frozen, strict, and closed to unknown keys."""

    replaced: ClassVar[Mapping[str, str]] = {}
    """What to write instead of settings that there were."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, strict=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, which are validated too."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **(update or {})})


def as_bytes(value: Any) -> Any:
    """Convert a size such as "8GiB" to a number; return anything but text unchanged. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return sizes.size(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


Bytes = Annotated[int, BeforeValidator(as_bytes), Field(ge=0)]
"""A number of bytes; a size such as "8GiB" becomes one."""
Held = TypeVar("Held")
Given = TypeVar("Given")

if TYPE_CHECKING:

    class Converted(Generic[Held, Given]):
        """A field that may be given as `Given`, and holds `Held`."""

        def __get__(self, instance: object, owner: type) -> Held: ...

        def __set__(self, instance: object, value: Given) -> None: ...

else:

    class Converted:
        def __class_getitem__(cls, types):
            return types[0]


def held(default: Any) -> Any:
    """The default of a converted field, as it is held."""
    return Field(default=default)


def _explain(kind: type[Validated], error: ValidationError) -> str:
    reasons: dict[str, list[str]] = {}  # by setting; a value that may have several types fails for each
    for problem in error.errors():
        key = str(problem["loc"][0]) if problem["loc"] else ""
        message = problem["msg"].removeprefix("Value error, ")
        subject = f"{key} = {problem['input']!r}: " if key else ""  # else of several settings together
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, kind.model_fields, n=1)
            message = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(kind.model_fields)}"
            message = kind.replaced.get(key, message)
            subject = f"unknown key {key!r}; "
        told = reasons.setdefault(subject, [])
        if message not in told:
            told.append(message)
    return f"zero.{kind.__name__}: " + "; ".join(s + ", or ".join(told) for s, told in reasons.items())
