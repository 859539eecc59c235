"""Consolidating a source into whole weights, and verifying a source."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from zero.config.output import DEFAULT_MEMORY, Format, OutputDtype
from zero.consolidate.output import Converter, Output, comparing
from zero.consolidate.plan import Chosen, OutputPlan, choose, plan_safetensors
from zero.consolidate.publish import Staging
from zero.consolidate.workers import Buffers, chunk_bytes, default_workers, run
from zero.errors import CheckpointError
from zero.files.boundary import typed
from zero.files.storage import DISK, Storage
from zero.sources.source import Chunk, Source

OnProgress = Callable[[str, int, int], None]
"""Called from any thread, one at a time, with the current phase, its bytes done so far, and those in all."""


@dataclass(frozen=True)
class Options:
    """Options of consolidate() and convert().

    format: "safetensors", or "torch" for files of torch.save. dtype: of floating-point tensors; "keep" is
    each weight's dtype in training, "stored" that in the source. max_shard_size: bytes of tensors in a file.
    workers: threads. memory: bytes of all their buffers. include, exclude: shell patterns of names.
    overwrite: replace an existing output. verify: read the output back and compare.
    """

    format: Format = "safetensors"
    dtype: OutputDtype = "fp32"
    max_shard_size: int = 5_000_000_000
    workers: int = field(default_factory=default_workers)
    memory: int = DEFAULT_MEMORY
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overwrite: bool = False
    verify: bool = False


@dataclass(frozen=True)
class Written:
    """What was written.

    out: the directory. files: names of the files with weights. tensors, nbytes: the number of tensors and of
    their bytes. overflowed: names of tensors with finite values that became infinite in fp16. left_out: names
    of state that is not a tensor. excluded: names that `include` and `exclude` leave out. missing: names of
    what the model had and the source was saved without.
    """

    out: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    overflowed: tuple[str, ...]
    left_out: tuple[str, ...]
    excluded: tuple[str, ...]
    missing: tuple[str, ...]


def consolidate(
    source: Source,
    out: str | Path,
    options: Options | None = None,
    progress: OnProgress = lambda *_: None,
    storage: Storage = DISK,
) -> Written:
    """Write the weights of `source` to the directory `out` as transformers lays them out.

    `out` appears in one step when all of it is on the disk. Resident memory beyond the buffers grows with the
    number of tensors, not with their size. After an error nothing is left behind; after a kill, the same call
    continues where the killed one stopped.

    Raises UsageError for options that make no sense, CheckpointError if something is in the way or cannot be
    read or written, and CorruptCheckpointError if the source is damaged.
    """
    options = options or Options()
    with typed(source.path):
        chosen = choose(source.tensors, options.dtype, options.include, options.exclude)
        plan = _plan(options.format, chosen, options.max_shard_size)
    check = _check_readable if options.format == "safetensors" else lambda *_: None
    return publish(source, plan, Path(out), options, progress, storage, partial(check, plan))


def _plan(format: Format, chosen: Sequence[Chosen], limit: int) -> OutputPlan:
    if format == "safetensors":
        return plan_safetensors(chosen, limit)
    from zero.consolidate.torch_plan import plan_torch  # torch takes a second to import

    return plan_torch(chosen, limit)


def _check_readable(plan: OutputPlan, directory: Path) -> None:
    """Raise CheckpointError unless the library of safetensors finds what was planned in the files."""
    for file in plan.files:
        try:
            with safe_open(directory / file.name, "np") as opened:
                found = set(opened.keys())
        except SafetensorError as error:
            raise CheckpointError(
                f"{file.name} cannot be read by the library of safetensors: {error}; nothing was left behind"
            ) from error
        if found != {tensor.name for tensor in file.tensors}:
            raise CheckpointError(f"the library of safetensors finds other names than written in {file.name}")


def publish(
    source: Source,
    plan: OutputPlan,
    out: Path,
    options: Options,
    progress: OnProgress,
    storage: Storage,
    complete: Callable[[Path], None] = lambda _: None,
) -> Written:
    """Carry out a plan. complete: called with the directory before it gets its name, to add files to it."""
    limit = chunk_bytes(options.memory, options.workers)
    converter = Converter(plan, source.tensors)
    tensors = [tensor for file in plan.files for tensor in file.tensors]
    every = frozenset(tensor.tensor for tensor in tensors)

    def go_over(
        what: str, read: frozenset[int], counted: frozenset[int], handle: Callable[[Chunk, Buffers], int]
    ) -> None:
        told = _adding_up(progress, what, sum(t.nbytes for t in tensors if t.tensor in counted))
        chunks = _typed(source, source.chunks(read, limit))
        run(chunks, options.workers, limit, lambda chunk, buffers: told(handle(chunk, buffers)))

    with translated(out, sum(file.nbytes for file in plan.files)):
        staging = Staging(storage, out, options.overwrite)
        staging.begin(_fingerprint(source, plan))
        try:
            with closing(Output(storage, staging.path, plan, converter)) as output:
                pending = frozenset(output.pending)
                # If checksums cover whole records, only reading all of a record reveals damage in it, so what
                # an earlier run has written is read again.
                go_over("writing", every if source.sums_records else pending, pending, output.write)
                with typed(source.path):
                    source.finish()
            complete(staging.path)
            if options.verify:
                with comparing(storage, staging.path, plan, converter) as compare:
                    go_over("verifying", every, every, compare)
            staging.commit()
        except Exception:
            staging.abandon()
            raise
        finally:
            staging.release()
    names = tuple(file.name for file in plan.files)
    overflowed = tuple(sorted(converter.overflowed))
    left = source.left_out, plan.excluded(source.tensors), source.missing
    return Written(staging.out, names, len(tensors), plan.payload, overflowed, *left)


def verify(
    source: Source,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: OnProgress = lambda *_: None,
) -> list[str]:
    """Read every byte of a checkpoint. Returns one message for each damage found."""
    workers = workers or default_workers()
    limit = chunk_bytes(memory, workers)
    total = sum(chunk.nbytes for chunk in _typed(source, source.everything(limit)))
    told = _adding_up(progress, "verifying", total)
    problems: list[str] = []

    def check(chunk: Chunk, buffers: Buffers) -> None:
        try:
            chunk.read(buffers.source)
        except CheckpointError as error:
            problems.append(str(error))
        told(chunk.nbytes)

    run(_typed(source, source.everything(limit)), workers, limit, check)
    try:
        with typed(source.path):
            source.finish()
    except CheckpointError as error:
        problems.append(str(error))
    return sorted(set(problems))


def _typed(source: Source, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The chunks of a source, which raise typed errors only."""

    def read(chunk: Chunk, pages: memoryview) -> memoryview:
        with typed(source.path):
            return chunk.read(pages)

    with typed(source.path):
        for chunk in chunks:
            yield replace(chunk, read=partial(read, chunk))


def _adding_up(progress: OnProgress, what: str, total: int) -> Callable[[int], None]:
    """A function that adds up the bytes that are done, and reports them."""
    lock, done = threading.Lock(), 0

    def told(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(what, done, total)

    told(0)
    return told


def _fingerprint(source: Source, plan: OutputPlan) -> bytes:
    """A digest of what a run is about to write, by which a later run knows whether it has the same plan."""
    files = []
    for file in plan.files:
        fixed = [(offset, hashlib.sha256(content).hexdigest()) for offset, content in file.fixed]
        tensors = [(t.tensor, t.name, t.dtype, file.offsets[t.tensor]) for t in file.tensors]
        files.append((file.name, file.nbytes, fixed, tensors))
    text = json.dumps([source.identity, files])
    return hashlib.sha256(text.encode()).hexdigest().encode()


@contextmanager
def translated(out: Path, nbytes: int = 0) -> Iterator[None]:
    """Turn the operating system's errors into CheckpointError. nbytes: needed on the disk, if known."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        needed = f": {nbytes:,} bytes are needed" if full and nbytes else ""
        raise CheckpointError(
            f"{out} could not be written: {error}{needed}; nothing was left behind"
        ) from error
