"""How the compiled path works: the settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from zero.settings.validated import Bytes, Validated


class Compile(Validated):
    """`torch.compile` for the model's forward and backward.

    inner: what compiles the graphs once gathers are in them. "inductor" generates code; "aot_eager" runs the
        operations one by one, with the bits of training without compile.
    fuse_casts: a unit whose parameters are only used cast to one narrower dtype travels in that dtype (the
        shard is cast before it travels).
    prefetch_budget: bytes, or e.g. "64MiB", that may be under way ahead of their use; 0 gathers on demand.
        None: as many as the largest unit of a graph takes, so that at least the next one always is.
    persist_budget: bytes, or e.g. "1GiB", for units that stay gathered from one use to the next, until the
        weights change; "auto": what the first steps leave free of the device, less a margin. Chosen are those
        whose gathers cost most time per byte, as measured in the first steps.
    dynamic: as in torch.compile: None makes a dimension dynamic when it changes, True at once, False never.
    """

    inner: Literal["inductor", "aot_eager"] = "inductor"
    fuse_casts: bool = True
    prefetch_budget: Bytes | None = Field(default=None, ge=0)
    persist_budget: Literal["auto"] | Bytes = 0
    dynamic: bool | None = None

    @field_validator("persist_budget")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be 'auto', or bytes, 0 or more")
        return value

    @property
    def prefetch_bytes(self) -> int | None:
        """`prefetch_budget`."""
        assert not isinstance(self.prefetch_budget, str)
        return self.prefetch_budget

    @property
    def persist(self) -> Literal["auto"] | int:
        """`persist_budget`."""
        return self.persist_budget if isinstance(self.persist_budget, int) else "auto"
