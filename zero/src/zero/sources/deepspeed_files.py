"""The files that make up a checkpoint of DeepSpeed, and stand-ins for the classes in their pickles.

    latest                                                        the tag's name
    <tag>/mp_rank_00_model_states.pt                              stages 1, 2: names, shapes, 16-bit weights
    <tag>/zero_pp_rank_{d}_mp_rank_00_model_states.pt             stage 3: names, shapes, frozen shards
    <tag>/[bf16_]zero_pp_rank_{d}_mp_rank_00_optim_states.pt      the fp32 masters, flat

A universal checkpoint has the same files of model states, `latest_universal` instead of `latest`, and
`zero/<parameter>/fp32.pt` instead of the flat masters. It may have both the model states of stages 1 and 2,
and those of stage 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero.errors import CheckpointError
from zero.files.manifest import LARGEST_LATEST
from zero.files.storage import DISK, read_whole
from zero.sources.bounded_unpickler import Function, Inert

_OPTIMIZER = re.compile(r"(?:(?:bf16|fp16)_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OTHER = re.compile(r"(?:expp_rank_|layer_).*\.pt")
MASTERS = "zero"
WHOLE_MODEL = "mp_rank_00_model_states.pt"  # of stages 1 and 2
SHARDED_MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"  # of stage 3, the first
LATEST_UNIVERSAL = "latest_universal"
_LONGEST_NAME = 255  # bytes of a directory's name


class Stage(int):
    """Stands in for ZeroStageEnum."""


STAND_INS: dict[str, Any] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": Function(Stage),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
}
"""By full name, stand-ins for the classes that such checkpoints hold."""


def find_sharded(path: Path) -> Path | None:
    """The directory with the ranks' files that `path` refers to, or None if it is not DeepSpeed's.

    Raises CheckpointError if `latest` names a directory that is missing or not complete.
    """
    return _find(path, "latest", lambda tag: any(map(_OPTIMIZER.fullmatch, _names(tag))))


def find_universal(path: Path) -> Path | None:
    """The same for a universal checkpoint."""
    return _find(path, LATEST_UNIVERSAL, lambda tag: bool(model_files(tag)) and (tag / MASTERS).is_dir())


def optimizer_files(tag: Path) -> list[Path]:
    """The files of optimizer states, by rank. Raises CheckpointError if one is missing."""
    return _by_rank(tag, _OPTIMIZER, "optimizer")


def model_files(tag: Path) -> list[Path]:
    """The files of model states, by rank. Raises CheckpointError if one is missing."""
    whole = tag / WHOLE_MODEL
    if (tag / MASTERS).is_dir() and whole.is_file():
        return [whole]
    return _by_rank(tag, _MODEL, "model")


def master_file(tag: Path, parameter: str) -> Path:
    """The file with a parameter's masters in a universal checkpoint."""
    path = tag / MASTERS / parameter / "fp32.pt"
    odd = parameter in ("", ".", "..") or "\0" in parameter or len(parameter.encode()) > _LONGEST_NAME
    if odd or path.parent.parent != tag / MASTERS:
        raise CheckpointError(f"{tag}: {parameter!r} cannot be the name of a parameter here")
    return path


def _find(path: Path, pointer: str, complete: Callable[[Path], bool]) -> Path | None:
    if not path.is_dir():
        return None
    if complete(path):
        return path
    try:
        tag = read_whole(DISK, path / pointer, LARGEST_LATEST).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    if tag.startswith("{") or not tag:  # zero's own
        return None
    if Path(tag).name != tag:
        raise CheckpointError(f"{path / pointer} names {tag!r}, which is not a directory next to it")
    if not complete(path / tag):
        raise CheckpointError(f"{path / pointer} names {tag!r}, which is missing or incomplete")
    return path / tag


def _names(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir()) if path.is_dir() else []


def _by_rank(tag: Path, pattern: re.Pattern[str], what: str) -> list[Path]:
    found: dict[int, Path] = {}
    for name in _names(tag):
        if _OTHER.fullmatch(name):
            raise CheckpointError(
                f"{tag / name} comes from a job with pipeline stages or experts, which is not supported"
            )
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise CheckpointError(f"{tag / name} comes from a model-parallel job, which is not supported")
        rank = int(match[1] or 0)
        if rank in found:
            raise CheckpointError(f"{tag} has two files of rank {rank}: {found[rank].name} and {name}")
        found[rank] = tag / name
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(f"{tag} is incomplete: the {what} states of rank {missing} are missing")
    return [found[rank] for rank in sorted(found)]
