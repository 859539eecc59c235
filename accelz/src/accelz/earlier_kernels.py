"""`Kernels` as version 1 of the interface had them, for subclasses written for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accelz.roles.kernels import Kernels
from accelz.updates import AdamWUpdate, LionUpdate, MomentumUpdate, SgdUpdate, Update

COMMON = ("lr", "weight_decay", "maximize", "grad_scale", "skip", "weights")
TAKEN = {
    "adamw": (AdamWUpdate, ("exp_avg", "exp_avg_sq", "step"), ("beta1", "beta2", "eps", "decoupled")),
    "sgd": (SgdUpdate, (), ()),
    "momentum": (MomentumUpdate, ("momentum_buffer",), ("momentum", "nesterov")),
    "lion": (LionUpdate, ("exp_avg",), ("beta1", "beta2")),
}
"""For each optimizer that version 1 had kernels for: its update, and what its kernel took beside master,
gradient and `COMMON`, by position and by name."""
NAMES = {"adamw": "adamw", "sgd": "sgd", "momentum": "sgd", "lion": "lion"}
"""The kernels' names in version 1, where sgd had one kernel with momentum or without."""


class KernelsOfVersion1(Kernels):
    """A subclass's kernels get their arguments one by one. What it leaves to its base are the references, and
    so are moments in 16 bits and split masters, which version 1 did not have."""

    def step(self, update: Update) -> None:
        name = NAMES.get(update.kernel)
        narrow = any(moment.dtype is not update.master.dtype for moment in update.moments)
        if name is None or update.is_split or narrow or self._owner(name) is KernelsOfVersion1:
            update.reference(self.chunk)
            return
        _, operands, options = TAKEN[update.kernel]
        given = {option: getattr(update, option) for option in (*COMMON, *options)}
        if update.kernel == "sgd":
            getattr(self, name)(update.master, update.grad, None, momentum=0.0, **given)
            return
        getattr(self, name)(update.master, update.grad, *(getattr(update, o) for o in operands), **given)

    def adamw(self, *operands: Tensor, **options: Any) -> None:
        self._reference("adamw", operands, options)

    def sgd(
        self, master: Tensor, grad: Tensor, momentum_buffer: Tensor | None = None, **options: Any
    ) -> None:
        if momentum_buffer is None:
            plain = {name: value for name, value in options.items() if name in COMMON}
            self._reference("sgd", (master, grad), plain)
        else:
            self._reference("momentum", (master, grad, momentum_buffer), options)

    def lion(self, *operands: Tensor, **options: Any) -> None:
        self._reference("lion", operands, options)

    def _reference(self, kernel: str, operands: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        make: Any
        make, names, _ = TAKEN[kernel]
        make(**dict(zip(("master", "grad", *names), operands, strict=True)), **options).reference(self.chunk)

    def origin(self, name: str) -> str:
        owner = self._owner(NAMES[name]) if name in NAMES else None
        if owner is None:
            return super().origin(name)
        return "torch reference" if owner is KernelsOfVersion1 else f"{owner.__module__}.{owner.__qualname__}"

    def _owner(self, name: str) -> type:
        """The class whose kernel of that name this object has."""
        return next(cls for cls in type(self).__mro__ if name in vars(cls))
