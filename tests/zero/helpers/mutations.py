"""Files of all formats that are read, and changes to them: at random, but made anew from the same numbers.

A tree is a directory as a dict of names and bytes. Changes that know the format keep its checksums right, so
that they get past them.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import random
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file

import zero
from tests.zero.helpers import dcp_layout, deepspeed_layout, synthetic

Tree = dict[str, bytes]
Change = Callable[[bytes, random.Random], bytes]
SPARSE = 6 << 30


# -- seeds: small files of every format ------------------------------------------------------------------


def make_seeds(folder: Path) -> dict[str, Tree]:
    """A tree for each format, made in `folder`."""
    torch.manual_seed(1)
    state = {
        "w": torch.randn(6, 5),
        "b": torch.randn(5).bfloat16(),
        "i": torch.arange(9),
        "t": torch.randn(4, 3).t(),
        "e": torch.zeros(0, 3),
    }
    _zero(folder / "zero")
    blocks = {name: state[name] for name in ("w", "b", "t", "e")}
    synthetic.save(folder / "zero blocks" / "a", blocks, divided={"w": 1, "t": 0})
    dense = {name: value.contiguous() for name, value in state.items()}
    (folder / "safetensors").mkdir()
    save_file(dense, folder / "safetensors" / "model.safetensors", {"format": "pt", "alias": "w"})
    _index(folder / "sharded", "model", ".safetensors", dense, save_file)
    _index(folder / "bins", "pytorch_model", ".bin", state, torch.save)
    (folder / "torch").mkdir()
    rest = {"step": 3, "lists": [torch.ones(2), {"x": (1, "a")}], "tied": state["w"], "bytes": b"xy"}
    torch.save({"model": state, **rest}, folder / "torch" / "pytorch_model.bin")
    model = deepspeed_layout.Model(
        [{"a.weight": torch.randn(5, 3), "a.bias": torch.randn(5)}, {"c": torch.randn(7)}],
        {"fr": torch.randn(4).bfloat16()},
        {"buf": torch.arange(4)},
        {"tied": "c"},
    )
    for stage in (2, 3):
        deepspeed_layout.save(folder / f"deepspeed {stage}", model, deepspeed_layout.Layout(stage=stage))
    deepspeed_layout.save_universal(folder / "universal", model, deepspeed_layout.Layout(stage=2))
    boxes = {"w": [((0, 0), (6, 2)), ((0, 2), (6, 3))], "t": [((0, 0), (3, 2)), ((0, 2), (3, 2))]}
    dcp_layout.save(folder / "dcp", state, boxes)
    return {path.name: tree_of(path) for path in sorted(folder.iterdir())}


def _zero(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config(stage=3))
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    state = {"epoch": 3, "t": torch.arange(5), "pair": (1, 2), "d": {1: "x"}, "inf": float("inf")}
    engine.save_checkpoint(folder / "a", state, rank_state={"position": 1}, keep_last=3)


def _index(folder: Path, stem: str, suffix: str, state: dict[str, Any], save: Callable[..., Any]) -> None:
    folder.mkdir()
    files = {name: f"{stem}-{1 + number % 2:05d}-of-00002{suffix}" for number, name in enumerate(state)}
    for file in set(files.values()):
        save({name: value for name, value in state.items() if files[name] == file}, folder / file)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def tree_of(folder: Path) -> Tree:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# -- changes ---------------------------------------------------------------------------------------------

NUMBERS = (0, 1, -1, 2, 1.9, 255, 65536, (1 << 31) - 1, 1 << 32, (1 << 62) - 1, 1 << 63, 1 << 64, 1 << 200)
TEXTS = (
    "", ".", "..", "/", "../../x", "/etc/passwd", "a\0b", "\ud800", "\x1b]0;t\x07", "a\nb", "g" * 300,
    "n" * 5000, "F32", "F8_E4M3", "XX", "w", "\u202e", "a//b", "__metadata__", "$tensor", "9" * 5000,
)  # fmt: skip
FLOATS = (float("nan"), float("inf"), -float("inf"), 1e308, -0.0)


def value(generator: random.Random) -> Any:
    """A value that few expect."""
    return generator.choice(
        (
            *NUMBERS, *TEXTS, *FLOATS, None, True, False, [], {}, [[]], {"a": {}}, [1] * 70, [1 << 61] * 100,
            {"$tuple": 3}, {"$float": "x"}, {"$dict": [[[], 1]]}, nested(150), nested(3000),
        )
    )  # fmt: skip


def nested(depth: int) -> Any:
    result: Any = 1
    for _ in range(depth):
        result = [result]
    return result


def change_bytes(data: bytes, generator: random.Random) -> bytes:
    """Flip, cut, repeat, remove or overwrite some bytes."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 8))):
        at = generator.randrange(len(changed) + 1)
        end = min(len(changed), at + generator.choice((1, 2, 8, 64, 1000)))
        kind = generator.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            changed[at:end] = generator.randbytes(end - at)
        elif kind == 2:
            changed[at:end] = bytes([generator.choice((0, 255, 127, 128))]) * (end - at)
        elif kind == 3:
            del changed[at:end]
        elif kind == 4:
            changed[at:at] = changed[at:end]
        else:
            del changed[at:]
    return bytes(changed)


def change_json(content: Any, generator: random.Random) -> Any:
    """Replace, remove, rename or double members of a JSON value."""
    for _ in range(generator.choice((1, 1, 2, 4))):
        places = list(_places(content))
        if not places:
            return value(generator)
        holder, key = generator.choice(places)
        kind = generator.randrange(6)
        if kind < 3:
            holder[key] = value(generator)
        elif kind == 3:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(generator.randrange(len(holder) + 1), holder[key])
        else:
            holder[generator.choice(TEXTS)] = holder.pop(key) if kind == 4 else holder[key]
    return content


