"""The activations and operations of a forward and backward, from a run of the model without values.

Fake tensors have a size and a lifetime, autograd's graph included, and no memory. What is
saved, what is temporary and what recomputation makes again are counted as they come and go; parameters and
their gradients are not, which `peaks` counts as the engine keeps them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from accelz import HOST
from zero.errors import UsageError
from zero.observe.flops import operations
from zero.sharding.tensors import iter_tensors
from zero.sharding.units import ROOT

HEAD = "<head>"


@dataclass(frozen=True)
class Activations:
    """Bytes on the device besides model state, at their highest while the forward or the backward is in a
    unit, by its name. None: before all blocks; in the backward, before the first gradient of a parameter.
    HEAD: after a block, in none; in the backward, from then until it comes to a block."""

    forward: Mapping[str | None, int] = field(default_factory=dict)
    backward: Mapping[str | None, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations of one rank in an optimizer step, all micro-batches together: of matrix
    products, convolutions and attention, of which half counts under a causal mask.

    recomputed: what checkpointing repeats of the forward in the backward.
    """

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """The model's own: without those that are recomputed."""
        return self.forward + self.backward

    @property
    def all(self) -> int:
        return self.model + self.recomputed

    def times(self, micro_batches: int) -> Flops:
        return Flops(**{name: micro_batches * count for name, count in asdict(self).items()})


def measure(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    dtypes: Mapping[str, torch.dtype],
    batch: Any,
    autocast: torch.dtype | None,
) -> tuple[Activations, Flops]:
    """Run a forward and backward of the model with fake tensors; the operations are those of one micro-batch.

    units: their modules, by name; what runs in none of them counts for the root. dtypes: of the parameters
    as they are computed with, by name. batch: the model's inputs: a mapping of keyword arguments, a tuple or
    list of arguments, or one tensor. Raises UsageError for a model that needs values to run.
    """
    tracker = _Tracker()
    with _unchanged(model), FakeTensorMode(allow_non_fake_inputs=True):
        arguments, keywords = _inputs(batch)
        _take_values(model, dtypes, tracker)
        for name, module in units.items():
            tracker.follow(module, name)
        try:
            with tracker, torch.enable_grad():
                with torch.autocast(HOST.type, autocast, enabled=autocast is not None):
                    loss = _loss_of(model(*arguments, **keywords))
                tracker.begin_backward()
                torch.autograd.backward(loss)
        except Exception as error:
            raise UsageError(
                "the activations cannot be planned, as the model does not run without values, with sizes "
                f"alone: {type(error).__name__}: {error}"
            ) from error
    return Activations(tracker.forward, tracker.backward), Flops(**tracker.flops)


