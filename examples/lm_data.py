"""Training data: the bytes of the Python standard library's sources, as found on this machine."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_SHARE = 0.1  # of the files
START = b"\0"  # before every file
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, one uint8 tensor each. No file is in both."""

    train: Tensor
    validation: Tensor


def load_corpus(context: int, max_bytes: int = 0) -> Corpus:
    """Read the sources: all of them, or files up to about `max_bytes`.

    Raises ValueError if either part is too short for a window of `context` + 1 bytes.
    """
    parts: dict[str, list[bytes]] = {"training": [], "validation": []}
    total = 0
    for path, digest in _files(Path(sysconfig.get_path("stdlib"))):
        if max_bytes and total >= max_bytes:
            break
        text = START + path.read_bytes()
        total += len(text)
        parts["validation" if digest[0] < 256 * VALIDATION_SHARE else "training"].append(text)
    joined = {name: b"".join(texts) for name, texts in parts.items()}
    for name, text in joined.items():
        if len(text) <= context:
            raise ValueError(
                f"the {name} text has {len(text)} bytes, too short for context {context}: "
                "raise --max-bytes or lower --context"
            )
    return Corpus(*(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in joined.values()))


def training_rows(text: Tensor, context: int, rows: int, seed: int, step: int) -> Tensor:
    """The global batch of one step, [rows, context + 1] int64: a function of the seed and the step alone."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    starts = torch.randint(len(text) - context, (rows,), generator=generator)
    return _windows(text, starts, context)


def validation_rows(text: Tensor, context: int, rows: int) -> Tensor:
    """`rows` windows spread evenly over the text, [rows, context + 1] int64."""
    return _windows(text, torch.linspace(0, len(text) - context - 1, rows).long(), context)


def shares(batch: Tensor, parts: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """Yield this rank's rows of each of `parts` micro-batches. Over all ranks they make up the batch."""
    for part in batch.chunk(parts):
        yield part.chunk(world_size)[rank]


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()


def _files(root: Path) -> list[tuple[Path, bytes]]:
    """Source files with digests of their relative paths, in the digests' order: shuffled, yet stable."""
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED.isdisjoint(relative.parts):
            found.append((path, hashlib.sha256(relative.as_posix().encode()).digest()))
    return sorted(found, key=lambda item: item[1][1:])
