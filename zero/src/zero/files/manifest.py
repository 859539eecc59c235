"""The records of a checkpoint's manifest, and the seal that reveals damage. No tensors, no torch.

The format is documented in docs/checkpoint-format.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self
from zlib import crc32

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from zero.files.boxes import Block, Region, Run, Stride, is_partition, row_major
from zero.files.value_forms import RandomStates, check_value

VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
CHECKSUMS = "checksums"  # the tensor that holds them in a rank's file
CHECKSUM_BLOCK = 1 << 16  # bytes that one checksum covers
LARGEST_BLOCK = 1 << 20  # a block is read as a whole, for any byte of it
LARGEST_MANIFEST = 1 << 28  # bytes; it describes some six million slices
LARGEST_LATEST = 1 << 20
LARGEST_TABLE = 1 << 28  # bytes of checksums; they cover 4 TiB
LONGEST_HEADER = 100_000_000  # of a safetensors file, in bytes; the limit of its library
MOST_DIMENSIONS = 64  # of a tensor, as in torch
AVERAGE = "average/"  # what the keys of averages begin with
MOST_BOXES = 4096  # that one block of a tensor consists of
_DTYPES = {  # bytes of an element, and torch's name
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "F8_E8M0": (1, "float8_e8m0fnu"), "F4": (1, "float4_e2m1fn_x2"),  # of F4, torch counts two values as one
    "I64": (8, "int64"), "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"),
    "U64": (8, "uint64"), "U32": (4, "uint32"), "U16": (2, "uint16"), "U8": (1, "uint8"),
    "BOOL": (1, "bool"), "C64": (8, "complex64"),
}  # fmt: skip
ITEM_BYTES = {name: nbytes for name, (nbytes, _) in _DTYPES.items()}
TORCH_NAMES = {name: theirs for name, (_, theirs) in _DTYPES.items()}
_HEAD = '{"format":"%s","version":%d,"crc32":"%08x",\n'
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Digest = Annotated[int, Field(ge=0, lt=1 << 32)]
Sizes = Annotated[tuple[Count, ...], Field(max_length=MOST_DIMENSIONS)]
Seconds = Annotated[float, Field(ge=0, lt=253_370_764_800)]  # since 1970, before the year 9999


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class Sized:
    """What has the size of a tensor.

    dtype: named as in safetensors. stride: in elements; None where the memory order is row-major.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: Stride

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_bytes


class Slice(NamedTuple):
    """A stretch of a tensor.

    file: index into the manifest's files. start, length: in elements, in memory order. offset: where it
    begins, in bytes from the start of the file. block: index of its first checksum in the file's table.
    """

    file: Count
    start: Count
    length: Count
    offset: Count
    block: Count


class TensorEntry(_Record, Sized):
    """A tensor in the checkpoint.

    stride: in elements, always dense; None where the memory order is row-major. slices: sorted by start;
    together they hold every element exactly once.
    """

    dtype: str
    shape: Sizes
    stride: Sizes | None = None
    slices: tuple[Slice, ...]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype}")
        if self.stride is not None and not is_dense(self.shape, self.stride):
            raise ValueError(f"strides {self.stride} do not order the elements of shape {self.shape}")
        end = 0
        for piece in self.slices:
            if piece.start != end or not piece.length:
                raise ValueError(f"its slices skip or repeat elements at {end}")
            end += piece.length
        if end != self.numel:
            raise ValueError(f"its slices hold {end} of {self.numel} elements")
        return self


@dataclass(frozen=True)
class WholeTensor(Sized):
    """A tensor that is stored in blocks, each a tensor in the checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Block[str], ...]
    stride: None = None


class BlockEntry(_Record):
    """The block of a parameter that ranks at one place of a mesh have.

    at: what follows the parameter's name in the keys of the block's tensors, such as "[tp=1]". runs: for each
    dimension of the whole parameter, the indices that the block has, in its order.
    """

    at: Annotated[str, Field(min_length=1)]
    runs: Annotated[tuple[tuple[Run, ...], ...], Field(max_length=MOST_DIMENSIONS)]

    @property
    def region(self) -> Region:
        return Region(self.runs)


class FileEntry(_Record):
    """A rank's file.

    bytes: its size. header: CRC-32 of the length field and the safetensors header. checksums_at: the byte
    where the table of block checksums begins (it extends to the end of the file). checksums: CRC-32 of that
    table.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    bytes: Count
    header: Digest
    checksums_at: Count
    checksums: Digest

    @model_validator(mode="after")
    def _has_a_table(self) -> Self:
        if self.checksums_at > self.bytes:
            raise ValueError(f"the checksums of {self.name} start past its end")
        return self


