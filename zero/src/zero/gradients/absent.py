"""What `param.grad` is between a backward and its step: a stand-in that raises when its values are used.

In that interval the engine holds the gradients, as this rank's slices. If `param.grad` were `None`, a loop
that goes on to clip with `torch.nn.utils.clip_grad_norm_`, or that steps an optimizer made after
`zero.initialize`, would find nothing to do and say nothing. A gradient that somebody puts in the stand-in's
place would not be heeded, and the step says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero.errors import UsageError
from zero.sharding.guard import describe, is_metadata


class AbsentGradient(Tensor):
    """Shape, dtype and device of a parameter's gradient, without a byte of it."""

    @staticmethod
    def __new__(cls, parameter: nn.Parameter) -> AbsentGradient:
        made: AbsentGradient = Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.untyped_storage().device,
        )
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let metadata through, except `is_sparse`: optimizers ask for that before they decay a weight, early
        enough to stop them."""
        if not is_metadata(func) or func == Tensor.is_sparse.__get__:  # type: ignore[attr-defined]
            raise _absent(describe(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        raise _absent(f"`{func}`")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


class AbsentGradients:
    """Puts the stand-ins in place, and takes them away."""

    def __init__(self) -> None:
        self._made: dict[nn.Parameter, AbsentGradient] = {}
        self._shown: list[nn.Parameter] = []

    def show(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the `grad` of each of these parameters to its stand-in."""
        with torch._C.DisableTorchFunctionSubclass():  # `grad` of a sharded parameter, without its guard
            for parameter in parameters:
                parameter.grad = self._of(parameter)
                self._shown.append(parameter)

    def changed(self) -> list[nn.Parameter]:
        """Parameters whose stand-in somebody has removed or replaced since."""
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter for parameter in self._shown if parameter.grad is not self._made[parameter]]

    def hide(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._shown:
                parameter.grad = None
        self._shown.clear()

    def _of(self, parameter: nn.Parameter) -> AbsentGradient:
        made = self._made.get(parameter)
        if made is None or made.dtype is not parameter.dtype or made.device != parameter.device:
            made = self._made[parameter] = AbsentGradient(parameter)
        return made


def _absent(what: str) -> UsageError:
    return UsageError(
        f"{what} needs the values of a parameter's `.grad`, which the engine holds in slices. Set "
        "Config(clip_norm=...) to clip, and Config(loss_scale='dynamic') instead of a GradScaler; "
        "engine.grad_norm is the norm, engine.full_gradient(name) a whole gradient; engine.backward and "
        "engine.step replace loss.backward and optimizer.step"
    )
