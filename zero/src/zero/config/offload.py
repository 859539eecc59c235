"""Settings for where state lives between its uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from zero.config.paths import as_path
from zero.config.validated import Bytes, Converted, Validated, held

TierName = Literal["device", "host", "disk"]
Kind = Literal["optimizer", "params", "gradients", "activations"]


class Parts(Validated):
    """Fraction of each kind of state that leaves the device, above 0 and at most 1. None: all of it."""

    optimizer: float | None = Field(default=None, gt=0, le=1)
    params: float | None = Field(default=None, gt=0, le=1)
    gradients: float | None = Field(default=None, gt=0, le=1)
    activations: float | None = Field(default=None, gt=0, le=1)


class Budgets(Validated):
    """Bytes of host memory per rank, by kind of state. None: not given; see `Offload.host_budget`."""

    optimizer: Converted[Bytes | None, int | str | None] = held(None)
    params: Converted[Bytes | None, int | str | None] = held(None)
    gradients: Converted[Bytes | None, int | str | None] = held(None)


class Offload(Validated):
    """State that does not stay on the device. Values and results are those of training without offload.

    optimizer: tier of the fp32 masters and moments. "disk" supports optimizers that kernels step, such as
        AdamW; these are the host's.
    step: whose kernels step the state that is on the host. "host": the host's, in place. "device": the
        device's; the state is then in page-locked memory and on the device only for its step, with bitwise
        the results of training that always has it there. Supports optimizers that kernels step. fp32 shards
        on the device are their own masters.
    params: tier of the parameters' shards (stage 3).
    gradients: tier of the reduced slices, from backward to the step. None: on the host if the host steps
        their optimizer state. "disk" is for when not even the gradients fit in host memory.
    activations: tier, between forward and backward, of what the forward saves for the backward; only for
        models that are compiled as one graph (`Config.compile`). The longest-lived values leave first.
    fraction: part of the state, by elements, that leaves the device; the rest stays. A number applies to
        optimizer state; {"params": 0.5, "gradients": 0.25} gives one for each kind, and kinds that are not
        given leave entirely. For parameters, gradients, and optimizer state that no kernel steps, what a unit
        has in one dtype and one optimizer steps stays together: a warning says if that is too coarse to come
        near the fraction.
    host_budget: host memory per rank in bytes, or e.g. "8GiB". A number is for optimizer state;
        {"optimizer": "8GiB", "params": "2GiB"} gives one for each kind. What does
        not fit stays on the device if the kind is set to "host", and goes to disk if it is set to "disk". A
        kind that is not given has no limit with "host", and no host memory with "disk". The budget holds on
        every rank, even if ranks step whole parameters; what a step needs temporarily is not counted.
    sub_group_size: elements of the largest record of optimizer state that is away from the device and stepped
        by a kernel, rounded up to a multiple of 64, with moments="8bit" of 256. A few records are in transit
        at a time, so this bounds the buffers: three records, in host memory for "disk" and on the device for
        step="device". On disk a record takes whole pages: below some 10,000 elements it takes more room than
        its values.
    path: directory on a local disk for the state on disk. A rank's file has mode 0600 and no name, so nothing
        is left when a job ends, however it ends.
    """

    measured: ClassVar[bool] = False
    replaced: ClassVar[Mapping[str, str]] = {
        "compact": "write Config(masters='split'), which is for every tier"
    }

    optimizer: TierName = "device"
    step: Literal["host", "device"] = "host"
    params: TierName = "device"
    gradients: TierName | None = None
    activations: Literal["device", "host"] = "device"
    fraction: Converted[Parts, Parts | float | Mapping[str, float]] = held(Parts())
    host_budget: Converted[Budgets, Budgets | int | str | Mapping[str, int | str] | None] = held(Budgets())
    sub_group_size: int = Field(default=1 << 24, ge=1)
    path: Converted[Path | None, Path | str | None] = held(None)

    @field_validator("fraction", "host_budget", mode="before")
    @classmethod
    def _by_kind(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, (Parts, Budgets)):
            return value
        given = value if isinstance(value, Mapping) else {"optimizer": value}
        of_kinds = Parts if info.field_name == "fraction" else Budgets
        return of_kinds(**{str(kind): each for kind, each in given.items()})

    @field_validator("path", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("path is empty; write path='/local/disk', or path='.' for the current one")
        return as_path(value) if isinstance(value, (str, Path)) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Offload:
        on_disk = "disk" in (self.optimizer, self.params, self.gradients)
        if on_disk and self.path is None:
            raise ValueError("state on disk needs a directory: set Offload(..., path='/local/disk')")
        if self.path is not None and not on_disk:
            raise ValueError("path is given, but nothing is on disk: set Offload(optimizer='disk', ...)")
        if self.optimizer == "device" and "sub_group_size" in self.model_fields_set:
            raise ValueError(
                "sub_group_size applies to offloaded optimizer state: set optimizer='host' or 'disk'"
            )
        for kind in get_args(Kind):
            for name, given in (("fraction", self.fraction), ("host_budget", self.host_budget)):
                if getattr(given, kind, None) is not None and getattr(self, kind) in ("device", None):
                    raise ValueError(
                        f"{name} applies to what leaves the device, but {kind} does not: set {kind}='host' "
                        "or 'disk'"
                    )
        self._check_step()
        return self

    def _check_step(self) -> None:
        if self.step == "host":
            return
        if self.optimizer != "host":
            raise ValueError(
                f"step='device' applies to optimizer state on the host, but optimizer={self.optimizer!r}: "
                "set optimizer='host', or keep step='host'"
            )

    @property
    def streams(self) -> bool:
        """Whether records on the host come to the device for their step."""
        return self.step == "device"

    def part(self, kind: Kind) -> float:
        """Fraction, of 1, of a kind of state that leaves the device if the kind is not set to stay there."""
        part: float = getattr(self.fraction, kind) or 1.0
        return part

    def budget(self, kind: Kind) -> int | None:
        """Bytes of host memory for a kind of state; None: not given."""
        budget: int | None = getattr(self.host_budget, kind, None)
        return budget


class MeasuredOffload(Offload):
    """What offload="auto" begins with, until it has measured."""

    measured: ClassVar[bool] = True

    optimizer: TierName = "host"