class ParameterEntry(_Record):
    """A parameter; its values are the tensor `model/<name>`.

    dtype: of the weights in training (the stored values may be wider: fp32 masters). unit: the sharded unit
    it belongs to. group: its index in the optimizer's param_groups, if any. aliases: further names of the
    same parameter (tied weights). state: optimizer state tensors, `optimizer/<key>/<name>`. values:
    optimizer state that is not a tensor, as user values. form: where it is part of a packed parameter, what
    says how that is packed; where only a block of it was saved, which one.

    shape: of the whole parameter, where it was divided. blocks: the blocks it was divided into, if all were
    saved: `model/<name><at>` and, of state with one value for each element, `optimizer/<key>/<name><at>`.
    """

    name: str
    dtype: str
    trainable: bool
    unit: str
    group: Count | None
    aliases: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    values: dict[str, Any] = {}
    form: str | None = None
    shape: Sizes | None = None
    blocks: tuple[BlockEntry, ...] = ()

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"parameter {self.name!r} has the unknown dtype {self.dtype!r}")
        if len({*self.state, *self.values}) < len(self.state) + len(self.values):
            raise ValueError(f"parameter {self.name!r} has some optimizer state twice")
        for block in self.blocks:
            self._check_block(block)
        if self.blocks and not is_partition((block.region for block in self.blocks), self.shape or ()):
            places = ", ".join(block.at for block in self.blocks[:8])
            raise ValueError(
                f"the blocks of parameter {self.name!r} ({places}) overlap, or are not all of it: one is "
                "missing, or has been changed"
            )
        return self

    def _check_block(self, block: BlockEntry) -> None:
        what = f"block {block.at} of parameter {self.name!r}"
        if self.shape is None or len(block.runs) != len(self.shape):
            raise ValueError(f"{what} has {len(block.runs)} dimensions, and its shape is {self.shape}")
        if math.prod(max(1, len(runs)) for runs in block.runs) > MOST_BOXES:
            raise ValueError(f"{what} has more than {MOST_BOXES} boxes")
        for size, runs in zip(self.shape, block.runs, strict=True):
            if any(first < 0 or length < 1 or first + length > size for first, length in runs):
                raise ValueError(f"{what} has indices beyond the shape {self.shape}")

    @property
    def names(self) -> tuple[str, ...]:
        """What follows `model/` in the keys of the tensors that hold its values."""
        return tuple(self.name + block.at for block in self.blocks) or (self.name,)


class OptimizerEntry(_Record):
    """The optimizer.

    kind: the full name of its class; for several optimizers, the names joined by " + ". of_groups: the
    optimizer class of each param_group. param_groups: the options of each, as user values, without the
    parameters.
    """

    kind: str
    of_groups: tuple[str, ...] = ()
    param_groups: tuple[dict[str, Any], ...]

    @model_validator(mode="after")
    def _has_options(self) -> Self:
        if any("params" in group for group in self.param_groups):
            raise ValueError("a param_group has 'params', which only a program's own have")
        if self.of_groups and len(self.of_groups) != len(self.param_groups):
            raise ValueError(f"{len(self.of_groups)} optimizers for {len(self.param_groups)} param_groups")
        return self


