"""Reading DeepSpeed's ZeRO checkpoints, stages 1 to 3, and its universal ones, without DeepSpeed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.sources.deepspeed_files import STAND_INS, master_file, model_files, optimizer_files
from zero.sources.flat_groups import GroupStretch, stage2, stage3
from zero.sources.inert_pickle import StoredTensor, refusal, shape_of, strangers_in, tensors_in
from zero.sources.record_source import RecordSource
from zero.sources.source import TensorInfo, TensorKind
from zero.sources.torch_file import TorchFile

Shape = tuple[int, ...]
# By whether it is stage 3.
_FLAT_GROUPS = {False: "single_partition_of_fp32_groups", True: "fp32_flat_groups"}
_READ = ("zero_stage", "partition_count", "param_alignment_paddings")
_READ_OF_MODEL = (
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"
)  # fmt: skip


class FileStretch(NamedTuple):
    """Where a stretch of a parameter is stored.

    The parameter's elements from `start` on are elements `first` to `first + length` of `tensor` in `file`.
    """

    start: int
    file: TorchFile
    tensor: StoredTensor
    first: int
    length: int


class DeepSpeedWeights(RecordSource):
    """A checkpoint of DeepSpeed.

    path: the directory with the files of model states. model_files: how many of these there are.
    """

    @abstractmethod
    def masters(self, groups: Sequence[Mapping[str, Shape]]) -> Mapping[str, Sequence[FileStretch]]:
        """Where the fp32 masters of all parameters are, by name. groups: names and shapes of each group."""

    def more_facts(self) -> dict[str, Any]:
        states = self._model[0].content
        steps, version = states.get("global_steps"), states.get("ds_version")
        counted = steps is None or (isinstance(steps, int) and 0 <= steps < 1 << 62)
        if not counted or not isinstance(version, (str, type(None))):
            raise CorruptCheckpointError(
                f"{self._model[0].path}: global_steps is not a number, or ds_version not a name"
            )
        return {"steps": steps, "saved by": f"DeepSpeed {version}"}

    def torch_file(self, path: Path, client: bool = False) -> TorchFile:
        """Open a file of this checkpoint. client: the file may also hold objects of the job's own."""
        file = TorchFile(path, STAND_INS, strangers=client)
        if client and isinstance(file.content, Mapping):
            _refuse_strangers(file.path, file.content, _READ_OF_MODEL)
        self.add_file(file.path, file.records)
        return file

    def describe(self) -> None:
        paths = model_files(self.path)
        if not paths:
            raise CheckpointError(f"{self.path} is incomplete: it has no model-state files")
        first = self.torch_file(paths[0], client=True)
        if not isinstance(first.content, Mapping):
            raise CorruptCheckpointError(f"{first.path} holds no model states")
        self._sharded = paths[0].name.startswith("zero_pp_rank_")
        self.model_files = len(paths)
        self._module: Mapping[str, Any] = _mapping(first, "module")
        groups = _groups(first)
        masters = self.masters(groups)
        frozen = {n: _shape(first, n, shape) for n, shape in _mapping(first, "frozen_param_shapes").items()}
        more = paths[1:] if self._sharded and frozen else []
        self._model = [first, *(self.torch_file(path, client=True) for path in more)]
        self._lay_out({n: shape for group in groups for n, shape in group.items()}, masters, frozen)

    def _lay_out(
        self,
        shapes: Mapping[str, Shape],
        masters: Mapping[str, Sequence[FileStretch]],
        frozen: Mapping[str, Shape],
    ) -> None:
        first = self._model[0]
        self._aliases = _aliases(first, {*shapes, *frozen, *self._module})
        further = {alias for names in self._aliases.values() for alias in names}
        buffers = set(first.content.get("buffer_names") or ())
        self._infos: list[TensorInfo] = []
        for name in dict.fromkeys([*self._module, *shapes, *frozen]):
            if name in shapes:
                dtype = masters[name][0].tensor.dtype if masters[name] else "F32"
                self._add(name, shapes[name], dtype, "parameter", masters[name])
            elif name in frozen:
                self._add_frozen(name, frozen[name])
            elif name not in further:
                self._add_whole(name, "buffer" if name in buffers else "frozen")
        self.tensors = tuple(self._infos)

    def _add(
        self, name: str, shape: Shape, stored: str, kind: TensorKind, values: Iterable[FileStretch]
    ) -> None:
        placeholder = self._module.get(name)
        trained = placeholder.dtype if isinstance(placeholder, StoredTensor) else stored
        aliases = tuple(self._aliases.get(name, ()))
        self._infos.append(TensorInfo(name, shape, stored, trained, kind, aliases))
        for stretch in values:
            self.place(len(self._infos) - 1, *stretch)

    def _add_frozen(self, name: str, shape: Shape) -> None:
        """Add a frozen parameter: stored whole, or at stage 3 as a shard in each rank's file."""
        parts = [(file, _mapping(file, "frozen_param_fragments").get(name)) for file in self._model]
        values: list[FileStretch] = []
        start, numel = 0, math.prod(shape)
        for file, part in parts:
            if not isinstance(part, StoredTensor) or (not self._sharded and part.shape != shape):
                raise CorruptCheckpointError(f"{file.path} lacks its part of the frozen parameter {name!r}")
            length = min(part.numel, numel - start)
            values.append(FileStretch(start, file, part, 0, length))
            start += length
        if start != numel:
            raise CorruptCheckpointError(
                f"{self.path}: the parts of {name!r} have {start} of {numel} elements"
            )
        self._add(name, shape, values[0].tensor.dtype, "frozen", values)

    def _add_whole(self, name: str, kind: TensorKind) -> None:
        """Add a buffer, or a frozen parameter that only the module's state has."""
        value, file = self._module[name], self._model[0]
        if not isinstance(value, StoredTensor):
            self.left_out += (name,)
        elif kind == "frozen" and self._sharded:
            raise CorruptCheckpointError(f"{file.path} names {name!r} but does not say where its values are")
        else:
            whole = FileStretch(0, file, value, 0, value.numel)
            self._add(name, value.shape, value.dtype, kind, [whole])


