"""Draw the figures of the documentation: `python -m scripts.figures [--write]`, which fails if one is stale.

Bytes are those of `zero.plan`, rooms those of the source, and the timelines come of a small schedule, so that
a figure says what the code does. Those of the benchmarks are in measured_figures.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from graphlib import TopologicalSorter

import torch
from scripts.drawing import WIDTH, Drawing
from scripts.paths import ROOT

import zero
from scripts import lint_rooms, measured_figures
from zero.planning.plan import Plan

FOLDER = ROOT / "docs" / "figures"


def planned(**settings: object) -> Plan:
    """A model of 1 G parameters with AdamW in bf16, over eight ranks."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(60)))
    config = zero.Config(precision="bf16", **settings)  # type: ignore[arg-type]
    return zero.plan(model, torch.optim.AdamW(model.parameters()), config, ranks=8)


def giga(count: float) -> str:
    return f"{count / 1e9:.2g} GB" if count >= 1e8 else f"{count / 1e6:.2g} MB"


def stages() -> Drawing:
    drawing = Drawing(
        "What a rank keeps on its device: 1 G parameters, AdamW, bf16, 8 ranks",
        285,
        "Bars of parameters, gradients and optimizer state for stages 0 to 3.",
    )
    names = ("replicated", "+ optimizer state sharded", "+ gradients sharded", "+ parameters sharded")
    plans = [planned(stage=stage) for stage in range(4)]
    scale = (WIDTH - 350) / plans[0].memory.peaks["step"].total
    for stage, (plan, name) in enumerate(zip(plans, names, strict=True)):
        y = 52 + stage * 48
        held, x = plan.memory.peaks["step"], 240.0
        drawing.text(20, y + 15, f"stage {stage}")
        drawing.text(20, y + 31, name, "soft small")
        for kind, count in (("a", held.parameters), ("b", held.gradients), ("c", held.optimizer)):
            drawing.box(x, y, count * scale, 32, kind, giga(count) if count * scale > 50 else "")
            x += count * scale
        drawing.text(x + 8, y + 21, giga(held.total))
    drawing.legend(
        262, [("a", "parameters"), ("b", "gradients, in the step"), ("c", "masters and moments, fp32")]
    )
    return drawing


OFFLOADS = {
    "nothing": {},
    'optimizer="host"': {"optimizer": "host"},
    'optimizer="host", step="device"': {"optimizer": "host", "step": "device"},
    'optimizer="host", params="host"': {"optimizer": "host", "params": "host"},
    'optimizer="disk"': {"optimizer": "disk", "path": "."},
}


def offload() -> Drawing:
    drawing = Drawing(
        "What offload moves per rank in a step: 1 G parameters, AdamW, bf16, 8 ranks",
        345,
        "For five settings of zero.Offload: bytes to host, back, from and to the disk, and the peak.",
    )
    columns = ("device to host", "host to device", "read from disk", "written to disk", "peak on device")
    left, wide = 250, 100
    for column, name in enumerate(columns):
        drawing.text(left + column * wide, 58, name, "soft small")
    plans = {name: planned(offload=zero.Offload(**settings)) for name, settings in OFFLOADS.items()}  # type: ignore[arg-type]
    rows = {name: (p.traffic, p.memory.peaks) for name, p in plans.items()}
    most = max(peaks["backward"].total for _, peaks in rows.values())
    for row, (name, (moved, peaks)) in enumerate(rows.items()):
        y = 70 + row * 52
        drawing.text(20, y + 22, name)
        peak = max(each.total for each in peaks.values())
        counts = (moved.to_host, moved.to_device, moved.read, moved.written, peak)
        for column, count in enumerate(counts):
            x = left + column * wide
            kind = ("b", "b", "d", "d", "a")[column]
            drawing.box(x, y + 22, max(count / most * (wide - 22), 1), 12, kind if count else "e")
            drawing.text(x, y + 16, giga(count) if count else "0", "ink small")
    return drawing


