"""Who holds whom, so that reference counts alone free the memory of an engine.

The program holds the engine, the model and the optimizer. The engine holds its parts, and so do the hooks on
the model's modules, which go on gathering when the program has only the model left. A part that held a
module, or what holds the part, would close a cycle: gigabytes would stay until Python happens to collect
garbage. So parts have weak references to modules (`ModelRef`) and call what is above them through `weakly`.
Nothing of the model's or the optimizer's holds what steps the optimizer. What the model's hooks and
parameters lead to is `Uncopied`: a copy of the model would have a second engine's parts.

`tests/zero/engine/test_freed.py` guards this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from zero.errors import UsageError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class ModelRef:
    """The model, for parts of the engine: whoever calls them holds it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> nn.Module:
        model = self._model()
        assert model is not None, "a part of an engine was called without engine and model"
        return model


def weakly(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return what calls a bound method without holding its object, which must be alive then."""
    found = weakref.WeakMethod(method)

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        alive = found()
        assert alive is not None, "a part of an engine was called after what holds it had gone"
        return alive(*args, **kwargs)

    return call


class Uncopied:
    """Base of objects that are reachable from a model that has an engine, through its hooks or parameters."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a model that has an engine cannot be copied or pickled: copy it before zero.initialize; "
            "engine.state_dict() has its values for torch.save, and engine.save_checkpoint saves the whole "
            "training state"
        )


class UncopiedRef(Uncopied, weakref.ref[Result]):
    """A weak reference that a parameter has to what its engine knows of it.

    Autograd's graphs hold parameters where Python's garbage collector does not see it, and a model may keep
    one of its own outputs: a strong reference would close a cycle that is never freed.
    """
