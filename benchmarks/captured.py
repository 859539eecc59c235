"""`python -m benchmarks.captured`: the host's time for the optimizer's part of a step, called or replayed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import accelz
import zero
from benchmarks.model import SIZES, Decoder

WARM_UP = 5


class Run:
    """One way of training, whose part of the optimizer is timed on the host."""

    def __init__(self, capture: bool, size: str, length: int) -> None:
        torch.manual_seed(0)
        model = Decoder(SIZES[size], length)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-4)
        config = zero.Config(precision="bf16", clip_norm=1.0, capture_step=capture)
        self.engine = zero.initialize(model, optimizer, config)
        self.sharded = self.engine._boundary.optimizer
        self.seconds: list[float] = []
        self._call = self.sharded._kernel_step
        self.sharded._kernel_step = self._timed  # type: ignore[method-assign]

    def _timed(self, *arguments: Any) -> None:
        accelz.current().streams.synchronize()
        started = time.perf_counter()
        self._call(*arguments)
        self.seconds.append(time.perf_counter() - started)

    def step(self, number: int, tokens: Tensor) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = 1e-4 / (1 + number)
        tokens = tokens.to(accelz.current().device)
        self.engine.backward(self.engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        self.engine.step()

    @property
    def masters(self) -> list[Tensor]:
        return [stepped.master.cpu() for stepped in self.sharded.subs]


def main(
    device: Annotated[str, typer.Option()] = "sim",
    size: Annotated[str, typer.Option()] = "tiny",
    length: Annotated[int, typer.Option()] = 32,
    steps: Annotated[int, typer.Option()] = 30,
    to: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Train both ways in turn, and compare bits and times."""
    accelz.use(device)
    generator = torch.Generator().manual_seed(0)
    runs = {capture: Run(capture, size, length) for capture in (False, True)}
    for number in range(steps):
        tokens = torch.randint(SIZES[size].vocabulary, (1, length + 1), generator=generator)
        for run in runs.values():
            run.step(number, tokens)
    called, replayed = runs[False], runs[True]
    assert replayed.sharded.captured is not None
    result = {
        "device": device,
        "sub_groups": len(called.sharded.subs),
        "called": median(called.seconds[WARM_UP:]),
        "replayed": median(replayed.seconds[WARM_UP:]),
        "replays": replayed.sharded.captured.replays,
        "same_bits": all(map(torch.equal, called.masters, replayed.masters)),
    }
    print(json.dumps(result, indent=1))
    if to is not None:
        to.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