def _take_values(model: nn.Module, dtypes: Mapping[str, torch.dtype], tracker: _Tracker) -> None:
    """Put fake tensors in place of parameters, which are left out, and of buffers."""
    fakes: dict[Tensor, Tensor] = {buffer: _fake(buffer) for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        fake = nn.Parameter(_fake(parameter, dtypes.get(name)), parameter.requires_grad)
        tracker.leave_out(fake)
        if fake.requires_grad:
            fake.register_hook(tracker.take_gradient)
        fakes[parameter] = fake
    for module in model.modules():
        for kind in ("_parameters", "_buffers"):  # others in their place, whatever class these dicts have
            tensors = vars(module)[kind]
            vars(module)[kind] = {
                name: tensor if tensor is None else fakes.get(tensor, tensor)
                for name, tensor in tensors.items()
            }


class _Tracker(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most in each unit; and operations."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: dict[str | None, int] = {}
        self.backward: dict[str | None, int] = {}
        self.flops = dict.fromkeys(("forward", "backward", "recomputed"), 0)
        self._peaks = self.forward
        self._units: list[str | None] = [None]  # those under way, the innermost last
        self._outputs = WeakIdKeyDictionary()
        self._alive = 0
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops[self._doing()] += operations(func, args, kwargs, result)
        for tensor in iter_tensors(result):
            self._note(tensor)
        return result

    def _doing(self) -> str:
        if self._peaks is self.forward:
            return "forward"
        return "recomputed" if torch.is_grad_enabled() else "backward"  # which a backward itself is not

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = storage.nbytes()

        def gone(_: object) -> None:
            _, counted = self._storages.pop(key)
            self._alive -= counted

        self._storages[key] = weakref.ref(storage, gone), nbytes
        self._alive += nbytes
        self._mark()

    def _mark(self) -> None:
        unit = self._units[-1]
        self._peaks[unit] = max(self._peaks.get(unit, 0), self._alive)

    def leave_out(self, tensor: Tensor) -> None:
        """Count a tensor no more: a parameter, or its gradient."""
        self._note(tensor)
        key = tensor.untyped_storage()._cdata
        held, nbytes = self._storages[key]
        self._storages[key] = held, 0
        self._alive -= nbytes

    def take_gradient(self, gradient: Tensor) -> None:
        self.leave_out(gradient)
        if self._units == [None]:
            self._come_to(HEAD)

    def begin_backward(self) -> None:
        self._peaks, self._units = self.backward, [None]
        self._mark()

    def follow(self, module: nn.Module, name: str) -> None:
        """Be told by hooks when the forward and the backward are in a unit."""
        module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
        module.register_forward_hook(lambda _, __, output: self._leave(name, output))

    def _enter(self, name: str, _: nn.Module, *inputs: Any) -> None:
        self._units.append(name)
        self._mark()
        if self._peaks is self.forward:
            for tensor in iter_tensors(inputs):
                if tensor.requires_grad and tensor not in self._outputs:
                    tensor.register_hook(lambda _: self._come_to(ROOT))

    def _leave(self, name: str, output: Any) -> None:
        self._units.pop()
        if self._peaks is self.forward:
            if self._units == [None]:
                self._units = [HEAD]
            for tensor in iter_tensors(output):
                if tensor.requires_grad:
                    self._outputs[tensor] = True
                    tensor.register_hook(lambda _: self._come_to(name))

    def _come_to(self, name: str) -> None:
        self._units = [name]
        self._mark()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """After the block, modules have the parameters, buffers, hooks and other attributes of before it, and no
    fake tensors that a forward caches, also in lists, sets and mappings among them."""
    seen: set[int] = set()
    before = [(vars(module), _contents(vars(module), seen)) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, contents in before:
            _put_back(attributes, contents)


def _contents(container: Any, seen: set[int]) -> Any:
    """A copy, in which each value is beside its own contents; None for what is no container, or in `seen`."""
    if type(container) not in (dict, OrderedDict, defaultdict, list, set) or id(container) in seen:
        return None
    seen.add(id(container))
    if isinstance(container, dict):
        return {key: (value, _contents(value, seen)) for key, value in container.items()}
    if isinstance(container, list):
        return [(value, _contents(value, seen)) for value in container]
    return set(container)


def _put_back(container: Any, contents: Any) -> None:
    if contents is None:
        return
    container.clear()
    if isinstance(contents, set):
        container |= contents
        return
    pairs = contents.values() if isinstance(contents, dict) else contents
    for value, inside in pairs:
        _put_back(value, inside)
    if isinstance(contents, dict):
        container.update({key: value for key, (value, _) in contents.items()})
    else:
        container.extend(value for value, _ in contents)


def _inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = tree_map(lambda leaf: _fake(leaf) if isinstance(leaf, Tensor) else leaf, batch)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _fake(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    dtype = tensor.dtype if dtype is None else dtype
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype, device=HOST)


def _loss_of(output: Any) -> list[Tensor]:
    """What the backward begins from: the loss in the output, or else all of it that has a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else [t for t in iter_tensors(output) if t.requires_grad]
    return [t if t.numel() == 1 else t.float().square().mean() for t in found]
