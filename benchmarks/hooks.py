"""`python -m benchmarks.hooks`: the host's time for the engine's work in a step, per unit.

A model of many small blocks is trained at stage 3 and as it is, in turns, by one process: a device that works
asynchronously has done long before the host, so what a step takes more of the host's time is the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from torch import Tensor

import accelz
import zero
from benchmarks.model import Decoder, Shape
from benchmarks.peers import ADAMW
from benchmarks.rows import Rows

WARM_UP = 5
LENGTH = 16


class Plain:
    """The model's own forward and backward."""

    def __init__(self, model: Decoder) -> None:
        self._model = model.bfloat16()

    def backward(self, tokens: Tensor) -> None:
        self._model(tokens, tokens).backward()

    def step(self) -> None:
        self._model.zero_grad()


class Sharded:
    """The same under the engine, whose kernels step the optimizer."""

    def __init__(self, model: Decoder) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        self._engine = zero.initialize(model, optimizer, zero.Config(precision="bf16"))

    def backward(self, tokens: Tensor) -> None:
        self._engine.backward(self._engine(tokens, tokens))

    def step(self) -> None:
        self._engine.step()


def timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main(
    device: Annotated[str, typer.Option()] = "sim",
    layers: Annotated[int, typer.Option(min=1, help="Blocks, each of which is a unit.")] = 48,
    steps: Annotated[int, typer.Option(min=1)] = 40,
    to: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Tell seconds of the host: for forward and backward, and for the step, in which the plain model only
    drops gradients."""
    torch.set_num_threads(1)
    accelerator = accelz.use(device)
    accelerator.bind(0)
    rows = Rows(to, device=device, layers=layers, steps=steps)
    shape = Shape(layers, width=64, heads=2, hidden=176, vocabulary=256)
    made = Decoder(shape, LENGTH).state_dict()
    ways: dict[str, Plain | Sharded] = {}
    for name, way in {"zero3": Sharded, "plain": Plain}.items():
        model = Decoder(shape, LENGTH)
        model.load_state_dict(made)
        ways[name] = way(model.to(accelerator.device))
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64, device=accelerator.device)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(WARM_UP + steps):
        for name, each in ways.items():
            accelerator.streams.synchronize()
            seconds[name].append((timed(lambda: each.backward(tokens)), timed(each.step)))  # noqa: B023 (now)
    for name, taken in seconds.items():
        passes, stepped = (median(part) for part in zip(*taken[WARM_UP:], strict=True))
        rows.add(peer=name, passes=passes, step=stepped)
    zero3, plain = rows.rows
    more = {part: (zero3[part] - plain[part]) / (layers + 1) for part in ("passes", "step")}
    rows.add(peer="zero3 - plain, per unit", **more)


if __name__ == "__main__":
    typer.run(main)