class ShardedSource(DeepSpeedWeights):
    """A checkpoint as DeepSpeed saves it: for each rank and group, one flat tensor of masters."""

    format = "DeepSpeed ZeRO"

    def masters(self, groups: Sequence[Mapping[str, Shape]]) -> Mapping[str, Sequence[FileStretch]]:
        files = [self.torch_file(path, client=True) for path in optimizer_files(self.path)]
        states = [_mapping(file, "optimizer_state_dict") for file in files]
        for file, state in zip(files, states, strict=True):
            _refuse_strangers(file.path, state, (*_READ, *_FLAT_GROUPS.values()))
        self._ranks = len(files)
        self._stage = int(states[0].get("zero_stage", 1))  # BF16_Optimizer is stage 1 and does not say so
        self._check_ranks(files, states)
        key = _FLAT_GROUPS[self._stage == 3]
        flat = [_flat(file, state, key) for file, state in zip(files, states, strict=True)]
        sizes = [[group.numel for group in rank] for rank in flat]
        if len({len(rank) for rank in sizes}) != 1:
            raise CorruptCheckpointError(f"{self.path}: the ranks have different numbers of groups")
        if self._stage == 3:
            places = stage3(groups, sizes)
        else:
            places = stage2(groups, sizes, states[0].get("param_alignment_paddings"))

        def in_file(s: GroupStretch) -> FileStretch:
            return FileStretch(s.start, files[s.rank], flat[s.rank][s.group], s.first, s.length)

        return {name: [*map(in_file, stretches)] for name, stretches in places}

    def more_facts(self) -> dict[str, Any]:
        return {**super().more_facts(), "world size": self._ranks, "stage": self._stage}

    def _check_ranks(self, files: Sequence[TorchFile], states: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless there are files of all ranks, all from the same save."""
        if self._stage == 3 and self.model_files != self._ranks:
            raise CheckpointError(
                f"{self.path} has {self.model_files} model-state files for {self._ranks} ranks"
            )
        for file, state in zip(files, states, strict=True):
            count = state.get("partition_count")
            count = max(count) if isinstance(count, list) and count else count
            if not isinstance(count, int):
                raise CorruptCheckpointError(f"{file.path} has no flat groups of optimizer states")
            if count != self._ranks:
                raise CheckpointError(
                    f"{file.path} was saved by {count} ranks, and {self.path} has files of {self._ranks}: it "
                    "is incomplete, or mixed from several saves"
                )
            step, first = _step(file, state), _step(files[0], states[0])
            if step != first:
                raise CheckpointError(
                    f"{file.path} is from step {step} and {files[0].path.name} from step {first}: the "
                    "directory is mixed from several saves"
                )


class UniversalSource(DeepSpeedWeights):
    """A checkpoint as DeepSpeed's ds_to_universal makes it: for each parameter, one file with its masters."""

    format = "DeepSpeed universal"

    def masters(self, groups: Sequence[Mapping[str, Shape]]) -> Mapping[str, Sequence[FileStretch]]:
        return {name: [self._stretch(name, shape)] for group in groups for name, shape in group.items()}

    def _stretch(self, name: str, shape: Shape) -> FileStretch:
        file = self.torch_file(master_file(self.path, name))
        values = file.content.get("param") if isinstance(file.content, Mapping) else file.content
        if not isinstance(values, StoredTensor) or values.numel != math.prod(shape):
            raise CorruptCheckpointError(
                f"{file.path} does not hold the {math.prod(shape)} elements of {name!r}"
            )
        return FileStretch(0, file, values, 0, values.numel)


def _refuse_strangers(path: Path, content: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise CheckpointError if, at `keys`, objects that are not read replace weights or their names.

    Objects within the module's state matter only if they hold tensors; others are extra state of modules,
    which is left out anyway.
    """
    for key in keys:
        value = content.get(key)
        for stranger in strangers_in(value):
            if key != "module" or stranger is value or any(True for _ in tensors_in(stranger)):
                raise refusal(path, stranger.name)


def _mapping(file: TorchFile, key: str) -> Mapping[str, Any]:
    """The dict of names at `key` in a file's content; empty if it is None or missing."""
    value = file.content.get(key) if isinstance(file.content, Mapping) else None
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise CorruptCheckpointError(f"{file.path}: {key!r} is {type(value).__name__}, not a dict of names")
    return value


def _groups(file: TorchFile) -> list[dict[str, Shape]]:
    """The names and shapes of each group's parameters."""
    groups = file.content.get("param_shapes")
    groups = [groups] if isinstance(groups, Mapping) else groups
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CorruptCheckpointError(f"{file.path} does not list the parameters (param_shapes)")
    return [{name: _shape(file, name, shape) for name, shape in group.items()} for group in groups]


def _shape(file: TorchFile, name: str, shape: Any) -> Shape:
    try:
        return shape_of(shape)
    except ValueError as error:
        raise CorruptCheckpointError(f"{file.path}: the shape of {name!r}: {error}") from error


def _aliases(file: TorchFile, known: set[str]) -> dict[str, list[str]]:
    """The further names of each tied parameter."""
    aliases: dict[str, list[str]] = {}
    for alias, name in _mapping(file, "shared_params").items():
        if name not in known:
            raise CorruptCheckpointError(f"{file.path}: {alias!r} is tied to {name!r}, which is missing")
        aliases.setdefault(name, []).append(alias)
    return aliases


def _flat(file: TorchFile, state: Mapping[str, Any], key: str) -> list[StoredTensor]:
    groups = state.get(key)
    if not isinstance(groups, list) or not groups:
        raise CorruptCheckpointError(f"{file.path} has no flat groups of fp32 masters ({key})")
    if not all(
        isinstance(group, StoredTensor) and group.is_row_major and len(group.shape) == 1 for group in groups
    ):
        raise CorruptCheckpointError(f"{file.path}: the groups of fp32 masters ({key}) are not flat")
    return groups


def _step(file: TorchFile, state: Mapping[str, Any]) -> Any:
    """Optimizer steps taken, by the first parameter's state that has them; None if nothing counts them."""
    inner = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    found: Any = inner.get("state") if isinstance(inner, Mapping) else inner
    entries = found.values() if isinstance(found, Mapping) else found if isinstance(found, list) else ()
    for entry in entries:
        step = entry.get("step") if isinstance(entry, Mapping) else None
        if isinstance(step, StoredTensor) and step.numel == 1:
            return file.number(step)
        if isinstance(step, (int, float)):
            return step
    return None
