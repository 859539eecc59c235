"""Deferred initialisation: the constructor runs, but parameters get values only when they are sharded.

Inside `zero.init()` every floating-point tensor that the constructor makes is *hollow*: it has a device, a
shape and strides, and a storage of zero bytes. Operations on hollow tensors are recorded. Random operations
also draw from the generator as they would have, into scratch memory, and the recording keeps the generator's
state. So the parameters can be replayed in any order and at any time: each gets exactly the value that it
would have had, and the generator ends where it would have ended. Recording and replaying follow the idea of
deferred initialisation in torchdistX (2022).

`zero.initialize` replays unit by unit: no rank ever holds more than its shards and one unit.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from accelz import HOST
from zero.config.training import Config
from zero.deferred.recording import (
    Hollow,
    Operation,
    Recording,
    allocate,
    each_in,
    generator_of,
    replay,
    storage_of,
)
from zero.errors import ConfigError
from zero.sharding.distributed import is_distributed, local_of
from zero.sharding.forms import RECORDING_ATTRIBUTE
from zero.sharding.guard import NAME_ATTRIBUTE, REASON_ATTRIBUTE, UNBORN, sharded_class

_MOVES = (torch.ops.aten.resize_, torch.ops.aten.set_)  # these change which storage a tensor has
_PAST = frozenset(  # these read memory without going through a dispatch mode
    getattr(Tensor, name)
    for name in """
        numpy __array__ __dlpack__ tolist __repr__ __deepcopy__ __reduce_ex__ untyped_storage storage
        share_memory_ apply_ map_ map2_
    """.split()  # noqa: SIM905
)
SMALL = 4096  # elements; smaller new tensors are made at once: masks, tables, scalars


_PROMISE_ATTRIBUTE = "_zero_promise"  # in the __dict__ of a parameter whose values come from elsewhere


def init(config: Config | None = None) -> AbstractContextManager[None]:
    """Build a model whose parameters have no values until `zero.initialize` shards it.

        with zero.init(config): model = BigModel()

    Values equal those of the plain constructor with the same seed, bit for bit. config: accepted for symmetry
    with `zero.initialize`; only its type is checked. When the block ends, buffers and other tensors have
    their values, and so do parameters that share memory with one of them. DTensors that are made in the block
    without communication, `distribute_tensor(..., src_data_rank=None)`, get their blocks of these values.
    Where the device's storages cannot be resized, the model is to be built on the host.
    """
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"expected a zero.Config, got {type(config).__name__}; write zero.Config(...)")
    return _recorded(draws=True)


def outlined() -> AbstractContextManager[None]:
    """Do as `init` does, for a model that will never have values.

    Nothing is drawn: that would take time and, temporarily, the memory of each parameter.
    """
    return _recorded(draws=False)


@contextmanager
def _recorded(draws: bool) -> Iterator[None]:
    recorder = _Recorder(draws)
    try:
        with recorder, _Past(recorder):
            yield
    finally:
        recorder.finish()


def is_deferred(parameter: nn.Parameter) -> bool:
    """Return whether a parameter was made under `init()` and has no values yet."""
    return RECORDING_ATTRIBUTE in parameter.__dict__


def promise(parameter: nn.Parameter, source: object) -> None:
    """Declare that a deferred parameter's values will come from `source`: materialize() will not set them."""
    parameter.__dict__[_PROMISE_ATTRIBUTE] = source


def promised(parameter: nn.Parameter) -> Any:
    """Return the `source` that promise() was given; None without a promise."""
    return parameter.__dict__.get(_PROMISE_ATTRIBUTE)


def forget_promise(parameter: nn.Parameter) -> None:
    """Forget the promise, once the values have come."""
    parameter.__dict__.pop(_PROMISE_ATTRIBUTE, None)


def materialize(parameters: Iterable[nn.Parameter]) -> None:
    """Give deferred parameters their memory, and their values unless these are promised.

    Other parameters are left alone.
    """
    for parameter in parameters:
        recording: Recording | None = None
        for each in dict.fromkeys((parameter, local_of(parameter))):
            recording, cls = each.__dict__.pop(RECORDING_ATTRIBUTE, (None, type(each)))
            each.__class__ = cls
        if recording is not None:
            number = recording.number(local_of(parameter))
            assert number is not None
            (replay if promised(parameter) is None else allocate)(recording, [number])