class LossScaleEntry(_Record):
    """skipped_steps: how many of the steps taken were skipped."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good_steps: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    skipped_steps: Count = 0


class RankEntry(_Record):
    """What belongs to one rank. rng: the states of its random number generators, `RandomStates`, or nothing,
    in converted checkpoints. state: its own user values."""

    rng: Any
    state: Any

    @field_validator("rng")
    @classmethod
    def _is_random_state(cls, rng: Any) -> Any:
        if rng:
            RandomStates.model_validate(rng)
        return rng


class Manifest(_Record):
    """A whole checkpoint. created: seconds since 1970. steps: optimizer steps taken. left_out: names of the
    parameters, buffers and extra state that the model had and that were not to be saved."""

    zero: str
    created: Seconds
    steps: Count
    world_size: Annotated[int, Field(ge=1)]
    stage: Annotated[int, Field(ge=0, le=3)]
    precision: str
    block_bytes: Annotated[int, Field(ge=1, le=LARGEST_BLOCK)]
    loss_scale: LossScaleEntry | None
    optimizer: OptimizerEntry
    parameters: tuple[ParameterEntry, ...]
    buffers: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    extra_state: dict[str, Any]
    state: Any
    ranks: tuple[RankEntry, ...]
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        held = [0] * len(self.files)
        for key, tensor in self.tensors.items():
            for piece in tensor.slices:
                if piece.file >= len(self.files):
                    raise ValueError(
                        f"tensor {key!r} is in file {piece.file}, but there are only {len(self.files)} files"
                    )
                file = self.files[piece.file]
                end = piece.offset + piece.length * tensor.item_bytes
                blocks = -(-piece.length * tensor.item_bytes // self.block_bytes)
                table = (file.bytes - file.checksums_at) // 4
                held[piece.file] += piece.length * tensor.item_bytes
                if end > file.checksums_at or piece.block + blocks > table:
                    raise ValueError(f"tensor {key!r} extends past the end of {file.name}")
                if held[piece.file] > file.checksums_at:
                    raise ValueError(f"tensor {key!r} shares bytes of {file.name} with others")
        self._check_names()
        for value in self._values():
            check_value(value, self.tensors)
        for parameter in self.parameters:
            for key in (model_key(""), *(state_key(key, "") for key in parameter.state)):
                self._check_tensor(key, parameter)
        for name in self.buffers:
            if model_key(name) not in self.tensors:
                raise ValueError(f"tensor {model_key(name)!r} is missing")
        return self

    def _check_tensor(self, prefix: str, parameter: ParameterEntry) -> None:
        """Raise ValueError unless a parameter's values, or some state, are there: whole, or in all blocks."""
        if prefix + parameter.name in self.tensors and (prefix != model_key("") or not parameter.blocks):
            return
        dtypes = set()
        for block in parameter.blocks:
            key, shape = prefix + parameter.name + block.at, block.region.shape
            if key not in self.tensors and (prefix == model_key("") or 0 not in shape):
                raise ValueError(f"tensor {key!r} is missing")
            if key in self.tensors:
                dtypes.add(self.tensors[key].dtype)
                if self.tensors[key].shape != shape:
                    raise ValueError(f"tensor {key!r} has shape {self.tensors[key].shape} instead of {shape}")
        if len(dtypes) != 1:
            raise ValueError(
                f"the blocks of tensor {prefix + parameter.name!r} have several dtypes"
                if dtypes
                else f"tensor {prefix + parameter.name!r} is missing"
            )

    @cached_property
    def wholes(self) -> dict[str, WholeTensor]:
        """The tensors that are stored in blocks, by the key that they would have as one."""
        found = {}
        averages = {"/".join(key.split("/")[:2]) + "/" for key in self.tensors if key.startswith(AVERAGE)}
        for parameter in (p for p in self.parameters if p.blocks):
            states = (state_key(key, "") for key in parameter.state)
            for prefix in (model_key(""), *sorted(averages), *states):
                places = [(prefix + parameter.name + block.at, block.region) for block in parameter.blocks]
                blocks = [Block(k, r, self.tensors[k].stride) for k, r in places if k in self.tensors]
                if blocks and (prefix == model_key("") or prefix + parameter.name not in self.tensors):
                    dtype = self.tensors[blocks[0].key].dtype
                    whole = WholeTensor(dtype, parameter.shape or (), tuple(blocks))
                    found[prefix + parameter.name] = whole
        return found

    def tensor(self, key: str) -> TensorEntry | WholeTensor:
        """What is known of a tensor, which may be stored in blocks. Raises KeyError."""
        return self.wholes[key] if key in self.wholes else self.tensors[key]

    def _check_names(self) -> None:
        """Raise ValueError unless parameters, param_groups and ranks can be told apart and are there."""
        taken: set[str] = {*self.buffers, *self.left_out}
        for parameter in self.parameters:
            blocks = (name for name in parameter.names if name != parameter.name)
            for name in (parameter.name, *parameter.aliases, *blocks):
                if name in taken:
                    raise ValueError(f"there are several tensors of the name {name!r}")
                taken.add(name)
            if parameter.group is not None and parameter.group >= len(self.optimizer.param_groups):
                raise ValueError(f"parameter {parameter.name!r} is in param_group {parameter.group}, of none")
        if len(self.ranks) != self.world_size:
            raise ValueError(f"it has the state of {len(self.ranks)} ranks instead of {self.world_size}")

    def _values(self) -> Iterator[Any]:
        """All user values."""
        yield from (self.state, self.extra_state, *self.optimizer.param_groups)
        yield from (value for rank in self.ranks for value in (rank.rng, rank.state))
        yield from (value for parameter in self.parameters for value in parameter.values.values())


