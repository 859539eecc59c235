"""What a step makes the host wait for; steps as observers are told of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero.observe import Step


def step_of(number: int, **logged: float) -> Step:
    """A step that took half a second."""
    return Step(number, 0.0, {"forward": 0.5}, logged, 0.1, {}, {}, 0.0, {}, {"peak": 2**25})


# Operations by which a value on the device reaches the host.
_WAITING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item"}


class WaitWatcher(TorchDispatchMode):
    """Collects operations that would make the host wait for floating-point values of the device.

    Control messages are integers in host memory on every device and do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITING and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
