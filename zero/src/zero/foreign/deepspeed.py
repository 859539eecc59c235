"""DeepSpeed's ZeRO checkpoints, stages 1 to 3, read without DeepSpeed.

    latest                                                        the tag's name
    <tag>/mp_rank_00_model_states.pt                              stages 1, 2: names, shapes, 16-bit weights
    <tag>/zero_pp_rank_{d}_mp_rank_00_model_states.pt             stage 3: names, shapes, frozen shards
    <tag>/[bf16_]zero_pp_rank_{d}_mp_rank_00_optim_states.pt      the fp32 masters, flat

Stages 1 and 2 lay the parameters of a group one after another (with gaps, `param_alignment_paddings`) and cut
the whole into one partition a rank. Stage 3 cuts every parameter into ceil(elements / ranks) a rank, and lays
a rank's pieces one after another, over all its sub-groups.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.checkpoint.dtypes import name_of
from zero.checkpoint.storage import DISK, Storage
from zero.consolidate.source import Kind, TensorInfo
from zero.errors import CheckpointError, CorruptCheckpointError, ZeroError
from zero.foreign.record_source import RecordSource
from zero.foreign.torch_file import Inert, TorchFile

_OPTIMIZER = re.compile(r"(?:(?:bf16|fp16)_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OTHER = re.compile(r"(?:expp_rank_|layer_).*\.pt")
_FLAT = {3: "fp32_flat_groups", 2: "single_partition_of_fp32_groups"}


class Stage(int):
    """In place of ZeroStageEnum."""


STAND_INS: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
}
"""The classes that such checkpoints hold."""


class Stretch(NamedTuple):
    """Elements of a parameter in a rank's flat group. start: in the parameter. first: in the group."""

    start: int
    rank: int
    group: int
    first: int
    length: int


def is_deepspeed(path: Path) -> bool:
    """Whether a directory is, or says that it holds, a checkpoint of DeepSpeed's."""
    try:
        return _tag(path) is not None
    except CheckpointError:
        return True


