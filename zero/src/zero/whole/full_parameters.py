"""Assemble whole tensors from shards, and distribute them to shards, by parameter name.

Everything here that takes or returns whole values is collective: every rank calls it, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor, nn

from zero.communication.communicator import Communicator
from zero.communication.mesh import Mesh, Meshes
from zero.errors import StateError, UsageError, some
from zero.optimizer.integrity import Integrity
from zero.sharding.alterations import replaced
from zero.sharding.flat_group import FlatGroup
from zero.sharding.forms import named_leaves
from zero.sharding.lifetime import Uncopied
from zero.sharding.shard_source import fetch
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.values import Values, put
from zero.warning import warn

Place = tuple[ShardedUnit, FlatGroup, int]  # a parameter's unit, group, and index in the group


@dataclass(eq=False, repr=False)
class FullParameters(Uncopied):
    """The sharded units as a set of named parameters. Making one is collective.

    integrity: of their engine, asked before a `gathered` block and told how a change of weights has ended.
    """

    module: InitVar[nn.Module]
    units: tuple[ShardedUnit, ...]
    communicator: Communicator
    meshes: Meshes
    integrity: Integrity

    def __post_init__(self, module: nn.Module) -> None:
        # With several copies of the model, some may have common memory and others not.
        self._common = self.communicator.agree(any(unit.common for unit in self.units))
        self._places: dict[str, Place] = {}  # by every name of a parameter, the units' and the module's
        places: dict[nn.Parameter, Place] = {}
        for unit, group in ((u, g) for u in self.units for g in u.groups):
            for index, (name, parameter) in enumerate(zip(group.names, group.parameters, strict=True)):
                places[parameter] = self._places[name] = unit, group, index
        self._places |= {name: places[leaf] for name, leaf in named_leaves(module) if leaf in places}

    @property
    def is_source(self) -> bool:
        """Whether this rank reads and writes state for all that have the same parameters: rank 0, and the
        first of others where parameters differ by rank."""
        return self.meshes.is_source()

    @property
    def device(self) -> torch.device:
        """The device that whole values are on."""
        return self.units[0].groups[0].home.data.device

    def locate(self, name: str) -> Place:
        """Return where a parameter lives; raises StateError for an unknown name, UsageError for no string."""
        if not isinstance(name, str):
            raise UsageError(
                f"expected a parameter's name as in model.named_parameters(), got {type(name).__name__}"
            )
        place = self._places.get(name)
        if place is None:
            raise StateError(f"the model has no parameter {name!r}; see dict(model.named_parameters())")
        return place

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wrap a change of weights by all ranks `together`; interrupts the engine after an error."""
        self.begin_write()
        try:
            with self.communicator.together():
                yield
        except BaseException:
            self.integrity.interrupt()
            raise

    def gather(self, unit: ShardedUnit, group: FlatGroup, values: Values) -> Tensor:
        """Return all ranks' slices put together, shape (layout.numel,), on the device; or values of which
        each is for several elements.

        Call it in a `Communicator.together` block.
        """
        with group.room_for_whole(values.dtype):
            shard = fetch(values, group.home.data.device, self.communicator)
            if group.shards == 1:
                return shard
            full = torch.empty(shard.numel() * group.shards, dtype=shard.dtype, device=shard.device)
            self.communicator.all_gather(unit.name, full, shard, group.mesh.shards).wait()
            return full

    def parameter(self, name: str, shard: Values) -> Tensor:
        """Return a copy of one parameter's whole value in fp32, from its group's `shard`."""
        unit, group, index = self.locate(name)
        with self.communicator.together(), group.room_for_whole(torch.float32):
            return view_of(self.gather(unit, group, shard), group, index).to(torch.float32, copy=True)

    def spread(
        self, unit: ShardedUnit, group: FlatGroup, dtype: torch.dtype, values: Mapping[int, Tensor | None]
    ) -> Tensor:
        """Return a whole buffer, on every rank's device, with the source's whole `values` by parameter
        index."""
        with group.room_for_whole(dtype):
            whole = torch.zeros(group.layout.numel, dtype=dtype, device=group.home.data.device)
            if self.is_source:
                for index, value in values.items():
                    assert value is not None
                    view_of(whole, group, index).copy_(value)
            self.communicator.spread(unit.name, whole, group.mesh)
        return whole

    def begin_write(self) -> None:
        """Prepare for a change of shards: drop persistent whole values, and wait for readers of shards.

        The device may still be reading shards on the host, and other ranks those in common memory.
        """
        torch.clear_autocast_cache()  # in a block that goes on, its casts of weights are old
        for unit in self.units:
            unit.begin_write()
        if self._common:
            self.communicator.barrier("change of the weights")

    def hold(self, names: Sequence[str]) -> None:
        """Keep the units of these parameters gathered until unhold()."""
        self.integrity.check_showable()
        units = self._units_of(names)
        if not any(unit.held_exact for unit in units) and (lost := [n for u in units for n in u.rebound()]):
            raise replaced(lost)
        self.take_in_frozen()
        held: list[ShardedUnit] = []
        try:
            with self.communicator.together():
                for unit in units:
                    held.append(unit)
                    unit.hold_exact()
        except BaseException:
            self._let_go(held)
            raise

    def unhold(self, names: Sequence[str]) -> None:
        """End a hold()."""
        self._let_go(self._units_of(names))

    def _let_go(self, units: Sequence[ShardedUnit]) -> None:
        lost = []
        for unit in units:
            lost += unit.unhold_exact()
            unit.release()
        if lost:
            warn(f"the values of {some(lost)} {_LOST}", RuntimeWarning)

    def check_shapes(self, names: Sequence[str]) -> None:
        """Raise ModelError if a held parameter was given values of another shape."""
        for _, group, index in map(self.locate, names):
            group.binding.check_fits(index, shape_only=True)

    def write_back(self, names: Sequence[str], source: int) -> None:
        """Write held parameters' values from rank `source` into every rank's shards and masters.

        The parameters may have been given other memory: ModelError, before anything changes, if it does not
        fit.
        """
        places = [self.locate(name) for name in names]
        _take_in([(group, index) for _, group, index in places if index in group.binding.moved_away()])
        with self.changing():
            for unit, group, index in places:
                slot = group.layout.slots[index]
                values = group.whole[slot.offset : slot.offset + slot.numel]
                self.communicator.spread(unit.name, values, group.mesh, source)
                self.assign(group, index, group.whole)
        with self.communicator.together():
            for unit in self._units_of(names):
                unit.renew()
        self.integrity.snapshot_versions()

    def take_in_frozen(self) -> None:
        """Take over the values of frozen, whole parameters that a program has given other memory.

        Momentum encoders do so: it is the program that trains them. Raises ModelError if the values do not
        fit.
        """
        found = [place for unit in self.units for place in unit.replaced_frozen()]
        _take_in(found)
        for group, index in found:
            self.assign(group, index, group.whole)

    def assign(self, group: FlatGroup, index: int, whole: Tensor) -> None:
        """Copy parameter `index` from a whole buffer into this rank's shard and its master."""
        with self.communicator.postponing_disk_errors():
            for piece in (piece for piece in group.pieces if piece.index == index):
                start = group.layout.slots[index].offset + piece.start
                values = whole[start : start + piece.length]
                put(group.shard, piece.shard_slice, values)
                if group.master is not None and group.master is not group.shard:
                    put(group.master, piece.shard_slice, values)

    def _units_of(self, names: Sequence[str]) -> list[ShardedUnit]:
        return list(dict.fromkeys(self.locate(name)[0] for name in names))


