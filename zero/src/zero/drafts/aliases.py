"""Tensors over a parameter's memory that are not the parameter: plain training keeps them up to date.

An engine gives parameters memory of their own, so a view that a module keeps of its weight would go on with
the values of before. That there is such a tensor is told by the use count of the memory, which is exact, so
that the usual model costs microseconds. Only then is it looked for, in all that the model reaches. What is
not found there (a state dict, a variable) is warned of. What is not counted is an array that a parameter was
made from, as that is what the memory belongs to; so memory that is not torch's own is always looked for.

Left alone is what training does not make wrong: aliases of frozen parameters, graphs of earlier forwards,
what a hook sets anew before each forward (`torch.nn.utils.spectral_norm`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from accelz import HOST
from zero.deferred import deferred_init
from zero.drafts.reached import reached
from zero.drafts.spans import Spans, span_of
from zero.errors import ModelError, some
from zero.sharding.distributed import local_of
from zero.tiers.apart import apart
from zero.warning import warn

_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private; without it, models alone are searched


@dataclass
class _Memory:
    """A storage in which parameters lie.

    users: uses of it by anything but the model's parameters. foreign: torch did not allocate it.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    users: int = 0
    foreign: bool = False

    @property
    def trained(self) -> bool:
        return any(p.requires_grad for p in self.parameters.values())

    def users_but(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> int:
        """Return how many users are neither among these tensors nor views that only autograd's graphs have.

        views: those of parameters that the program has.
        """
        in_graphs = sum(p._use_count() - 1 for p in self.parameters.values())  # type: ignore[attr-defined]
        in_graphs -= sum(any(t._base is p for p in self.parameters.values()) for t in views)
        return self.users - len(tensors) - max(in_graphs, 0)


def check_aliases(model: nn.Module) -> None:
    """Raise ModelError if the model reaches a tensor over the memory of a parameter that is trained.

    Warns of memory that something outside the model has, too. Changes nothing.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not _shared_memories(model):
            return
        gc.collect()  # what is in a cycle of garbage is in nobody's use
        memories = _shared_memories(model)
        if not memories:
            return
        kept, tensors = _kept(model, memories)
        outside = _used_outside(memories, tensors)
    if kept:
        shown = some([f"{where} (of {name!r})" for name, where in kept.items()])
        raise ModelError(f"there are tensors over the memory of parameters: {shown}. {_STALE}")
    if outside:
        warn(_OUTSIDE.format(some(outside)))


def _shared_memories(model: nn.Module) -> dict[int, _Memory]:
    """Return the storages of trained parameters that something else uses, or may use, by their address."""
    memories: dict[int, _Memory] = {}
    for name, parameter in model.named_parameters():
        if deferred_init.is_deferred(parameter) or parameter.is_meta or parameter.numel() == 0:
            continue
        if local_of(parameter) is not parameter:  # it has no memory itself, and the tensor inside is its own
            continue
        memory = memories.setdefault(_storage_of(parameter), _Memory())
        memory.users = _uses(parameter) - _uses_of_one() - len(memory.parameters)
        memory.foreign = _use_count is None or not parameter.untyped_storage().resizable()
        memory.parameters[name] = parameter
    return {key: m for key, m in memories.items() if (m.users or m.foreign) and m.trained}


def _uses(tensor: Tensor) -> int:
    """Count the uses of a tensor's storage: by tensors, and by Python for itself."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage) + (0 if _use_count is None else int(_use_count(storage._cdata)))


@cache
def _uses_of_one() -> int:
    with apart():
        return _uses(torch.empty(1, device=HOST))


def _kept(model: nn.Module, memories: Mapping[int, _Memory]) -> tuple[dict[str, str], list[Tensor]]:
    """Look in the model. Returns where it keeps what has the memory of a trained parameter, by the name of
    that, and the tensors that it keeps in these memories."""
    ids, anew = {id(p) for p in model.parameters()}, {id(tensor) for tensor in _set_anew(model)}
    named = ((name, p) for memory in memories.values() for name, p in memory.parameters.items())
    trained = ((span_of(p), name) for name, p in named if p.requires_grad)
    spans = Spans((span, name) for span, name in trained if span is not None)
    kept: dict[str, str] = {}
    tensors: dict[int, Tensor] = {}
    for path, item in reached(model):
        if id(item) in ids:
            continue
        if issubclass(type(item), Tensor) and _storage_of(item) in memories:
            bases = [] if item._base is None or id(item._base) in ids else [item._base]
            tensors |= {id(tensor): tensor for tensor in (item, *bases)}
        name = spans.over(span_of(item))
        if name is not None and id(item) not in anew:
            kept.setdefault(name, path)
    return kept, [*tensors.values()]


def _used_outside(memories: Mapping[int, _Memory], kept: Sequence[Tensor]) -> list[str]:
    """Return the name of one parameter of each memory that has users besides these tensors."""
    views = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t._base is not None]
    views = [t for t in views if t._use_count() == 1 or any(t is other for other in kept)]
    over: dict[int, list[Tensor]] = {key: [] for key in memories}
    for tensor in kept:
        over[_storage_of(tensor)].append(tensor)
    used = [memory for key, memory in memories.items() if memory.users_but(over[key], views) > 0]
    return [next(name for name, p in memory.parameters.items() if p.requires_grad) for memory in used]


def _set_anew(model: nn.Module) -> Iterator[Tensor]:
    """Yield attributes that hooks of torch.nn.utils compute before each forward of their modules."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
            value = vars(module).get(name) if isinstance(name, str) else None
            if isinstance(value, Tensor):
                yield value


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object; 0 if it has none, as in torch.func."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


_STALE = (
    "Training would leave them behind with the values of now, because zero gives parameters memory of their "
    "own. Take the view in forward, from the parameter; register one Parameter in every module that uses it; "
    "or keep values that are to stay as they are with .clone()"
)
_OUTSIDE = (
    "something outside the model shares the memory of {}, such as a state dict or a variable of before "
    "zero.initialize. It keeps the values of now, where plain training would change them, and the memory: "
    "del what is not needed, take views in forward, from the parameter, and call engine.state_dict() for the "
    "values of later"
)
