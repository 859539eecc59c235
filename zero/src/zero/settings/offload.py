"""Where state lives between its uses: the settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from zero.settings.validated import Validated, as_bytes

Tier = Literal["device", "host", "disk"]
Kind = Literal["optimizer", "params", "gradients", "activations"]


class Parts(Validated):
    """Parts of the state that leave the device, above 0 and at most 1. None: not named, all of it."""

    optimizer: float | None = None
    params: float | None = None
    gradients: float | None = None
    activations: float | None = None


class Budgets(Validated):
    """Bytes of host memory per rank, by kind of state. None: no limit."""

    optimizer: int | None = None
    params: int | None = None
    gradients: int | None = None


class Offload(Validated):
    """State that does not stay on the device. Values and results are those of training without it.

    optimizer: fp32 masters and moments. "disk" serves Adam, AdamW, SGD and Lion, by the host's kernels.
    step: whose kernels step what is on the host. "host": the host's, where it is. "device": the device's; it
        is in page-locked memory then, and on the device for its step only, with the bits of training that has
        it there always. Serves Adam, AdamW, SGD and Lion. fp32 shards on the device are their own masters.
    params: shards of the parameters (stage 3).
    gradients: reduced slices, from backward to the step. None: on the host where their optimizer state is
        stepped by the host. "disk" is for when not even the gradients fit in host memory.
    activations: what the forward saves for the backward, between the two; of models that are compiled as one
        graph (`Config.compile`). The longest-lived values leave first.
    fraction: part of the state, by elements, that leaves the device; the rest stays. A number is of optimizer
        state; {"params": 0.5, "gradients": 0.25} of each kind, those that are not named leaving whole. Of
        parameters and gradients, and of optimizer state that no kernel steps, what a unit has in one dtype
        and one optimizer steps stays together: a warning tells where that is too coarse to come near.
    host_budget: host memory per rank in bytes, or e.g. "8GiB". A number is for optimizer state, the second
        copies of `overlap` included; {"optimizer": "8GiB", "params": "2GiB"} is for each kind. What it cannot
        hold stays on the device where the kind is set to "host", and is on disk with "disk". Kinds that are
        not named: no limit with "host", and none of it with "disk". It holds on every rank, where ranks step
        whole parameters also; what a step needs for a moment beside state is not counted.
    sub_group_size: elements, rounded up to a multiple of 64, of the largest record of optimizer state that is
        away from the device and stepped by a kernel. A few records at a time are on their way, so this bounds
        the buffers: three records in host memory for "disk", on the device for step="device". On disk a
        record takes whole pages: below some 10,000 elements these are more than values.
    path: directory on a local disk for what is there. A rank's file has mode 0600 and no name, so nothing is
        left when a job ends, however it ends.
    overlap: step what is on the host while backward goes on, once its gradients are there. Exact: each record
        is stepped in a second copy, which takes its place in `Engine.step` if nothing was clipped, overflowed
        or changed. That takes the memory of the record again, and of the weights where the master is not the
        shard itself (2 bytes per parameter in bf16); `host_budget` counts both. Change masters and optimizer
        state in place between backward and step through the tensors themselves, under `torch.no_grad()`:
        changes through `.data` or a numpy view are not seen, and may be lost. See `zero.optimizer.ahead`.
    compact: keep of masters on disk only what the 16-bit parameters lack (Adam: 20 bytes moved per parameter
        and step instead of 24). Same values, bit for bit; more work for the processor. ConfigError where no
        parameter is bf16.
    """

    optimizer: Tier = "device"
    step: Literal["host", "device"] = "host"
    params: Tier = "device"
    gradients: Tier | None = None
    activations: Literal["device", "host"] = "device"
    fraction: Parts | float | Mapping[str, float] = Parts()
    host_budget: Budgets | int | str | Mapping[str, int | str] | None = Budgets()
    sub_group_size: int = Field(default=1 << 24, ge=1)
    path: Path | str | None = None
    overlap: bool = False
    compact: bool = False

    @field_validator("fraction", mode="before")
    @classmethod
    def _by_kind(cls, value: Any) -> Any:
        if isinstance(value, Parts):
            return value
        parts = value if isinstance(value, Mapping) else {"optimizer": value}
        for kind, part in parts.items():
            if kind not in get_args(Kind):
                raise ValueError(f"{kind!r} is no kind of state; known: {', '.join(get_args(Kind))}")
            if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part <= 1:
                raise ValueError(f"the part of {kind} must be a number above 0, and at most 1")
        return Parts(**{kind: float(part) for kind, part in parts.items()})

    @field_validator("host_budget", mode="before")
    @classmethod
    def _bytes_by_kind(cls, value: Any) -> Any:
        if isinstance(value, Budgets):
            return value
        budgets = value if isinstance(value, Mapping) else {"optimizer": value}
        found = {kind: as_bytes(each) for kind, each in budgets.items()}
        for kind, nbytes in found.items():
            if kind not in Budgets.model_fields:
                raise ValueError(f"{kind!r} has no budget; known: {', '.join(Budgets.model_fields)}")
            if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
                raise ValueError(f"the budget for {kind} must be bytes, 0 or more, or e.g. '8GiB'")
        return Budgets(**found)

    @field_validator("path", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value == "":
            raise ValueError(
                "no directory is named; write path='/local/disk', or path='.' for the current one"
            )
        return Path(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Offload:
        on_disk = "disk" in (self.optimizer, self.params, self.gradients)
        if on_disk and self.path is None:
            raise ValueError("state on disk needs a place: Offload(..., path='/local/disk')")
        if self.path is not None and not on_disk:
            raise ValueError("path is given, but nothing is on disk: Offload(optimizer='disk', ...)")
        if self.optimizer == "device" and "sub_group_size" in self.model_fields_set:
            raise ValueError("sub_group_size is of optimizer state: set optimizer='host' or 'disk'")
        for kind in get_args(Kind):
            for name, value in (("fraction", self._fraction(kind)), ("host_budget", self.budget(kind))):
                if value is not None and getattr(self, kind) in ("device", None):
                    raise ValueError(
                        f"{name} is of what leaves the device, {kind} is not set to: {kind}='host' or 'disk'"
                    )
        self._check_step()
        self._check_overlap()
        if self.compact and self.optimizer != "disk":
            raise ValueError("compact is about masters on disk: set optimizer='disk'")
        return self

    def _check_step(self) -> None:
        if self.step == "host":
            return
        if self.optimizer != "host":
            raise ValueError(
                f"step='device' is about optimizer state on the host, optimizer={self.optimizer!r} is not: "
                "set optimizer='host', or leave step='host'"
            )
        for name in ("overlap", "compact"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} is about steps by the host's kernels: leave {name}=False or step='host'"
                )

    def _check_overlap(self) -> None:
        budget = self.budget("optimizer")
        nothing = budget == 0 or (self.optimizer == "disk" and budget is None)
        if self.overlap and (self.optimizer == "device" or nothing):
            raise ValueError(
                "overlap is about optimizer state on the host: set optimizer='host', or a host_budget above 0"
            )
        if self.overlap and self.gradients not in (None, "host"):
            raise ValueError("overlap steps from gradients on the host: leave gradients=None")

    def part(self, kind: Kind) -> float:
        """How much of a kind of state leaves the device, of 1, where its tier is another."""
        part = self._fraction(kind)
        return 1.0 if part is None else part

    def budget(self, kind: Kind) -> int | None:
        """Bytes of host memory for a kind of state; None: no limit."""
        assert isinstance(self.host_budget, Budgets)
        budget: int | None = getattr(self.host_budget, kind, None)
        return budget

    @property
    def folder(self) -> Path | None:
        """`path`."""
        assert not isinstance(self.path, str)
        return self.path

    def _fraction(self, kind: Kind) -> float | None:
        assert isinstance(self.fraction, Parts)
        part: float | None = getattr(self.fraction, kind)
        return part