class _Past(TorchFunctionMode):
    """Gives hollow tensors their values before calls that read memory without reaching a dispatch mode."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PAST:
            with _disable_current_modes():
                self._recorder.fill(a for a in args if isinstance(a, Tensor))
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Makes new tensors hollow and records what is done to them."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self._recording = Recording()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hollow = [t for t in each_in(Tensor, (args, kwargs)) if self._recording.number(t) is not None]
        if not hollow and not _makes_new(args, kwargs):
            return func(*args, **kwargs)
        if hollow and (_is_view(func) or _restrides(func)):
            return self._view(func, args, kwargs, hollow)
        try:
            shape = _on_meta(func, args, kwargs)
        except RuntimeError:
            return self._really(func, args, kwargs, hollow)
        if self._recordable(func, shape, args, kwargs, bool(hollow)):
            return self._record(func, args, kwargs, shape)
        return self._really(func, args, kwargs, hollow)

    def _view(self, func: Any, args: Any, kwargs: Any, hollow: Sequence[Tensor]) -> Any:
        """Run a call that changes metadata only, without recording it.

        The bytes exist meanwhile, untouched, for the call's bounds check.
        """
        storages = [storage_of(t) for t in hollow]
        for storage in storages:
            storage.resize_(self._recording.nbytes[self._recording.numbers[storage._cdata]])
        try:
            return func(*args, **kwargs)
        finally:
            for storage in storages:
                storage.resize_(0)

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Give the hollow ones among `tensors` their values."""
        numbers = {self._number(t) for t in tensors}
        replay(self._recording, [n for n in numbers if n is not None])

    def finish(self) -> None:
        """End recording: guard the parameters, which stay hollow, and give all other hollow tensors values.

        Parameters get values, too, if another tensor uses their memory: a buffer, or another Parameter. Which
        tensors exist is taken from the garbage collector's list of objects, because parameters are also made
        by deepcopy, and tensors are kept in places that no module knows.
        """
        hollow = self._hollow()
        if self._draws and _shared(hollow):
            hollow.clear()
            gc.collect()  # garbage that waits for the collector must not count as sharing
            hollow = self._hollow()
        shared = _shared(hollow) if self._draws else set()
        # DTensors, by the ids of their local tensors, which have their values.
        owners = {id(local_of(t)): t for t in _living() if is_distributed(t) and isinstance(t, nn.Parameter)}
        owned = [(owners.get(id(t), t), number) for t, number in hollow]
        kept = {p: n for p, n in owned if isinstance(p, nn.Parameter) and n not in shared}
        replay(self._recording, sorted({number for _, number in hollow} - set(kept.values())))
        for parameter in kept:
            name = f"<of shape {tuple(parameter.shape)}>"
            for each in dict.fromkeys((parameter, local_of(parameter))):
                each.__dict__.update({REASON_ATTRIBUTE: UNBORN, NAME_ATTRIBUTE: name})
                each.__dict__[RECORDING_ATTRIBUTE] = (self._recording, type(each))
                each.__class__ = sharded_class(type(each))

    def _hollow(self) -> list[tuple[Tensor, int]]:
        """Return all living hollow tensors with the numbers of their storages."""
        return [(t, number) for t in _living() if (number := self._number(t)) is not None]

    def _number(self, tensor: Tensor) -> int | None:
        """Return the recording's number of a tensor's storage; None also for tensors of other kinds."""
        if is_lazy(tensor):
            return None
        with suppress(RuntimeError):
            return self._recording.number(tensor)
        return None

    def _recordable(self, func: Any, shape: Any, args: Any, kwargs: Any, touches_hollow: bool) -> bool:
        """Return whether the call makes one plain float tensor, in hollow memory or new and large."""
        if func.overloadpacket in _MOVES or not isinstance(shape, Tensor) or not shape.is_floating_point():
            return False
        target = _mutated(func, args, kwargs)
        if target is not None:
            return self._recording.number(target) is not None
        return touches_hollow or shape.numel() >= SMALL

    def _record(self, func: Any, args: Any, kwargs: Any, shape: Tensor) -> Tensor:
        result, output = _mutated(func, args, kwargs), None
        if result is None:
            result = _hollow_like(shape, _device(args, kwargs))
            self._recording.add_storage(result, storage_of(shape).nbytes())
            output = self._reference(result)
        saved_args, saved_kwargs = self._saved(args), self._saved(_explicit(func, args, kwargs, shape))
        touches = {h.storage for h in each_in(Hollow, (saved_args, saved_kwargs, output))}
        writes = {h.storage for h in each_in(Hollow, (_written(func, saved_args, saved_kwargs), output))}
        operation = Operation(func, saved_args, saved_kwargs, output, touches, writes)
        if self._draws and torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(operation, func, args, kwargs, result)
        self._recording.record(operation)
        return result

    def _draw(self, operation: Operation, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """Advance the generator as the real call would, and record its state before."""
        operation.generator = kwargs.get("generator") or generator_of(result.device)
        operation.state = operation.generator.get_state()
        scratch: dict[int, Tensor] = {}

        def stand_in(tensor: Tensor) -> Tensor:
            if self._recording.number(tensor) is None:
                return tensor
            if id(tensor) not in scratch:
                scratch[id(tensor)] = torch.zeros_like(_meta(tensor), device=tensor.device)
            return scratch[id(tensor)]

        args, kwargs = tree_map_only(Tensor, stand_in, (args, kwargs))
        func(*args, **kwargs)

    def _really(self, func: Any, args: Any, kwargs: Any, hollow: Sequence[Tensor]) -> Any:
        """Run a call that cannot be deferred; its hollow inputs get their values now."""
        self.fill(hollow)
        return func(*args, **kwargs)

    def _reference(self, tensor: Tensor) -> Hollow:
        number = self._recording.number(tensor)
        assert number is not None
        return Hollow(
            number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    def _saved(self, value: Any) -> Any:
        """Return arguments as the recording keeps them: hollow tensors by reference, others by value."""
        return tree_map_only(
            Tensor,
            lambda t: t.detach().clone() if self._recording.number(t) is None else self._reference(t),
            value,
        )


def _shared(hollow: Iterable[tuple[Tensor, int]]) -> set[int]:
    """Return the numbers of the storages that several of the tensors use."""
    return {number for number, uses in Counter(number for _, number in hollow).items() if uses > 1}


def _living() -> list[Tensor]:
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the call's result as a meta tensor: shape, strides and dtype without values."""
    args, kwargs = tree_map_only(Tensor, _meta, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    kwargs.pop("generator", None)
    kwargs.pop("pin_memory", None)
    return func(*args, **kwargs)


def _hollow_like(shape: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty(0, dtype=shape.dtype, device=device)
    storage_of(tensor).resize_(storage_of(shape).nbytes())
    tensor = tensor.as_strided(shape.shape, shape.stride())
    storage_of(tensor).resize_(0)
    return tensor


def _explicit(func: Any, args: Any, kwargs: Any, shape: Tensor) -> Any:
    """Return kwargs with the default dtype made explicit, as it may be another when the call is replayed."""
    takes_dtype = any(argument.name == "dtype" for argument in func._schema.arguments)
    if not takes_dtype or kwargs.get("dtype") is not None or each_in(Tensor, (args, kwargs)):
        return kwargs
    return {**kwargs, "dtype": shape.dtype}


def _device(args: Any, kwargs: Any) -> torch.device:
    explicit = kwargs.get("device")
    if explicit is not None:
        return torch.device(explicit)
    tensors = each_in(Tensor, (args, kwargs))
    return tensors[0].device if tensors else HOST


def _makes_new(args: Any, kwargs: Any) -> bool:
    """Return whether this is a factory call: no tensor goes in, and it names a device other than meta."""
    named = "device" in kwargs and not each_in(Tensor, (args, kwargs))
    return named and torch.device(kwargs["device"] or HOST).type != "meta"


def _is_view(func: Any) -> bool:
    infos = (returned.alias_info for returned in func._schema.returns)
    return any(info is not None and not info.is_write for info in infos)


def _restrides(func: Any) -> bool:
    """Return whether the call changes a tensor's shape or strides in place, and nothing else."""
    return torch.Tag.inplace_view in func.tags and func.overloadpacket not in _MOVES


def _mutated(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the tensor that an in-place or out= operation writes to and returns; None for others."""
    return next((value for value in _written(func, args, kwargs) if isinstance(value, Tensor)), None)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to."""
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