class DeepSpeedSource(RecordSource):
    """path: a tag's directory, or the one above, whose `latest` is taken."""

    format = "DeepSpeed ZeRO"

    def __init__(self, path: Path, storage: Storage = DISK) -> None:
        super().__init__(storage)
        tag = _tag(path)
        if tag is None:
            raise CheckpointError(f"{path} holds no checkpoint of DeepSpeed's")
        self.path = tag
        try:
            self._read_files()
        except ZeroError:
            self.close()
            raise
        except Exception as error:  # anything may stand anywhere in a file that was made to harm
            self.close()
            what = f"{type(error).__name__}: {error}"
            raise CorruptCheckpointError(f"{tag} is not laid out as DeepSpeed does: {what}") from error

    def _read_files(self) -> None:
        optimizer, model = _files(self.path)
        self._optimizer = [self._torch_file(path) for path in optimizer]
        self._states = [_mapping(file, file.content, "optimizer_state_dict") for file in self._optimizer]
        self._stage = int(_plain(self._optimizer[0], self._states[0].get("zero_stage", 1), int))
        self._check_ranks()
        first = self._torch_file(model[0])
        if self._stage == 3 and len(model) != len(optimizer):
            raise CheckpointError(
                f"{self.path} has {len(model)} files of model states for {len(optimizer)} ranks"
            )
        frozen = _mapping(first, first.content, "frozen_param_shapes")
        more = model[1:] if self._stage == 3 and frozen else []
        self._model = [first, *(self._torch_file(path) for path in more)]
        self._module: Mapping[str, Tensor] = _mapping(first, first.content, "module")
        self._lay_out(first, frozen)
        self._tell(first)

    def _torch_file(self, path: Path) -> TorchFile:
        file = TorchFile(path, STAND_INS)
        if not isinstance(file.content, Mapping):
            raise CorruptCheckpointError(f"{path} is no file of DeepSpeed's: a dict was expected")
        self.add_file(file)
        return file

    def _check_ranks(self) -> None:
        """Raise unless the files are all ranks' and of one save."""
        ranks = len(self._states)
        for file, state in zip(self._optimizer, self._states, strict=True):
            count = state.get("partition_count")
            count = max(count) if isinstance(count, list) and count else count
            if not isinstance(count, int):
                raise CorruptCheckpointError(f"{file.path} has no flat groups of optimizer states")
            if count != ranks:
                raise CheckpointError(
                    f"{file.path} was saved by {count} ranks, and {self.path} has files of {ranks}: it is "
                    "not complete, or mixed from several saves"
                )
            if _step(state) != _step(self._states[0]):
                raise CheckpointError(
                    f"{file.path} is of step {_step(state)} and {self._optimizer[0].path.name} of step "
                    f"{_step(self._states[0])}: the directory is mixed from several saves"
                )

    def _lay_out(self, first: TorchFile, frozen: Mapping[str, Any]) -> None:
        groups = _shapes(first)
        flat = self._flat_groups()
        stretches = dict(
            _stage3(groups, flat) if self._stage == 3 else _stage2(groups, flat, self._paddings())
        )
        shapes = {name: shape for group in groups for name, shape in group.items()}
        aliases = self._aliases(first, {*shapes, *frozen, *self._module})
        buffers = set(first.content.get("buffer_names") or ())
        infos: list[TensorInfo] = []

        def add(name: str, shape: tuple[int, ...], stored: torch.dtype, kind: Kind) -> int:
            trained = self._module[name].dtype if name in self._module else stored
            names = name_of(stored, name), name_of(trained, name)
            infos.append(TensorInfo(name, shape, *names, kind, tuple(aliases.get(name, ()))))
            return len(infos) - 1

        for name in [*self._module, *(n for n in (*shapes, *frozen) if n not in self._module)]:
            if name in shapes:
                index = add(name, shapes[name], flat[0][0].dtype, "parameter")
                for stretch in stretches[name]:
                    file = self._optimizer[stretch.rank]
                    values = flat[stretch.rank][stretch.group]
                    self.place(index, stretch.start, file, values, stretch.first, stretch.length)
            elif name in frozen:
                self._add_frozen(name, _shape(first, name, frozen[name]), add)
            elif not any(name in names for names in aliases.values()):
                self._add_whole(name, "buffer" if name in buffers else "frozen", add)
        self.tensors = tuple(infos)

    def _flat_groups(self) -> list[list[Tensor]]:
        """The fp32 masters: by rank, by group."""
        key = _FLAT[3 if self._stage == 3 else 2]
        found = []
        for file, state in zip(self._optimizer, self._states, strict=True):
            groups = state.get(key)
            if not isinstance(groups, list) or not all(
                isinstance(g, Tensor) and g.dim() == 1 for g in groups
            ):
                raise CorruptCheckpointError(f"{file.path} has no flat groups of fp32 masters ({key})")
            found.append(groups)
        if len({len(groups) for groups in found}) != 1 or not found[0]:
            raise CorruptCheckpointError(f"{self.path}: the ranks have different numbers of groups")
        return found

    def _paddings(self) -> list[list[int]] | None:
        """Elements between the parameters of each group; None where there are none."""
        paddings = self._states[0].get("param_alignment_paddings")
        return None if paddings is None else [list(map(int, group)) for group in paddings]

    def _aliases(self, first: TorchFile, known: set[str]) -> dict[str, list[str]]:
        """The further names of each tied parameter."""
        aliases: dict[str, list[str]] = {}
        for alias, name in _mapping(first, first.content, "shared_params").items():
            if name not in known:
                raise CorruptCheckpointError(
                    f"{first.path}: {alias!r} is tied to {name!r}, which is not there"
                )
            aliases.setdefault(name, []).append(alias)
        return aliases

    def _add_frozen(self, name: str, shape: tuple[int, ...], add: Any) -> None:
        """A parameter that the optimizer does not have: whole, or at stage 3 a shard in each rank's file."""
        parts = []
        for file in self._model:
            value = _mapping(file, file.content, "frozen_param_fragments").get(name)
            if not isinstance(value, Tensor):
                raise CorruptCheckpointError(f"{file.path} lacks its part of the frozen parameter {name!r}")
            parts.append(value)
        numel = math.prod(shape)
        index = add(name, shape, parts[0].dtype, "frozen")
        if self._stage != 3 and tuple(parts[0].shape) == shape:
            self.place(index, 0, self._model[0], parts[0])
            return
        if sum(part.numel() for part in parts) < numel:
            raise CorruptCheckpointError(
                f"{self.path}: the parts of {name!r} have fewer than {numel} elements"
            )
        start = 0
        for file, part in zip(self._model, parts, strict=True):
            length = min(part.numel(), numel - start)
            self.place(index, start, file, part, 0, length)
            start += length

    def _add_whole(self, name: str, kind: Kind, add: Any) -> None:
        """A buffer, or a frozen parameter that only the module's state has."""
        value = self._module[name]
        if not isinstance(value, Tensor):
            self.left_out += (name,)
        elif kind == "frozen" and self._stage == 3:
            raise CorruptCheckpointError(
                f"{self._model[0].path} names {name!r} and does not say where its values are"
            )
        else:
            self.place(add(name, tuple(value.shape), value.dtype, kind), 0, self._model[0], value)

    def _tell(self, first: TorchFile) -> None:
        content = first.content
        files = sorted(file.path for file in (*self._optimizer, *self._model))
        sizes = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        self.identity = f"deepspeed {self.path.absolute()} {sizes}"
        self.facts = {
            "steps": content.get("global_steps"),
            "world size": len(self._optimizer),
            "stage": self._stage,
            "saved by": f"DeepSpeed {content.get('ds_version')}",
            "files": len(files),
            "bytes": sum(size for _, size, _ in sizes),
            "checksums": "zip"
            if all(r.crc is not None for f in self._optimizer for r in f.records)
            else "none",
        }