def _places(content: Any) -> Any:
    if isinstance(content, (dict, list)):
        for key, item in list(content.items() if isinstance(content, dict) else enumerate(content)):
            yield content, key
            yield from _places(item)


def change_sealed(data: bytes, generator: random.Random) -> bytes:
    """Change the JSON of a manifest or of `latest`, and seal it again."""
    head, _, body = data.partition(b"\n")
    changed = change_json(json.loads(b"{" + body), generator)
    text = json.dumps(changed).encode()[1:]
    return head[: head.index(b'"crc32"')] + b'"crc32":"%08x",\n' % crc32(text) + text


def change_index(data: bytes, generator: random.Random) -> bytes:
    return json.dumps(change_json(json.loads(data), generator)).encode()


def change_header(data: bytes, generator: random.Random) -> bytes:
    """Change the header of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(change_json(json.loads(data[8 : 8 + length]), generator)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


FRAGMENTS = (
    *(bytes([code]) for code in b"N}])(0tuesaRbQ2.\x88\x81\x85\x8f\x94"),
    b"h\x00", b"h\x01", b"q\x00", b"r\xff\xff\xff\x7f", b"]q\x00h\x00a",
    b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\0", b"\x8a\x08" + b"\0" * 7 + b"\x20",
    b"G\x7f\xf8\0\0\0\0\0\0", b"I" + b"7" * 5000 + b"\n",
    b"X\x03\0\0\0\xed\xa0\x80", b"X\x03\0\0\0a\0b", b"X\x05\0\0\0\x1b]0;t",
    b")" + b"\x85" * 2000, b"]" * 300, b")" + b"q\x09h\x09\x86" * 40, b"]" + b"q\x09]h\x09ah\x09a" * 40,
    b"ctorch\nSize\n", b"ctorch\nTensor\n", b"cos\nsystem\n", b"cmy\nThing\n)R", b"cbuiltins\nset\n]\x85R",
    b"c_codecs\nencode\n(X\x01\0\0\0aX\x03\0\0\0idntR", b"ccollections\nOrderedDict\n)R",
    b"\x96\xff\xff\xff\xff\xff\0\0\0", b"\x82\x01",
)  # fmt: skip


def change_pickle(data: bytes, generator: random.Random) -> bytes:
    """Remove, repeat, exchange or add opcodes."""
    ends = [at for _, _, at in pickletools.genops(data) if at is not None]
    parts = [data[at:end] for at, end in zip(ends, [*ends[1:], len(data)], strict=True)]
    for _ in range(generator.choice((1, 1, 2, 4))):
        at = generator.randrange(len(parts))
        kind = generator.randrange(6)
        if kind == 0:
            del parts[at]
        elif kind == 1:
            parts.insert(at, generator.choice(parts))
        elif kind == 2:
            parts[at] = generator.choice(parts)
        elif kind == 3:
            parts[at] = generator.choice(FRAGMENTS)
        elif kind == 4:
            parts[at] = generator.choice(FRAGMENTS) + parts[at]
        else:
            parts[at] = change_bytes(parts[at], generator)
    return b"".join(parts)


def change_zip(data: bytes, generator: random.Random) -> bytes:
    """Change the pickle of a file of torch.save or another of its records, their names or their number."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = generator.choice([*records, *(n for n in records if n.endswith("data.pkl") for _ in range(20))])
    kind = generator.randrange(12)
    if kind == 0:
        del records[name]
    elif kind == 1:
        records[generator.choice(("x", "a/" * 90, "x/data.pkl", "\x1b[2J"))] = records.pop(name)
    elif name.endswith("data.pkl"):
        records[name] = change_pickle(records[name], generator)
    else:
        records[name] = change_bytes(records[name], generator)
    file = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if kind == 2 else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return file.getvalue()


def fitting(name: str) -> Change:
    """The change that knows the format of a file."""
    base = os.path.basename(name)
    if base == "manifest.json" or (base == "latest" and "global" not in name):
        return change_sealed
    if base.endswith(".json"):
        return change_index
    if base.endswith(".safetensors"):
        return change_header
    if base.endswith((".pt", ".bin")):
        return change_zip
    return change_pickle if base == ".metadata" else change_bytes


def change(tree: Tree, path: Path, generator: random.Random) -> None:
    """Write a tree to `path`, with a change to one of its files or to what its name leads to."""
    name = generator.choice(list(tree))
    data = tree[name]
    for other, content in tree.items():
        (path / other).parent.mkdir(parents=True, exist_ok=True)
        if other != name:
            (path / other).write_bytes(content)
    kind = generator.randrange(10)
    if kind == 0:
        generator.choice(LEADS)(path / name)
        return
    try:
        data = (change_bytes if kind < 3 else fitting(name))(data, generator)
    except (ValueError, RecursionError):  # DeepSpeed's latest, which is no JSON; what JSON cannot write
        data = change_bytes(data, generator)
    (path / name).write_bytes(data)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE)


LEADS: tuple[Callable[[Path], Any], ...] = (
    os.mkfifo,
    Path.mkdir,
    _sparse,
    Path.touch,
    partial(Path.symlink_to, target="/dev/zero"),
    partial(Path.symlink_to, target="/dev/random"),
    lambda path: path.symlink_to(path.name),
    lambda path: path.with_name("other").write_bytes(b""),
)