class Latest(_Record):
    """The `latest` file beside the checkpoints. rotation: those saved with keep_last, oldest first.

    manifest: CRC-32 of the checkpoint's manifest, if known.
    """

    checkpoint: Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")]
    rotation: tuple[Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")], ...]
    manifest: Digest | None = None


def hidden(path: Path, kind: str) -> Path:
    """The hidden path `.<name>.zero-<kind>` beside a file or directory.

    No other program uses such names, so whatever a killed run has left there may be removed.
    """
    return path.with_name(f".{path.name}.zero-{kind}")


def model_key(name: str) -> str:
    """The key of the tensor with a parameter's or buffer's values."""
    return f"model/{name}"


def state_key(key: str, name: str) -> str:
    """The key of the tensor with a parameter's optimizer state `key`."""
    return f"optimizer/{escape(key)}/{name}"


def average_key(key: str, name: str) -> str:
    """The key of the tensor with a parameter's average, which the program has saved as state `key`."""
    return f"{AVERAGE}{escape(key)}/{name}"


def escape(text: str) -> str:
    """`text` with "/" and "%" escaped, so that keys made of several parts stay distinct."""
    return text.replace("%", "%25").replace("/", "%2F")


def unescape(text: str) -> str:
    """The inverse of escape()."""
    return text.replace("%2F", "/").replace("%25", "%")


def seal(kind: Literal["zero-checkpoint", "zero-latest"], record: BaseModel | dict[str, Any]) -> bytes:
    """Encode a record as a JSON object whose first line holds the CRC-32 of everything after that line."""
    content = record.model_dump(mode="json") if isinstance(record, BaseModel) else record
    body = json.dumps(content, allow_nan=False, separators=(",", ":"))[1:].encode()
    return (_HEAD % (kind, VERSION, crc32(body))).encode() + body


def unseal(kind: Literal["zero-checkpoint", "zero-latest"], data: bytes) -> bytes:
    """The sealed JSON object without the members of its first line. Raises ValueError if any byte changed."""
    head, _, body = data.partition(b"\n")
    if head + b"\n" == (_HEAD % (kind, VERSION, crc32(body))).encode():
        return b"{" + body
    other = re.fullmatch(rb'\{"format":"%s","version":(\d+),"crc32":"[0-9a-f]{8}",' % kind.encode(), head)
    if other and int(other[1]) != VERSION:
        raise ValueError(f"it has format version {int(other[1])}, but this version of zero reads {VERSION}")
    raise ValueError("its checksum does not match: it was damaged or edited by hand")


def blocks_of(key: str, tensor: Sized) -> tuple[Block[str], ...]:
    """The stored tensors that make up a tensor."""
    if isinstance(tensor, WholeTensor):
        return tensor.blocks
    return (Block(key, Region.whole(tensor.shape), tensor.stride),)


def is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides are those of a contiguous tensor; a dimension of size 1 may have any stride."""
    each = zip(shape, stride, row_major(shape), strict=True)
    return all(size <= 1 or step == expected for size, step, expected in each)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides order a tensor's elements in memory without gaps or overlaps."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda item: item[1]):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True