def view_of(whole: Tensor, group: FlatGroup, index: int) -> Tensor:
    """Return a view of parameter `index` in a whole buffer, in its shape and strides."""
    slot = group.layout.slots[index]
    return whole.as_strided(slot.shape, slot.stride, whole.storage_offset() + slot.offset)


def _take_in(places: Sequence[tuple[FlatGroup, int]]) -> None:
    """Copy the values of parameters that were given other memory, by `parameter.data = ...`, to the groups'.

    Raises ModelError, before anything changes, if one does not fit.
    """
    for group, index in places:
        group.binding.check_fits(index)
    for group, index in places:
        group.binding.take_in(index)


def spread_buffer(communicator: Communicator, name: str, buffer: Tensor, mesh: Mesh) -> None:
    """Give every rank of a mesh its first rank's values of a module buffer."""
    if communicator.alike.size > 1 and buffer.numel():
        flat = buffer.detach().reshape(-1)  # a copy where the buffer is not contiguous
        communicator.spread(name, flat.view(torch.uint8), mesh)  # some dtypes have no collectives
        buffer.detach().copy_(flat.view(buffer.shape))


_LOST = (
    "that were assigned to `.data` inside zero.gathered() are dropped at the end of the block, and the "
    "engine's values are back: to keep them, pass write_rank=<the rank that writes> and let them have the "
    "dtype and the device that the parameters have"
)
