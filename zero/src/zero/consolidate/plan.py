"""Planning which tensor goes to which file, in which dtype, at which offset. Arithmetic only.

The layout is that of transformers: `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zero.config.output import OutputDtype
from zero.errors import CheckpointError, UsageError
from zero.files.manifest import ITEM_BYTES, Sized
from zero.files.safetensors_header import METADATA, lay_out
from zero.sources.source import TensorInfo

_CAST = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


@dataclass(frozen=True)
class Chosen(Sized):
    """A tensor to be written. tensor: its index in the source. dtype: its dtype in the output."""

    tensor: int
    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PlannedFile:
    """A file of the output.

    name: may contain directories. offsets: the byte where each tensor begins, by its index in the source.
    fixed: the file's other contents, each with its offset.
    """

    name: str
    nbytes: int
    offsets: Mapping[int, int]
    tensors: tuple[Chosen, ...]
    fixed: tuple[tuple[int, bytes], ...]

    @property
    def payload(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class OutputPlan:
    """The files of an output. files: those with tensors. others: small ones by name, such as the index."""

    files: tuple[PlannedFile, ...]
    others: Mapping[str, bytes]

    @property
    def payload(self) -> int:
        return sum(file.payload for file in self.files)

    def excluded(self, tensors: Sequence[TensorInfo]) -> tuple[str, ...]:
        """Names of those of the source's tensors that are in no file, the optimizer's state aside."""
        taken = {chosen.tensor for file in self.files for chosen in file.tensors}
        return tuple(t.name for n, t in enumerate(tensors) if n not in taken and t.kind != "state")


def choose(
    tensors: Sequence[TensorInfo], dtype: OutputDtype, include: Collection[str], exclude: Collection[str]
) -> list[Chosen]:
    """The tensors to write, in the source's order.

    dtype: of all floating-point tensors of 16 bits and more; "keep" is each weight's dtype in training,
    "stored" that in the source, which may be a wider master's. include, exclude: shell patterns of names;
    without any to include, everything is. A tied tensor takes the first of its names that is left. Raises
    UsageError for a pattern that matches nothing, and if no tensor is left.
    """
    _check_patterns(tensors, [*include, *exclude])

    def wanted(name: str) -> bool:
        included = not include or any(fnmatchcase(name, pattern) for pattern in include)
        return included and not any(fnmatchcase(name, pattern) for pattern in exclude)

    chosen = []
    for index, tensor in enumerate(tensors):
        names = [name for name in (tensor.name, *tensor.aliases) if wanted(name)]
        if names:
            target = output_dtype(tensor, dtype)
            chosen.append(Chosen(index, names[0], tuple(names[1:]), tensor.shape, target))
    _check_names(name for tensor in chosen for name in (tensor.name, *tensor.aliases))
    if not chosen:
        raise UsageError("no tensors are left to write; check the include and exclude patterns")
    return chosen


def output_dtype(tensor: TensorInfo, dtype: OutputDtype) -> str:
    """The dtype that a tensor is written in. Only floating-point numbers are cast, not storage formats and
    what quantised parameters consist of."""
    if dtype == "stored":
        return tensor.dtype
    numbers = tensor.dtype.startswith(("F", "BF")) and ITEM_BYTES[tensor.dtype] > 1
    if dtype == "keep" or not numbers or tensor.packed:
        return tensor.training_dtype
    return _CAST[dtype]


def shards(tensors: Sequence[Chosen], limit: int) -> list[list[Chosen]]:
    """Divide tensors, in order, into files of at most `limit` bytes; a larger tensor has its own file."""
    files: list[list[Chosen]] = []
    filling: list[Chosen] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > limit:
            files.append([tensor])
            continue
        if filling and size + tensor.nbytes > limit:
            files.append(filling)
            filling, size = [], 0
        filling.append(tensor)
        size += tensor.nbytes
    return [*files, filling] if filling else files


def file_name(stem: str, suffix: str, number: int, count: int) -> str:
    """The name that transformers gives a file. number: from 0."""
    return f"{stem}{suffix}" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}{suffix}"


def index_of(files: Sequence[PlannedFile], with_aliases: bool) -> bytes:
    """The index of a sharded model, which says for each name which file has it."""
    weight_map = {
        name: file.name
        for file in files
        for tensor in file.tensors
        for name in (tensor.name, *(tensor.aliases if with_aliases else ()))
    }
    total = {
        "total_parameters": sum(tensor.numel for file in files for tensor in file.tensors),
        "total_size": sum(file.payload for file in files),
    }
    index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def plan_safetensors(tensors: Sequence[Chosen], limit: int) -> OutputPlan:
    """The files of a model. limit: bytes of tensors in one file.

    A tied tensor is written once; as with safetensors' own `save_model`, the metadata says for each further
    name which name has its values.
    """
    parts = shards(tensors, limit)
    files = []
    for number, part in enumerate(parts):
        ordered = sorted(part, key=lambda t: -ITEM_BYTES[t.dtype])  # keeps every tensor aligned
        aliases = {alias: t.name for t in ordered for alias in t.aliases if alias != "format"}
        described = [(t.name, t.dtype, t.shape, t.nbytes) for t in ordered]
        header, (*places, nbytes) = lay_out({"format": "pt"} | aliases, described)
        offsets = {t.tensor: place for t, place in zip(ordered, places, strict=True)}
        name = file_name("model", ".safetensors", number, len(parts))
        files.append(PlannedFile(name, nbytes, offsets, tuple(ordered), ((0, header),)))
    others = {"model.safetensors.index.json": index_of(files, with_aliases=False)} if len(files) > 1 else {}
    return OutputPlan(tuple(files), others)


def _check_names(names: Iterable[str]) -> None:
    seen = {METADATA}
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CheckpointError(
                f"{name!r} cannot be the name of a tensor: it has no encoding in UTF-8"
            ) from None
        if name in seen:
            raise CheckpointError(f"{name!r} cannot be the name of a tensor: it is already in use")
        seen.add(name)


def _check_patterns(tensors: Sequence[TensorInfo], patterns: Sequence[str]) -> None:
    names = [name for tensor in tensors for name in (tensor.name, *tensor.aliases)]
    useless = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if useless:
        raise UsageError(
            f"no tensor name matches {', '.join(map(repr, useless))}; names look like "
            f"{', '.join(map(repr, names[:4]))}"
        )
