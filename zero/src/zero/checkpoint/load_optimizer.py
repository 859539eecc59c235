"""The optimizer's part of a load: the state of this rank's pieces, and the param_groups' options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from accelz import HOST
from zero.checkpoint.engine_state import EngineParts
from zero.checkpoint.param_groups import merged, misfits, take
from zero.errors import OptimizerError, StateError
from zero.files.dtypes import TORCH
from zero.files.manifest import Manifest, ParameterEntry, Sized, model_key, state_key
from zero.files.names import is_floating, raise_for
from zero.files.value_forms import decode
from zero.loading.tensor_reader import TensorReader
from zero.loading.weights import stored_region, stride_of
from zero.optimizer.joint import kind_of, kinds_of_groups, members
from zero.optimizer.piece_state import SHAPE, check_class, in_memory_order, is_description, moved, restored
from zero.optimizer.stepped import SteppedPiece, SteppedSubGroup
from zero.optimizer.stepping import goes_by_element
from zero.sharding.layout import ParameterSpec
from zero.tiers.values import changing


class OptimizerLoad:
    """Loads the optimizer's state. sources: for each parameter, its name in the checkpoint."""

    def __init__(
        self, engine: EngineParts, manifest: Manifest, reader: TensorReader, sources: Mapping[str, str]
    ) -> None:
        self._engine = engine
        self._optimizer = engine.sharded_optimizer.optimizer
        self._manifest = manifest
        self._reader = reader
        self._sources = sources
        self._entries = {entry.name: entry for entry in manifest.parameters}

    def check(self, strict: bool) -> None:
        """Raise StateError if the checkpoint's optimizer is of another kind, or its state does not fit.

        strict: also for parameters without state in the checkpoint, or in another of its param_groups.
        """
        optimizer, saved = self._optimizer, self._manifest.optimizer
        if kind_of(optimizer) != saved.kind:
            raise StateError(
                f"the checkpoint's optimizer is {saved.kind}, but this one is {kind_of(optimizer)}; "
                "weights_only=True loads only the weights"
            )
        if len(saved.param_groups) != len(optimizer.param_groups):
            raise StateError(
                f"the checkpoint's optimizer has {len(saved.param_groups)} param_groups, but this one has "
                f"{len(optimizer.param_groups)}; weights_only=True loads only the weights"
            )
        kinds, before = kinds_of_groups(optimizer), self._saved_kinds
        if list(kinds) != list(before):
            raise StateError(
                f"the checkpoint's param_groups belong to {', '.join(before)}, but this optimizer's to "
                f"{', '.join(kinds)}; weights_only=True loads only the weights"
            )
        missing: dict[str, None] = {}  # a parameter may have several pieces
        other: dict[str, None] = {}
        for stepped, piece, spec, entry in self._pieces():
            if entry is None and spec.name in self._sources:
                missing[spec.name] = None
            elif entry is not None and not self._state_fits(entry, piece, spec, stepped.rule is not None):
                other[f"{spec.name} ({', '.join(entry.state)})"] = None
        raise_for(
            {
                "without optimizer state (strict=False starts without it)": list(missing) if strict else [],
                "with different optimizer state": list(other),
                "in a different param_group than in the checkpoint": self._elsewhere() if strict else [],
                "options of param_groups": [
                    f"param_groups[{index}]: {wrong}"
                    for index in range(len(self._options))
                    for wrong in self._misfits(index)
                ],
            }
        )

    @cached_property
    def _options(self) -> list[dict[str, Any]]:
        """The options to set, by param_group."""
        return [self._reader.decode(group) for group in self._manifest.optimizer.param_groups]

    def _misfits(self, index: int) -> list[str]:
        group, saved = self._optimizer.param_groups[index], self._options[index]
        wrong = misfits(group, saved)
        if not wrong:
            try:
                self._engine.sharded_optimizer.check_options(index, merged(group, saved))
            except OptimizerError as error:
                wrong.append(str(error))
        return wrong

    @property
    def _saved_kinds(self) -> Sequence[str]:
        """The class of each param_group's optimizer in the checkpoint."""
        saved = self._manifest.optimizer
        return saved.of_groups or [saved.kind] * len(saved.param_groups)

    def _elsewhere(self) -> list[str]:
        """The parameters that are in another param_group than in the checkpoint."""
        mine = self._engine.param_group_of
        groups = [group for unit in self._engine.units for group in unit.groups]
        named = [pair for group in groups for pair in zip(group.names, group.parameters, strict=True)]
        found = [(name, self._with_state(name), mine[p]) for name, p in named if p in mine]
        return [name for name, entry, index in found if entry is not None and entry.group != index]

    def _state_fits(
        self, entry: ParameterEntry, piece: SteppedPiece, spec: ParameterSpec, kernel: bool
    ) -> bool:
        assert entry.group is not None
        kinds = kinds_of_groups(self._optimizer)
        if self._saved_kinds[entry.group] != kinds[piece.param_group]:
            return False
        tensors = {key: self._manifest.tensor(state_key(key, entry.name)) for key in entry.state}
        model = self._manifest.tensor(model_key(entry.name))
        has_all = spec.shape == model.shape and piece.piece.length == spec.numel
        if any(tensor.numel != 1 for key, tensor in tensors.items() if key == "step"):
            return False
        for wrapper in filter(is_description, entry.values.values()):
            check_class(wrapper)
            if not has_all or wrapper[SHAPE] != list(model.shape):
                return False
            restored(
                decode(wrapper, self._blank), HOST
            )  # what a class does not accept is told before a change
        if kernel:
            return self._kernel_takes(piece, entry, tensors)
        wide = {key: tensor for key, tensor in tensors.items() if tensor.shape}
        if self._by_element[piece.param_group] and not all(is_floating(t.dtype) for t in wide.values()):
            return False
        whole = has_all and not self._by_element[piece.param_group]
        return whole or all(self._sharded(key, entry, tensor) for key, tensor in wide.items())

    def _blank(self, key: str) -> Tensor:
        """Zeros in place of a tensor of the checkpoint."""
        entry = self._manifest.tensors[key]
        return torch.zeros(entry.shape, dtype=TORCH[entry.dtype], device=HOST)

    @cached_property
    def _by_element(self) -> list[bool]:
        """For each param_group, whether its optimizer is known to have numbers for each element as state."""
        each = members(self._optimizer)
        return [goes_by_element(optimizer) for optimizer in each for _ in optimizer.param_groups]

    def _kernel_takes(self, piece: SteppedPiece, entry: ParameterEntry, tensors: Mapping[str, Sized]) -> bool:
        """Whether the checkpoint has the state of a kernel: numbers for each element, and the step."""
        mine = set(self._optimizer.state[piece.parameter])
        known = set(entry.state) in (set(), mine) and not any(v is not None for v in entry.values.values())
        return known and all(
            is_floating(tensor.dtype) and (key == "step" or self._sharded(key, entry, tensor))
            for key, tensor in tensors.items()
        )

    def fill(self) -> None:
        """Fill the state of this rank's pieces, and the options of the param_groups."""
        for stepped, piece, _, entry in self._pieces():
            if entry is not None:
                self._fill_piece(stepped, piece, entry)
            if stepped.rule is not None and stepped.rule.counts:
                state = self._optimizer.state[piece.parameter]
                stepped.take_steps(piece, float(state["step"]))
        for group, saved in zip(self._optimizer.param_groups, self._options, strict=True):
            take(group, saved)

    def _pieces(self) -> Iterator[tuple[SteppedSubGroup, SteppedPiece, ParameterSpec, ParameterEntry | None]]:
        """This rank's pieces, with their parameters and these in the checkpoint: None if it has no state."""
        for stepped in self._engine.sharded_optimizer.subs:
            for piece in stepped.pieces:
                spec = stepped.specs[piece.piece.index]
                yield stepped, piece, spec, self._with_state(spec.name)

    def _fill_piece(self, stepped: SteppedSubGroup, piece: SteppedPiece, entry: ParameterEntry) -> None:
        state = self._optimizer.state[piece.parameter]
        if stepped.rule is None:
            state.clear()  # state that the checkpoint lacks did not exist yet
        elif not entry.state:  # never stepped, for which a kernel's state is zero
            for value in state.values():
                with changing(value) as values:
                    values.zero_()
        for key in entry.state:
            self._fill_state(key, stepped, piece, entry)
        for key, value in entry.values.items() if stepped.rule is None else ():
            found, device = self._reader.decode(value), stepped.master.device
            if is_description(found):
                state[key] = restored(found, device)
            else:
                state[key] = moved(key, found, piece.parameter, device)

    def _fill_state(
        self, key: str, stepped: SteppedSubGroup, piece: SteppedPiece, entry: ParameterEntry
    ) -> None:
        name, parameter = state_key(key, entry.name), piece.parameter
        tensor, state = self._manifest.tensor(name), self._optimizer.state[parameter]
        if self._sharded(key, entry, tensor):
            if key not in state:
                dtype, device = TORCH[tensor.dtype], stepped.master.device
                shape, strides = parameter.shape, parameter.stride()
                state[key] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            group, index = stepped.group, piece.piece.index
            stride = stride_of(stepped.specs[index])
            region = None if stepped.joins_blocks else stored_region(group, index, self._reader, name)
            with changing(in_memory_order(state[key], parameter)) as target:
                self._reader.fill(name, target, piece.piece.start, stride, region)
        elif key in state:
            state[key].copy_(self._reader.whole(name))
        else:
            options = self._optimizer.param_groups[piece.param_group]
            host = key == "step" and not (options.get("capturable") or options.get("fused"))
            state[key] = self._reader.whole(name).to(HOST if host else stepped.master.device)

    def _sharded(self, key: str, entry: ParameterEntry, tensor: Sized) -> bool:
        """Whether a state tensor has one value per element of its parameter."""
        return key != "step" and tensor.shape == self._manifest.tensor(model_key(entry.name)).shape

    def _with_state(self, name: str) -> ParameterEntry | None:
        """The parameter's entry in the checkpoint, if the optimizer had it in a group there."""
        entry = self._entries.get(self._sources.get(name, ""))
        return entry if entry is not None and entry.trainable and entry.group is not None else None
