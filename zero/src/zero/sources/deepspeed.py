"""Reading DeepSpeed's ZeRO checkpoints, stages 1 to 3, and its universal ones, without DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zero.errors import CheckpointError, CorruptCheckpointError
from zero.sources.deepspeed_files import master_file, optimizer_files
from zero.sources.deepspeed_weights import DeepSpeedWeights, FileStretch, Shape, mapping, refuse_strangers
from zero.sources.flat_groups import stage2, stage3
from zero.sources.inert_pickle import StoredTensor
from zero.sources.torch_file import TorchFile

_FLAT_GROUPS = {
    False: "single_partition_of_fp32_groups",
    True: "fp32_flat_groups",
}  # by whether it is stage 3
_READ = ("zero_stage", "partition_count", "param_alignment_paddings")


class ShardedSource(DeepSpeedWeights):
    """A checkpoint as DeepSpeed saves it: for each rank and group, one flat tensor of masters."""

    format = "DeepSpeed ZeRO"

    def masters(self, groups: Sequence[Mapping[str, Shape]]) -> Mapping[str, Sequence[FileStretch]]:
        files = [self.torch_file(path, client=True) for path in optimizer_files(self.path)]
        states = [mapping(file, "optimizer_state_dict") for file in files]
        for file, state in zip(files, states, strict=True):
            refuse_strangers(file.path, state, (*_READ, *_FLAT_GROUPS.values()))
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
        return {
            name: [
                FileStretch(s.start, files[s.rank], flat[s.rank][s.group], s.first, s.length)
                for s in stretches
            ]
            for name, stretches in places
        }

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
