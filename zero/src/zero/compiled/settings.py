"""How the compiled path works: the settings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from zero import sizes
from zero.errors import UsageError
from zero.validated import Validated


class Compile(Validated):
    """`torch.compile` for the model's forward and backward.

    inner: what compiles the graphs once gathers are in them. "inductor" generates code; "aot_eager" runs the
        operations one by one, with the bits of training without compile.
    fuse_casts: a unit whose parameters are only used cast to one narrower dtype travels in that dtype (the
        shard is cast before it travels).
    prefetch_budget: bytes, or e.g. "64MiB", that may be under way ahead of their use; 0 gathers on demand.
    dynamic: as in torch.compile: None makes a dimension dynamic when it changes, True at once, False never.
    """

    inner: Literal["inductor", "aot_eager"] = "inductor"
    fuse_casts: bool = True
    prefetch_budget: int = Field(default=64 << 20, ge=0)
    dynamic: bool | None = None

    @field_validator("prefetch_budget", mode="before")
    @classmethod
    def _as_bytes(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                return sizes.size(value)
            except UsageError as error:
                raise ValueError(str(error)) from None
        return value
