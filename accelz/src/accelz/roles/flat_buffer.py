"""Flat buffers: all parameters of a group in one contiguous buffer, each Parameter a view of it.

Glossary
--------
slot        where one parameter lies in the buffer: offset (elements), shape, strides.
released    the buffer's bytes are dropped; every view keeps its shape, with no memory behind it (a kept
            buffer's bytes stay, their content undefined).
materialized the bytes are back (content undefined until written), under the same views.
bound       the parameters' `.data` are this buffer's views (several buffers may serve the same
            parameters in different dtypes; only one is bound at a time).
common      the ranks of a node see the same bytes, which exist as long as the buffer does: what one rank
            writes, all of them read.

How parameters *become* views depends on the device, and is decided by a strategy: `StorageSwap` where a
device Parameter may be given host storage, `CopyAndShrink` where it may not, `CopyAndKeep` where storages
cannot be resized. None needs memory for the model twice, and all keep every Parameter object, its hooks,
ties, `requires_grad` and (dense) strides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accelz.ranks.group import Group
from accelz.roles.host import HOST


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its flat buffer. offset in elements; stride as in `Tensor.stride()`."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """`tensor`'s strides if they are dense (channels-last, transposed, …), else contiguous ones."""
    dims = sorted((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=tensor.stride)
    expected = 1
    for dim in dims:
        if tensor.stride(dim) != expected:
            return _contiguous_stride(tensor.shape)
        expected *= tensor.shape[dim]
    return tuple(tensor.stride())


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class FlatBuffer:
    """A one-dimensional buffer and the parameters that live in it.

    data: the buffer, shape (numel,), which has its storage to itself. common: whether all ranks of a node see
    its bytes; such a buffer is always materialized, and releasing it has no effect.
    """

    def __init__(
        self,
        data: Tensor,
        parameters: Sequence[nn.Parameter],
        slots: Sequence[Slot],
        common: bool = False,
    ) -> None:
        self.data = data
        self.common = common
        self.parameters = tuple(parameters)
        self.slots = tuple(slots)
        self.nbytes = data.numel() * data.element_size()
        self._storage = data.untyped_storage()
        # Views are made once, while the bytes exist: as_strided refuses an emptied storage.
        self.views = tuple([data.as_strided(s.shape, s.stride, s.offset) for s in slots])

    @property
    def materialized(self) -> bool:
        return self._storage.nbytes() == self.nbytes

    def materialize(self) -> None:
        """Bring the bytes back, content undefined. Write to them through `data`."""
        if not self.materialized:
            self._storage.resize_(self.nbytes)

    def release(self) -> None:
        """Drop the bytes. Views, including those saved by autograd, are valid again after materialize()."""
        if self.nbytes and not self.common:
            self._storage.resize_(0)

    def bind(self) -> None:
        """Make every parameter a view of this buffer."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            rebind(parameter, view)


class KeptBuffer(FlatBuffer):
    """A buffer of a device whose storages cannot be resized: released, it keeps its bytes.

    What is computed is the same; what is saved by releasing is nothing.
    """

    _released = False

    @property
    def materialized(self) -> bool:
        return not self._released

    def materialize(self) -> None:
        self._released = False

    def release(self) -> None:
        self._released = self.nbytes > 0 and not self.common


def rebind(parameter: nn.Parameter, value: Tensor) -> None:
    """Give `parameter` the tensor `value` as its data, keeping its identity, hooks and attributes.

    Where `.data` does not accept a tensor of the other type (a host Parameter moving to a device that torch
    treats as foreign), the Parameter's innards are swapped; this requires a leaf that no graph holds.
    """
    try:
        parameter.data = value
    except RuntimeError:
        if parameter.device.type == value.device.type:
            raise
        _swap_innards(parameter, value)


def unshare(parameters: Iterable[nn.Parameter]) -> None:
    """Move to the host those of `parameters` that share a device storage with each other.

    While they are flattened one buffer at a time, they would otherwise keep that whole storage alive beside
    the buffers until the last of them has left it.
    """
    sharing: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.device.type not in (HOST.type, "meta"):
            sharing.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    for members in sharing.values():
        for parameter in members if len(members) > 1 else ():
            rebind(parameter, parameter.data.to(HOST))


def _swap_innards(parameter: nn.Parameter, value: Tensor) -> None:
    twin = nn.Parameter(value.new_empty(0), requires_grad=parameter.requires_grad)
    twin.data = value  # a Parameter made from `value` would count writes to it: autograd would object
    twin.__dict__.update(parameter.__dict__)
    twin.__class__ = parameter.__class__
    hooks = parameter._backward_hooks
    accumulated = parameter._post_accumulate_grad_hooks
    torch.utils.swap_tensors(parameter, twin)
    # Hooks belong to the innards and would otherwise stay behind with the twin.
    parameter._backward_hooks = hooks
    parameter._post_accumulate_grad_hooks = accumulated


class FlatBufferStrategy(ABC):
    """How a device turns parameters into views of a flat buffer.

    buffer_type: the class of its buffers, of which `empty_like` makes more.
    """

    buffer_type: type[FlatBuffer] = FlatBuffer

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def flatten(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], numel: int, dtype: torch.dtype
    ) -> FlatBuffer:
        """Move `parameters` (on the host or the device, any dtype) into a new buffer and bind them to it.

        numel: elements of the buffer; those that no slot covers are zero. Values are kept, cast to `dtype`.
        """

    def share(self, buffer: FlatBuffer, group: Group) -> FlatBuffer | None:
        """Move `buffer` into memory that all ranks of a node see, on every node of `group`, or return None.

        buffer: bound, with equal values on every rank; on success its own bytes are given back. Returns a
        bound, common buffer with the same slots. Collective: every rank calls it and gets the same answer.
        From then on a rank writes only to its own slice, and only while no other rank reads. An all-gather of
        the buffer from its slices is complete as soon as every rank has reached it and the slices owned by
        the ranks of other nodes have been written; where values have not changed, that write changes nothing.
        """
        return None

    def empty_like(self, buffer: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
        """Return a released, unbound buffer for the same parameters and slots in another dtype."""
        data = torch.empty(buffer.data.numel(), dtype=dtype, device=self.device)
        other = self.buffer_type(data, buffer.parameters, buffer.slots)
        other.release()
        return other


class StorageSwap(FlatBufferStrategy):
    """For devices whose Parameters may be given host storage (cpu, cuda, xpu).

    Peak while flattening: on a device, the buffer alone, because the parameters wait on the host. On the
    host, the parameters once plus one parameter, because each one's memory is given back as soon as it has
    been copied, and the buffer's pages are allocated as they are written.
    """

    def flatten(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], numel: int, dtype: torch.dtype
    ) -> FlatBuffer:
        for parameter in parameters:
            parameter.data = parameter.data.to(HOST)
        data = torch.empty(numel, dtype=dtype, device=self.device)
        _zero_gaps(data, slots)
        buffer = self.buffer_type(data, parameters, slots)
        for parameter, view in zip(parameters, buffer.views, strict=True):
            _copy(view, parameter.data)
            rebind(parameter, view)
        return buffer


class CopyAndShrink(FlatBufferStrategy):
    """For devices whose Parameters cannot be given host storage (hpu, most PrivateUse1 devices).

    Each parameter is copied to the host and shrunk to 0 elements; the buffer is put together on the host and
    moved to the device in one piece. Device peak: the buffer alone. A storage is freed with the last tensor
    that uses it: one that a state dict shares, say, stays as it is, and one that holds parameters of this
    buffer only is freed before the buffer is allocated.
    """

    def flatten(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], numel: int, dtype: torch.dtype
    ) -> FlatBuffer:
        staged = torch.empty(numel, dtype=dtype, device=HOST)
        _zero_gaps(staged, slots)
        for parameter, slot in zip(parameters, slots, strict=True):
            _copy(staged.as_strided(slot.shape, slot.stride, slot.offset), parameter.data)
            parameter.data = parameter.data.new_empty(0)
        buffer = self.buffer_type(staged.to(self.device), parameters, slots)
        buffer.bind()
        return buffer


class CopyAndKeep(CopyAndShrink):
    """CopyAndShrink for devices without `storage_resize`: buffers keep their bytes when they are released."""

    buffer_type = KeptBuffer


def _copy(to: Tensor, values: Tensor) -> None:
    """Copy values, cast. Bytes that need no cast are copied as bytes: torch cannot copy all float4."""
    as_bytes = to.dtype is values.dtype and to.element_size() == 1
    if as_bytes:
        to.view(torch.uint8).copy_(values.view(torch.uint8))
    else:
        to.copy_(values)


def _zero_gaps(data: Tensor, slots: Sequence[Slot]) -> None:
    values = data.view(torch.uint8) if data.element_size() == 1 else data  # torch cannot fill float4
    end = 0
    for slot in sorted(slots, key=lambda s: s.offset):
        values[end : slot.offset].zero_()
        end = max(end, slot.offset + slot.numel)
    values[end:].zero_()
