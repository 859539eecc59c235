"""Flipped bits, cut and missing files, hostile manifests: an error that names them, never a wrong value."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import zero
from accelz import selection
from tests.zero.helpers.memory_storage import MemoryStorage, Tree
from tests.zero.helpers.small_saves import contents, expected, save
from zero.files import manifest as form
from zero.files.reader import Checkpoint, find

RUNS = Path("/runs")
NAME = "step-9"
FILES = ("latest", "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")


@pytest.fixture(scope="module")
def saved() -> Tree:
    selection.use("cpu")
    storage = MemoryStorage()
    assert save(storage, RUNS / NAME, 9) == [None, None]
    return storage.tree()


def damaged(tree: Tree, file: str, change: Callable[[bytes], bytes | None]) -> MemoryStorage:
    """The tree with a file changed, or removed (None)."""
    other = copy.deepcopy(tree)
    folder = other["runs"] if file == "latest" else other["runs"][NAME]
    data = change(folder.pop(file))
    if data is not None:
        folder[file] = data
    return MemoryStorage(other)


def flip(bit: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        return bytes(other)

    return change


def size_of(tree: Tree, file: str) -> int:
    return len(tree["runs"][file] if file == "latest" else tree["runs"][NAME][file])


def test_a_thousand_flipped_bits_are_all_found(saved: Tree) -> None:
    generator = random.Random(1)
    for _ in range(1000):
        file = generator.choice(FILES)
        bit = generator.randrange(8 * size_of(saved, file))
        storage = damaged(saved, file, flip(bit))
        with pytest.raises(zero.CorruptCheckpointError) as caught:
            contents(find(RUNS, storage), storage)
        assert file in str(caught.value), (file, bit)


def test_cut_lengthened_and_missing_files_are_found(saved: Tree) -> None:
    generator = random.Random(2)
    for _ in range(300):
        file = generator.choice(FILES)
        length = generator.randrange(size_of(saved, file))
        for change in (lambda d: d[:length], lambda d: d + d[: length + 1], lambda d: None):  # noqa: B023
            storage = damaged(saved, file, change)
            with pytest.raises(zero.CheckpointError) as caught:
                contents(find(RUNS, storage), storage)
            assert file in str(caught.value) or change(b"") is None


def problems(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with each tensor."""
    found = []
    for key, tensor in checkpoint.manifest.tensors.items():
        try:
            checkpoint.read(key, 0, memoryview(bytearray(tensor.numel * tensor.item_bytes)))
        except zero.CorruptCheckpointError as error:
            found.append(str(error))
    return found


def test_damage_is_named_by_the_tensor_it_hit(saved: Tree) -> None:
    generator = random.Random(3)
    with Checkpoint(RUNS / NAME, MemoryStorage(saved)) as checkpoint:
        manifest = checkpoint.manifest
    for key, tensor in manifest.tensors.items():
        for piece in tensor.slices:
            file = manifest.files[piece.file].name
            bit = 8 * piece.offset + generator.randrange(8 * piece.length * tensor.item_bytes)
            storage = damaged(saved, file, flip(bit))
            with Checkpoint(RUNS / NAME, storage) as checkpoint:
                (problem,) = problems(checkpoint)
                assert file in problem
                assert repr(key) in problem
                whole = bytearray(tensor.numel * tensor.item_bytes)
                with pytest.raises(zero.CorruptCheckpointError):
                    checkpoint.read(key, 0, memoryview(whole))


def test_an_intact_checkpoint_verifies(saved: Tree) -> None:
    storage = MemoryStorage(saved)
    assert contents(find(RUNS, storage), storage) == (9, expected(9))
    with Checkpoint(RUNS / NAME, storage) as checkpoint:
        assert problems(checkpoint) == []


def edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a member, given as keys with slashes between."""

    def change(manifest: dict[str, Any]) -> None:
        *parents, last = path.split("//")
        place: Any = manifest
        for key in parents:
            place = place[int(key) if isinstance(place, list) else key]
        place[int(last) if isinstance(place, list) else last] = value

    return change


DEEP = 100_000
RANDOM: dict[str, Any] = {
    "torch": {"$tensor": "rank/0/rng"},
    "device": {"$tensor": "rank/0/rng"},
    "python": {"version": 3, "internal": {"$tensor": "rank/0/rng"}, "gauss": None},
    "numpy": {
        "kind": "MT19937", "keys": {"$tensor": "rank/0/rng"}, "position": 0, "has_gauss": 0, "cached": 0.0
    },
}  # fmt: skip
W = "tensors//model/w"
HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "path in a file name": edit("files//0//name", "../../etc/passwd"),
    "absolute file name": edit("files//0//name", "/etc/passwd"),
    "shape too large": edit(f"{W}//shape", [1 << 40, 1 << 40]),
    "negative shape": edit(f"{W}//shape", [-20, -35]),
    "another shape": edit(f"{W}//shape", [20, 36]),
    "overlapping strides": edit(f"{W}//stride", [1, 1]),
    "unknown dtype": edit(f"{W}//dtype", "PICKLE"),
    "wider dtype": edit(f"{W}//dtype", "F64"),
    "slices overlap": edit(f"{W}//slices//1//1", 299),
    "slice of no file": edit(f"{W}//slices//0//0", 7),
    "slice beyond the file": edit(f"{W}//slices//0//3", 1 << 40),
    "slices share bytes": lambda m: m["tensors"].update(
        {f"w{n}": m["tensors"]["model/w"] for n in range(99)}
    ),
    "too many dimensions": edit(f"{W}//shape", [700] + [1] * 64),
    "no checksum": edit(f"{W}//slices//0//4", 1 << 40),
    "a fraction": edit(f"{W}//slices//0//1", 0.5),
    "no tensors": edit("tensors", {}),
    "no member": lambda m: m.pop("optimizer"),
    "wrong type": edit("steps", "9"),
    "huge number": edit("steps", 1 << 70),
    # The state is nested DEEP lists deep:
    "deep": edit("state", None),
    "one huge block": edit("block_bytes", 1 << 40),
    "checksums before the file": edit("files//0//checksums_at", 1 << 30),
    "parameters among options": edit("optimizer//param_groups//0//params", []),
    "optimizers of no group": edit("optimizer//of_groups", ["test", "test"]),
    "group that is not there": edit("parameters//0//group", 1),
    "parameter of no dtype": edit("parameters//0//dtype", "PICKLE"),
    "parameter twice": lambda m: m["parameters"].append(m["parameters"][0]),
    "alias of another's name": edit("parameters//0//aliases", ["w"]),
    "buffer of a parameter's name": edit("buffers", ["w"]),
    "state twice": edit("parameters//0//state", ["step", "step"]),
    "state and value": edit("parameters//0//values", {"step": 1}),
    "a rank too few": lambda m: m["ranks"].pop(),
    "saved in the year 30,000": edit("created", 9e11),
    "saved at no time": edit("created", float("inf")),
    "loss scale of zero": edit("loss_scale", {"scale": 0.0, "good_steps": 1.0}),
    "random state of text": edit("ranks//1//rng", {"torch": "x"}),
    "random state of a number": edit("ranks//1//rng", 5),
    "random state of another tensor": edit("ranks//1//rng", {**RANDOM, "torch": {"$tensor": "rank/9/rng"}}),
    "value of a number for a tensor": edit("state", {"x": {"$tensor": 5}}),
    "value of a missing tensor": edit("ranks//0//state", [{"$tensor": "model/v"}]),
    "value of no float": edit("parameters//0//values", {"x": {"$float": "abc"}}),
    "value of no tuple": edit("optimizer//param_groups//0//betas", {"$tuple": 0.9}),
    "value of no pairs": edit("state", {"$dict": [["a", 1], ["b"]]}),
    "value of unhashable keys": edit("state", {"$dict": [[["a"], 1]]}),
    "counter of dicts": edit("extra_state", {"m": {"$counter": [[{"a": 1}, 1]]}}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifests_are_refused(saved: Tree, what: str) -> None:
    def change(data: bytes) -> bytes:
        manifest = json.loads(form.unseal("zero-checkpoint", data))
        HOSTILE[what](manifest)
        text = json.dumps({k: v for k, v in manifest.items() if k != "state"})[:-1].replace(
            "Infinity", "1e999"
        )
        state = "[" * DEEP + "]" * DEEP if what == "deep" else json.dumps(manifest["state"])
        return resealed(f'{text},"state":{state}}}')

    with pytest.raises(zero.CorruptCheckpointError, match=r"manifest.json|rank-0000"):
        contents(RUNS / NAME, damaged(saved, "manifest.json", change))


def test_random_states_of_the_right_form_are_not(saved: Tree) -> None:
    def change(data: bytes) -> bytes:
        manifest = json.loads(form.unseal("zero-checkpoint", data))
        edit("ranks//1//rng", RANDOM)(manifest)
        return resealed(json.dumps(manifest))

    contents(RUNS / NAME, damaged(saved, "manifest.json", change))


def resealed(text: str) -> bytes:
    """A manifest with a checksum that matches: changed on purpose."""
    rest = text[1:].encode()
    return b'{"format":"zero-checkpoint","version":1,"crc32":"%08x",\n%s' % (crc32(rest), rest)


def test_another_version_is_refused_by_its_number(saved: Tree) -> None:
    storage = damaged(saved, "manifest.json", lambda d: d.replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(
        zero.CorruptCheckpointError, match=r"format version 2, but this version of zero reads 1"
    ):
        contents(RUNS / NAME, storage)


@pytest.mark.parametrize("name", ["../other", "/etc", ".step-9.zero-new", ""])
def test_latest_names_nothing_outside_its_directory(saved: Tree, name: str) -> None:
    data = form.seal("zero-latest", {"checkpoint": name, "rotation": []})
    with pytest.raises(zero.CorruptCheckpointError, match=r"latest cannot be used: checkpoint"):
        find(RUNS, damaged(saved, "latest", lambda _: data))