LAYERS, GATHER, COMPUTE, REDUCE = 4, 1.5, 2.0, 1.0
Box = tuple[str, float, float, str]
"""Lane, begin, end, and what is done to which layer: g gathered, f forward, b backward, r reduced."""


def timeline(ahead: int) -> tuple[list[Box], float]:
    """What link and device do in a forward and a backward, and when that ends.

    A unit's gather begins when the link is free and the unit `ahead` of it begins to compute, and with 0
    ahead when it is itself due. The last unit stays gathered from its forward to its backward. A reduce
    begins after the unit's backward, on the same link.
    """
    passes = [("f", layer) for layer in range(LAYERS)] + [("b", layer) for layer in reversed(range(LAYERS))]
    gathers = [layer for index, (_, layer) in enumerate(passes) if index != LAYERS]
    boxes: list[Box] = []
    link = device = 0.0
    gathered: list[float] = []

    def gather(earliest: float) -> None:
        nonlocal link
        begin, link = max(link, earliest), max(link, earliest) + GATHER
        boxes.append(("link", begin, link, f"g{gathers[len(gathered)]}"))
        gathered.append(link)

    for index, (phase, layer) in enumerate(passes):
        needed = index if index < LAYERS else index - 1
        if needed == len(gathered):
            gather(device)
        begin = max(device, gathered[needed])
        while len(gathered) < min(len(gathers), needed + 1 + ahead):
            gather(begin)
        device = begin + COMPUTE * (1.5 if phase == "b" else 1)
        boxes.append(("device", begin, device, f"{phase}{layer}"))
        if phase == "b":
            begin, link = max(link, device), max(link, device) + REDUCE
            boxes.append(("link", begin, link, f"r{layer}"))
    return boxes, max(link, device)


def prefetch() -> Drawing:
    drawing = Drawing(
        "A step of four units, with and without prefetch",
        250,
        "Two timelines of link and device; with prefetch, gathers run beside the computation before them.",
    )
    ends = {ahead: timeline(ahead) for ahead in (0, 1)}
    scale = (WIDTH - 130) / max(end for _, end in ends.values())
    for row, (ahead, (boxes, end)) in enumerate(ends.items()):
        y = 50 + row * 88
        drawing.text(20, y + 12, f"prefetch={ahead}")
        drawing.text(20, y + 31, "link", "soft small")
        drawing.text(20, y + 59, "device", "soft small")
        for lane, begin, finish, label in boxes:
            kind = {"g": "b", "r": "d", "f": "a", "b": "c"}[label[0]]
            top = y + (16 if lane == "link" else 44)
            drawing.box(100 + begin * scale, top, (finish - begin) * scale - 1, 22, kind, label[1])
        drawing.line(100 + end * scale, y + 8, 100 + end * scale, y + 72)
    drawing.legend(
        232, [("b", "gather"), ("a", "forward"), ("c", "backward"), ("d", "reduce-scatter of gradients")]
    )
    return drawing


def unit_life() -> Drawing:
    drawing = Drawing(
        "The life of a unit in a step (stage 3)",
        260,
        "Boxes: shard, whole, shard, whole, shard, new shard, with what moves between them.",
    )
    states = (
        ("shard", "2/N", "between uses"),
        ("whole", "2", "forward"),
        ("shard", "2/N", "others compute"),
        ("whole", "2", "backward"),
        ("slice of gradients", "2/N", "until the step"),
        ("new shard", "2/N", "after the step"),
    )
    moves = ("all-gather", "release", "all-gather", "reduce-scatter", "optimizer's kernel")
    wide, gap = 96, 26
    for index, (name, size, when) in enumerate(states):
        x = 20 + index * (wide + gap)
        whole = name == "whole"
        top, height = (70, 96) if whole else (106, 24)
        kind = "b" if whole else ("d" if "gradients" in name else "a")
        drawing.box(x, top, wide, height, kind, name if " of " not in name else "gradient slice")
        drawing.text(x + wide / 2, 188, when, "ink small", "middle")
        drawing.text(x + wide / 2, 206, f"{size} bytes", "soft small", "middle")
        if index < len(moves):
            drawing.arrow(x + wide + 2, 118, x + wide + gap - 2, 118)
            drawing.text(x + wide + gap / 2, 56, moves[index], "soft small", "middle")
            drawing.line(x + wide + gap / 2, 60, x + wide + gap / 2, 112)
    drawing.text(
        20,
        240,
        "Bytes per parameter on each of N ranks, in bf16. Masters and moments, 12/N, stay as they are.",
        "soft",
    )
    return drawing


