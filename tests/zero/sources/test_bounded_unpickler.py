"""Pickles that are small and mean much: whatever they ask for takes bounded work, or is refused."""

from __future__ import annotations

import pickle
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest

import zero
from zero.sources import inert_pickle
from zero.sources.bounded_unpickler import Inert
from zero.sources.inert_pickle import TENSORS, strangers_in, tensors_in

DEEP = 200_000  # a hash of as many tuples overflows the stack
DOUBLED = b"".join(b"q\x00h\x00\x86" for _ in range(60))  # t = (t, t), sixty times
DOUBLED_LISTS = b"".join(b"q\x000](h\x00h\x00e" for _ in range(60))


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def named(full: str) -> bytes:
    module, _, name = full.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def tensor(shape: bytes, stride: bytes, key: str = "0") -> bytes:
    storage = text("storage") + named("torch.FloatStorage") + text(key) + text("cpu") + number(3)
    rest = shape + stride + b"\x89" + named("collections.OrderedDict") + b")R"
    return named("torch._utils._rebuild_tensor_v2") + b"((" + storage + b"tQ" + number(0) + rest + b"tR"


def sizes(size: int, count: int) -> bytes:
    return b"(" + number(size) * count + b"t"


def encoded(encoding: str) -> bytes:
    return named("_codecs.encode") + b"(" + text("ab") + text(encoding) + b"tR"


def load(body: bytes, strangers: bool = True, most: int = 1 << 20) -> Any:
    return inert_pickle.load(b"\x80\x04" + body + b".", TENSORS, Path("some"), strangers, most)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b"}" + b")" + b"\x85" * DEEP + number(1) + b"s", "key", id="hash of a deep tuple"),
        pytest.param(b")" + b"\x85" * DEEP, "deep", id="deep tuple"),
        pytest.param(b"]q\x00h\x00a", "holds itself", id="list in itself"),
        pytest.param(b"}q\x00" + text("a") + b"h\x00s", "holds itself", id="dict in itself"),
        pytest.param(named("builtins.set") + b"(])" + DOUBLED + b"atR", "key", id="set of doubled tuples"),
        pytest.param(b"()" + DOUBLED + b"\x91", "key", id="frozenset of them"),
        pytest.param(b"\x8f()" + DOUBLED + b"\x90", "key", id="items of a set"),
        pytest.param(b"()" + DOUBLED + b"Nd", "key", id="keys of a dict"),
        pytest.param(named("collections.OrderedDict") + b"(])" + DOUBLED + b"N\x86atR", "key", id="pairs"),
        pytest.param(b"}" + number(1 << 9999) + b"Ns", "64 bits", id="a long number as a key"),
        pytest.param(tensor(sizes(1, 65), sizes(1, 65)), "64", id="rank"),
        pytest.param(tensor(sizes(1 << 61, 9), sizes(1, 9)), "sizes", id="size"),
        pytest.param(tensor(b"(\x88t", sizes(1, 1)), "sizes", id="a truth value as a size"),
        pytest.param(tensor(sizes(3, 1), sizes(1, 1), key="k" * 300), "too long", id="long key"),
        pytest.param(encoded("punycode"), "latin1", id="codec"),
        pytest.param(encoded("../evil"), "latin1", id="import"),
        pytest.param(b"\x96" + (1 << 40).to_bytes(8, "little"), "IndexError", id="bytes not there"),
        pytest.param(b"N0" * (1 << 20), "more steps", id="too many steps"),
        pytest.param(b"\x82\x01", "extension", id="extension"),
        pytest.param(named("torch.Tensor") + named("my.Thing") + b"a", "appends", id="items for a class"),
        pytest.param(named("my.Thing") + named("torch.Tensor") + b"a", "appends", id="items for a stranger"),
        pytest.param(named("torch.Tensor") + b"}" + text("x") + b"Nsb", "state of", id="state for a class"),
    ],
)  # fmt: skip
def test_what_is_small_and_means_much_is_refused(body: bytes, message: str) -> None:
    begun = time.process_time()
    with pytest.raises(zero.CorruptCheckpointError, match=message):
        load(body)
    assert time.process_time() - begun < 10
    assert not {"items", "state", "taken"} & {name for name in vars(Inert) if name != "state"}


def test_a_call_costs_what_it_looks_at() -> None:
    """Else a text of 16 MB, referred to a million times, would be encoded as often."""
    long = text("a" * 60_000) + b"q\x000"
    call = named("_codecs.encode") + b"(h\x00" + text("latin1") + b"tR0"
    assert load(long + 10 * call + b"N", most=1 << 20) is None
    with pytest.raises(zero.CorruptCheckpointError, match="more steps"):
        load(long + 30 * call + b"N", most=1 << 20)


def test_names_of_strangers_cost_too() -> None:
    with pytest.raises(zero.CorruptCheckpointError, match="more steps"):
        load(b"".join(named(f"my.N{n}") + b"0" for n in range(2000)) + b"N", most=100_000)
    assert load(b"".join(named("my.Same") + b"0" for _ in range(2000)) + b"N", most=100_000) is None


def test_shared_lists_are_walked_once() -> None:
    content = load(b"]" + DOUBLED_LISTS)
    assert not list(tensors_in(content))
    assert not list(strangers_in(content))


def test_a_million_items_of_a_stranger_are_taken_one_by_one() -> None:
    begun = time.process_time()
    load(named("my.List") + b")\x81" + b"Na" * 200_000)
    assert time.process_time() - begun < 10


class Point:
    def __init__(self) -> None:
        self.x = [1, 2]
        self.me = self


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_jobs_save_is_read(protocol: int) -> None:
    value = {
        (1, "a", (2.5, None)): [b"bytes", bytearray(b"more"), {1, 2}, frozenset({3})],
        "ordered": OrderedDict(a=1, b=[()]),
        "counted": Counter("aab"),
        "complex": 1 + 2j,
    }
    found = inert_pickle.load(pickle.dumps(value, protocol), TENSORS, Path("some"), strangers=True)
    expected: dict[Any, Any] = {**value, next(iter(value)): [b"bytes", b"more", {1, 2}, frozenset({3})]}
    if protocol < 4:  # which write frozensets by name
        assert isinstance(found[next(iter(value))].pop(), Inert)
        expected[next(iter(value))].pop()
    assert found == expected
    (stranger,) = strangers_in(
        inert_pickle.load(pickle.dumps([Point()], protocol), {}, Path("some"), strangers=True)
    )
    assert stranger.name == f"{__name__}.Point"
    assert stranger.state["x"] == [1, 2]
