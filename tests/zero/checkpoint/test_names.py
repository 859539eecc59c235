"""Names of a checkpoint matched with a model's; the caller's values through JSON and back."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from zero.checkpoint import user_state
from zero.checkpoint.rank_file import Part
from zero.files.manifest import escape, unescape
from zero.files.names import Rename, Saved, Target, match
from zero.files.value_forms import decode


def stored(
    *names: str, aliases: dict[str, tuple[str, ...]] | None = None, **other: tuple[int, ...]
) -> list[Saved]:
    """Parameters of shape (4,), and buffers of the given shapes."""
    parameters = [Saved(n, (4,), "F32", (aliases or {}).get(n, ())) for n in names]
    return parameters + [Saved(name, shape, "F32") for name, shape in other.items()]


def wanted(*names: str, **aliases: tuple[str, ...]) -> list[Target]:
    return [Target(n, (4,), True, aliases.get(n, ())) for n in names]


def matched(
    found: list[Saved],
    targets: list[Target],
    rename: Rename | None = None,
    strict: bool = True,
    same: Callable[[str, str], bool] = lambda one, other: False,
) -> dict[str, str]:
    return match(found, targets, rename, strict, same)


def test_names_match_themselves() -> None:
    assert matched(stored("a", "b", mean=(4,)), wanted("b", "a", "mean")) == {
        "a": "a",
        "b": "b",
        "mean": "mean",
    }


def test_what_was_left_out_may_be_missing_under_its_new_name() -> None:
    found, targets = stored("a"), wanted("x.a", "x.b", b=("x.c",))
    rename = {"a": "x.a", "b": "x.b", "c": "x.c"}
    assert match(found, wanted("a", "b"), None, True, lambda *_: False, ("b",)) == {"a": "a"}
    assert match(found, targets[:2], rename, True, lambda *_: False, ("b", "c")) == {"x.a": "a"}
    assert match(found, wanted("a", "b", b=("c",)), None, True, lambda *_: False, ("c",)) == {"a": "a"}
    with pytest.raises(zero.StateError, match="missing in the checkpoint: c"):
        match(found, wanted("a", "b", "c"), None, True, lambda *_: False, ("b",))


@pytest.mark.parametrize(
    ("found", "targets", "expected"),
    [
        (stored("a", aliases={"a": ("b",)}), wanted("b", b=("a",)), {"b": "a"}),  # tied both, other order
        (stored("a", aliases={"a": ("b",)}), wanted("a", "b"), {"a": "a", "b": "a"}),  # tied there only
        (stored("a", aliases={"a": ("b",)}), wanted("b"), {"b": "a"}),  # the model has one of the names
    ],
)
def test_tied_names(found: list[Saved], targets: list[Target], expected: dict[str, str]) -> None:
    assert matched(found, targets, None, True) == expected


def test_untied_values_for_a_tied_parameter_are_refused() -> None:
    with pytest.raises(zero.StateError, match=r"b \(both a and b in the checkpoint; rename one to None\)"):
        matched(stored("a", "b"), wanted("a", a=("b",)), None, False)


def test_equal_values_under_both_names_of_a_tied_parameter() -> None:
    """As in files of programs that know nothing of ties."""
    asked = []

    def same(*names: str) -> bool:
        asked.append(names)
        return True

    for order in (("a", "b"), ("b", "a")):
        assert matched(stored(*order), wanted("a", a=("b",)), same=same) == {"a": order[0]}
    assert asked == [("a", "b"), ("b", "a")]


def test_all_problems_are_listed_at_once() -> None:
    targets = [*wanted("a", "new"), Target("c", (5,), True), Target("d", (4,), False)]
    with pytest.raises(zero.StateError) as caught:
        matched(stored("a", "old", "c", "d"), targets)
    assert "mismatched: c (shape (4,) instead of (5,)), d (dtype F32)" in str(caught.value)
    assert "missing in the checkpoint: new" in str(caught.value)
    assert "unexpected in the checkpoint: old. If tensors of the model" in str(caught.value)
    assert matched(stored("a", "old"), wanted("a", "new"), None, False) == {"a": "a"}
    with pytest.raises(zero.StateError, match="rename to None what should keep"):
        matched(stored("c"), [Target("c", (5,), True)], None, False)
    assert matched(stored("c"), [Target("c", (5,), True)], {"c": None}, False) == {}


def test_many_names_are_cut_short() -> None:
    with pytest.raises(zero.StateError, match=r"n7 and 92 more"):
        matched(stored(), wanted(*(f"n{i}" for i in range(100))))


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"a": "x.a", "b": None}, {"x.a": "a"}),
        (lambda name: f"x.{name}" if name == "a" else None, {"x.a": "a"}),
    ],
)
def test_renamed_and_partial(rename: Rename, expected: dict[str, str]) -> None:
    assert matched(stored("a", "b"), wanted("x.a"), rename, True) == expected


def test_renames_that_make_no_sense() -> None:
    with pytest.raises(zero.UsageError, match=r"nothing called c"):
        matched(stored("a"), wanted("a"), {"c": "a"}, True)
    with pytest.raises(zero.StateError, match=r"both a and b"):
        matched(stored("a", "b"), wanted("x"), lambda _: "x", True)


VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "text"], "b": {}},
    "tuples": (1, (2, [3, ()])),
    "numbers": [1 << 200, -0.0, 5e-324, 0.1],
    "infinities": {"best": math.inf, "worst": -math.inf},
    "keys": {1: "one", None: 2, (3, "x"): 4, 2.5: 5},
    "looks like a tag": {"$tensor": 5},
    "two members": {"$tensor": 5, "$tuple": []},
    "counter": Counter({30: 1, 60: 2}),
    "text": '\u2028 \U0001f600 "quotes" \\ \n',
    "empty name": {"": {"/": 1, "%2F": 2}},
}


def there_and_back(value: Any) -> Any:
    parts: list[Part] = []
    text = json.dumps(user_state.encode(value, "state", parts, "state"), allow_nan=False)
    tensors = {p.key: p.values.view(p.shape) for p in parts}
    assert len(tensors) == len(parts)
    return decode(json.loads(text), tensors.__getitem__)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were(name: str) -> None:
    back = there_and_back(VALUES[name])
    assert back == VALUES[name]
    assert repr(back) == repr(VALUES[name])


def test_not_a_number_comes_back() -> None:
    assert math.isnan(there_and_back(math.nan))


def test_tensors_come_back() -> None:
    given = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "complex": torch.tensor([1j]).conj(),
        1: torch.tensor(1),
        "1": torch.tensor(2),  # the same key as text
    }
    back = there_and_back(given)
    assert list(back) == list(given)
    for name, value in given.items():
        assert isinstance(back[name], Tensor)
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": [1, {2}]}, r"state\['x'\]\[1\] is a set"),
        ({"f": len}, r"state\['f'\] is a builtin_function_or_method"),
        ({"b": b"1"}, r"state\['b'\] is a bytes"),
        (torch.ones(2).to_sparse(), r"state is a Tensor"),
        (torch.ones(2, device="meta"), r"state is a Tensor"),
        ("\ud800", r"cannot be encoded as UTF-8"),
        ({"\ud800": 1}, r"cannot be encoded as UTF-8"),
        ({torch.ones(1): 1}, r"is a tensor; use numbers"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, message: str) -> None:
    with pytest.raises(zero.UsageError, match=message):
        there_and_back(value)


def test_escaped_keys_stay_distinct() -> None:
    names = ["a/b", "a%2Fb", "a%252Fb", "a", "%", "/"]
    assert len({escape(n) for n in names}) == len(names)
    assert [unescape(escape(n)) for n in names] == names
    assert not any("/" in escape(n) for n in names)