def ranks() -> Drawing:
    drawing = Drawing(
        "Eight ranks: one copy, two copies, a mesh",
        330,
        "Three grids of eight ranks: sharded over all; shard_ranks=4; a mesh of tensor and data ranks.",
    )
    cases = (
        (
            "Config()",
            "one copy of the model: each rank",
            "has an eighth",
            lambda rank: "a",
            lambda rank: f"{rank}/8",
        ),
        (
            "Config(shard_ranks=4)",
            "two copies: gathers stay in a row,",
            "slices are summed down a column",
            lambda rank: "ab"[rank // 4],
            lambda rank: f"{rank % 4}/4",
        ),
        (
            'mesh=(tp 2, dp 4), data_dims="dp"',
            "two halves of each layer (rows);",
            "each is sharded along its row",
            lambda rank: "cd"[rank // 4],
            lambda rank: f"{'AB'[rank // 4]} {rank % 4}/4",
        ),
    )
    for column, (name, first, second, kind, label) in enumerate(cases):
        left = 20 + column * 246
        drawing.text(left, 62, name)
        for rank in range(8):
            x, y = left + rank % 4 * 56, 78 + rank // 4 * 84
            drawing.box(x, y, 50, 44, kind(rank), label(rank))
            drawing.text(x + 25, y + 60, f"rank {rank}", "soft small", "middle")
        drawing.text(left, 262, first, "soft small")
        drawing.text(left, 280, second, "soft small")
    drawing.text(20, 312, "In a box: the part of the model's state that the rank keeps.", "soft")
    return drawing


def rooms() -> Drawing:
    """Each room stands above the rooms that it imports, as low as it can."""
    known = lint_rooms.modules("zero")
    graph = {name: lint_rooms.imported(path, known) for name, path in known.items()}
    below = lint_rooms.rooms_below(graph)
    trained = lint_rooms.rooms_below({n: g for n, g in graph.items() if n not in lint_rooms.ON_SAVING})
    used, left = {"integrations"}, ["integrations"]
    while left:
        left += (found := trained[left.pop()] - used)
        used |= found
    floors: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        floors[room] = 1 + max((floors[other] for other in below[room]), default=-1)
    height = 1 + max(floors.values())
    drawing = Drawing(
        "The rooms of zero: each uses rooms below it",
        height * 46 + 88,
        "Rows of boxes, one for each floor, from integrations and cli at the top to errors at the bottom.",
    )
    for floor in range(height):
        row = sorted(
            (room for room in floors if floors[room] == floor and room != "__main__"),
            key=lambda room: (room not in used, room),
        )
        x, y = 20.0, 52 + (height - 1 - floor) * 46
        for room in row:
            width = 7.3 * len(room) + 22
            drawing.box(x, y, width, 32, "a" if room in used else "c", room)
            x += width + 8
    drawing.legend(
        height * 46 + 70, [("a", "imported where a model is trained"), ("c", "tools, and what models import")]
    )
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    "unit-life": unit_life,
    "stages": stages,
    "prefetch": prefetch,
    "offload": offload,
    "ranks": ranks,
    "rooms": rooms,
    **measured_figures.FIGURES,
}


def main() -> int:
    stale = []
    for name, draw in FIGURES.items():
        path, drawn = FOLDER / f"{name}.svg", draw().svg()
        if path.exists() and path.read_text(encoding="utf-8") == drawn:
            continue
        stale.append(name)
        if "--write" in sys.argv:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(drawn, encoding="utf-8")
    if stale and "--write" not in sys.argv:
        print(f"figures that are no longer what is drawn: {', '.join(stale)}; run it with --write")
        return 1
    print("figures: clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