def _tag(path: Path) -> Path | None:
    """The directory with the rank files."""
    if not path.is_dir():
        return None
    if any(map(_OPTIMIZER.fullmatch, _names(path))):
        return path
    try:
        tag = (path / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if tag.startswith("{") or not tag:  # zero's own
        return None
    if Path(tag).name != tag:
        raise CheckpointError(f"{path / 'latest'} names {tag!r}, which is no directory beside it")
    if not any(map(_OPTIMIZER.fullmatch, _names(path / tag))):
        raise CheckpointError(
            f"{path / 'latest'} names {tag!r}, which has no files of optimizer states; give another tag"
        )
    return path / tag


def _names(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir()) if path.is_dir() else []


def _files(tag: Path) -> tuple[list[Path], list[Path]]:
    """The files of optimizer and of model states, by rank; raises CheckpointError for one that is missing."""
    optimizer: dict[int, Path] = {}
    model: dict[int, Path] = {}
    for name in _names(tag):
        for pattern, found in ((_OPTIMIZER, optimizer), (_MODEL, model)):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if int(match[2]):
                raise CheckpointError(f"{tag / name} is of a model-parallel job, which is not read")
            rank = int(match[1] or 0)
            if rank in found:
                raise CheckpointError(f"{tag} has two files of rank {rank}: {found[rank].name} and {name}")
            found[rank] = tag / name
        if _OTHER.fullmatch(name):
            raise CheckpointError(
                f"{tag / name} is of a job with pipeline stages or experts, which is not read"
            )
    for what, found in (("optimizer", optimizer), ("model", model)):
        missing = [rank for rank in range(max(found, default=0) + 1) if rank not in found]
        if missing:
            raise CheckpointError(
                f"{tag} is not complete: the {what} states of rank {missing[0]} are missing"
            )
    return [optimizer[rank] for rank in sorted(optimizer)], [model[rank] for rank in sorted(model)]


def _mapping(file: TorchFile, content: Any, key: str) -> Mapping[str, Any]:
    """A dict in a dict; empty where it is None or not there."""
    value = content.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise CorruptCheckpointError(
            f"{file.path}: {key!r} is {type(value).__name__}; a dict of names was expected"
        )
    return value


def _plain(file: TorchFile, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise CorruptCheckpointError(f"{file.path} holds a {type(value).__name__} instead of {kind.__name__}")
    return value


def _step(state: Mapping[str, Any]) -> Any:
    """Optimizer steps taken, by the first parameter's state; None where the optimizer does not count."""
    inner = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    found: Any = inner.get("state") if isinstance(inner, Mapping) else inner
    entries = found.values() if isinstance(found, Mapping) else found if isinstance(found, list) else ()
    for entry in entries:
        step = entry.get("step") if isinstance(entry, Mapping) else None
        if isinstance(step, Tensor) and step.numel() == 1:
            return step.item()
        if isinstance(step, (int, float)):
            return step
    return None


def _shapes(file: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of each group."""
    groups = file.content.get("param_shapes")
    groups = [groups] if isinstance(groups, Mapping) else groups
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CorruptCheckpointError(f"{file.path} does not say which parameters there are (param_shapes)")
    return [{name: _shape(file, name, shape) for name, shape in group.items()} for group in groups]


def _shape(file: TorchFile, name: str, shape: Any) -> tuple[int, ...]:
    sizes = tuple(map(int, shape))
    if min(sizes, default=0) < 0 or math.prod(sizes) >= 1 << 62:
        raise CorruptCheckpointError(f"{file.path} says that {name!r} has the shape {sizes}")
    return sizes


def _stage2(
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    flat: Sequence[Sequence[Tensor]],
    paddings: Sequence[Sequence[int]] | None,
) -> Iterator[tuple[str, list[Stretch]]]:
    if len(groups) != len(flat[0]):
        raise CorruptCheckpointError(
            f"{len(groups)} groups of names belong to {len(flat[0])} groups of masters"
        )
    for number, group in enumerate(groups):
        ends = list(accumulate(rank[number].numel() for rank in flat))
        gaps = paddings[number] if paddings is not None else [0] * len(group)
        if len(gaps) != len(group):
            raise CorruptCheckpointError(
                f"group {number} has {len(group)} parameters and {len(gaps)} paddings"
            )
        position = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            numel = math.prod(shape)
            if position + numel > ends[-1]:
                raise CorruptCheckpointError(f"the masters of group {number} end within {name!r}")
            yield name, list(_cut(position, numel, ends, number))
            position += numel + gap
        _check_rest(number, position, ends[-1], 2 * len(flat))


def _check_rest(group: int, used: int, there: int, alignment: int) -> None:
    """The rest of a group is padding, less than one alignment of it on either side."""
    if -(-used // alignment) != -(-there // alignment):
        raise CorruptCheckpointError(f"group {group} has {there} masters, and its parameters need {used}")


def _cut(position: int, numel: int, ends: Sequence[int], group: int) -> Iterator[Stretch]:
    """Where elements of a group lie that begins at rank 0 and ends, by rank, at `ends`."""
    start = 0
    while start < numel:
        rank = bisect_right(ends, position + start)
        begin = ends[rank - 1] if rank else 0
        length = min(numel - start, ends[rank] - position - start)
        yield Stretch(start, rank, group, position + start - begin, length)
        start += length


def _stage3(
    groups: Sequence[Mapping[str, tuple[int, ...]]], flat: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[str, list[Stretch]]]:
    ranks = len(flat)
    sizes = [[group.numel() for group in rank] for rank in flat]
    if any(size != sizes[0] for size in sizes):
        raise CorruptCheckpointError(f"the ranks have masters of different sizes: {sizes}")
    ends = list(accumulate(sizes[0]))
    position = 0
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        numel = math.prod(shape)
        share = -(-numel // ranks)
        if position + share > ends[-1]:
            raise CorruptCheckpointError(f"the masters end within {name!r}")
        yield name, list(_shares(position, numel, share, ranks, ends))
        position += share
    if position != ends[-1]:
        raise CorruptCheckpointError(f"each rank has {ends[-1]} masters, and its parameters need {position}")


def _shares(position: int, numel: int, share: int, ranks: int, ends: Sequence[int]) -> Iterator[Stretch]:
    for rank in range(ranks):
        start, stop = rank * share, min(numel, (rank + 1) * share)
        while start < stop:
            at = position + start - rank * share
            group = bisect_right(ends, at)
            length = min(stop - start, ends[group] - at)
            yield Stretch(start, rank, group, at - (ends[group - 1] if group else 0), length)
            start += length
