"""Pictures as Vega-Lite specifications, which draw in the page's own text colour, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]
Unit = Literal["", "B", "s", "B/s", "%"]

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#bab0ac")
X = "_x"
"""The field of rows for the horizontal axis, which is no name of a number."""
_HEIGHT = 240
_MARKED = 60  # points of a line that are drawn as points, too
_BAR = 18
_MOST_BARS = 40
_UNSAFE = str.maketrans(".[]\\'\"", "______")  # what has a meaning in Vega-Lite's names of fields


def safe(name: str) -> str:
    """A name of a field that Vega-Lite takes as it is."""
    return name.translate(_UNSAFE)


def lines(rows: Rows, names: Sequence[str], y: str, unit: Unit = "") -> Spec:
    """A line over steps for each name. rows: with values by `X` and name, None for none. y: the axis's
    title."""
    dense = [name for name in names if _count(rows, name) > _MARKED]
    sparse = [name for name in names if name not in dense]
    marks = [
        _series(some, names, {"type": "line", "strokeWidth": 1.8, **mark})
        for some, mark in ((dense, {}), (sparse, {"point": {"size": 30, "filled": True}}))
        if some
    ]
    legend: Spec | None = None if len(names) == 1 else {}
    for mark in marks:
        mark["encoding"]["y"] |= {"title": y, "scale": {"zero": bool(unit)}, "axis": _axis(unit)}
        mark["encoding"]["color"]["legend"] = legend
    return _framed(rows, _HEIGHT, layer=[*marks, _hover(names, unit)])


def areas(
    rows: Rows,
    colours: Mapping[str, str],
    y: str,
    unit: Unit,
    *,
    x: str = "step",
    stairs: bool = False,
    told: Sequence[str] = (),
) -> Spec:
    """Areas, one on top of the other in the order of `colours`; what is missing is 0. x, y: titles of the
    axes. stairs: a value is that of the time since the one before. told: further fields, for people who point
    at a place."""
    names = list(colours)
    rows = [{**row, **{name: row.get(name) or 0 for name in names}} for row in rows]
    mark = {"type": "area", "interpolate": "step-before" if stairs else "linear", "opacity": 0.85}
    area = _series(names, names, mark, list(colours.values()))
    area["transform"].append({"calculate": f"indexof({names}, datum.series)", "as": "order"})
    area["encoding"]["order"] = {"field": "order"}
    area["encoding"]["x"]["title"] = x
    area["encoding"]["y"] |= {"title": y, "stack": "zero", "axis": _axis(unit)}
    return _framed(rows, _HEIGHT, layer=[area, _hover(names, unit, told, x, stairs)])


def capped(spec: Spec, most: float) -> Spec:
    """Leave out what is above `most`."""
    for layer in spec["layer"]:
        if "y" in layer["encoding"]:
            layer["encoding"]["y"]["scale"] = {"domain": [0, most]}
            layer["mark"]["clip"] = True
    return spec


def divided(spec: Spec, at: Sequence[float], labels: Sequence[tuple[float, str]]) -> Spec:
    """Add dashed lines at values of x, and labels at the top, in the middle of what they name."""
    place = {"field": X, "type": "quantitative"}
    rules = {
        "data": {"values": [{X: value} for value in at]},
        "mark": {"type": "rule", "strokeDash": [4, 4], "color": "currentColor", "opacity": 0.5},
        "encoding": {"x": place},
    }
    texts = {
        "data": {"values": [{X: value, "label": label} for value, label in labels]},
        "mark": {"type": "text", "y": -8, "color": "currentColor"},
        "encoding": {"x": place, "text": {"field": "label"}},
    }
    return {**spec, "layer": [*spec["layer"], rules, texts]}


def bars(values: Mapping[str, float], y: str, x: str, unit: Unit) -> Spec:
    """A bar for each name, in this order, and one for all from the 40th on. x, y: titles of the axes."""
    shown = dict(list(values.items())[:_MOST_BARS])
    if len(values) > len(shown):
        rest = len(values) - len(shown)
        shown[f"({rest} more)"] = sum(values.values()) - sum(shown.values())
    rows = [{"name": name or "(none)", "value": value} for name, value in shown.items()]
    encoding: Spec = {
        "y": {"field": "name", "type": "nominal", "sort": None, "title": y, "axis": {"labelLimit": 150}},
        "x": {"field": "value", "type": "quantitative", "title": x, "axis": _axis(unit)},
        "tooltip": [{"field": "name", "title": y}, {"field": "value", "title": x, "format": _FORMATS[unit]}],
    }
    mark = {"type": "bar", "color": COLOURS[0], "cornerRadiusEnd": 2}
    return _framed(rows, _BAR * len(rows), mark=mark, encoding=encoding)


def _framed(rows: Rows, height: int, **content: Any) -> Spec:
    return {"data": {"values": list(rows)}, "height": height, **content}


def _series(some: Sequence[str], names: Sequence[str], mark: Spec, colours: Sequence[str] = COLOURS) -> Spec:
    """A mark for some of all names, each of which has its own colour."""
    scale = {"domain": list(names), "range": [colours[n % len(colours)] for n in range(len(names))]}
    x = {"field": X, "type": "quantitative", "title": "step", "scale": {"zero": False, "nice": False}}
    return {
        "transform": [{"fold": list(some), "as": ["series", "value"]}, {"filter": "isValid(datum.value)"}],
        "mark": mark,
        "encoding": {
            "x": x,
            "y": {"field": "value", "type": "quantitative"},
            "color": {"field": "series", "type": "nominal", "scale": scale, "title": None},
        },
    }


def _hover(
    names: Sequence[str], unit: Unit, told: Sequence[str] = (), x: str = "step", stairs: bool = False
) -> Spec:
    """What is shown where someone points: all values of the stretch there, which is around a row's place, or,
    with stairs, before it."""
    near = "datum.{0}" if stairs else f"(datum.{{0}} + datum.{X}) / 2"
    ends = {"_from": near, "_to": f"datum.{X}" if stairs else near}
    return {
        "transform": [
            {"window": [{"op": "lag", "field": X, "as": "_from"}, {"op": "lead", "field": X, "as": "_to"}]},
            *(
                {"calculate": f"isValid(datum.{end}) ? {at.format(end)} : datum.{X}", "as": end}
                for end, at in ends.items()
            ),
        ],
        "params": [
            {"name": "pointed", "select": {"type": "point", "on": "pointerover", "clear": "pointerout"}}
        ],
        "mark": {"type": "rect", "color": "currentColor"},
        "encoding": {
            "x": {"field": "_from", "type": "quantitative"},
            "x2": {"field": "_to"},
            "opacity": {"condition": {"param": "pointed", "empty": False, "value": 0.15}, "value": 0},
            "tooltip": [
                {"field": X, "type": "quantitative", "format": ",.6~g", "title": x},
                *({"field": name, "type": "nominal"} for name in told),
                *(
                    {
                        "field": name,
                        "type": "quantitative",
                        "format": _FORMATS[unit],
                        "title": f"{name}, {unit}" if unit in ("B", "s", "B/s") else name,
                    }
                    for name in names
                ),
            ],
        },
    }


def _axis(unit: Unit) -> Spec:
    """Of values, with few labels that do not grow."""
    known: Spec = {"tickCount": 5, "labelExpr": f"format(datum.value, '~s') + '{unit}'"}
    if unit == "%":
        known["labelExpr"] = "format(datum.value, '.3~p')"
    if not unit:
        small = "abs(datum.value) < 0.001 && datum.value != 0"
        known["labelExpr"] = f"{small} ? format(datum.value, '.2~e') : format(datum.value, ',~r')"
    return known


def _count(rows: Rows, name: str) -> int:
    return sum(row.get(name) is not None for row in rows)


_FORMATS: dict[Unit, str] = {"": ",.4~g", "B": ".4~s", "s": ".4~s", "B/s": ".4~s", "%": ".3~p"}
