"""`python -m benchmarks.replayed`: compiled graphs, called or replayed: bits, and the time that they take."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, cast

import torch
import typer
from torch import Tensor

import accelz
import zero
from benchmarks.model import SIZES, Decoder
from benchmarks.rows import Rows

WARM_UP = 10
"""Steps after which all segments are captured."""


class Run:
    """One way of training. host: seconds until forward and backward were queued. whole: until they were
    done."""

    def __init__(self, graphs: bool, inner: str, size: str, length: int) -> None:
        torch.manual_seed(0)
        model = Decoder(SIZES[size], length)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        compile = zero.Compile(inner=cast(Literal["inductor", "aot_eager"], inner), graphs=graphs)
        self.engine = zero.initialize(
            model, optimizer, zero.Config(precision="bf16", clip_norm=1.0, compile=compile)
        )
        self.host: list[float] = []
        self.whole: list[float] = []
        self.losses: list[Tensor] = []

    def step(self, number: int, tokens: Tensor) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = 1e-4 / (1 + number)
        streams = accelz.current().streams
        tokens = tokens.to(accelz.current().device)
        streams.synchronize()
        started = time.perf_counter()
        loss = self.engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.engine.backward(loss)
        self.host.append(time.perf_counter() - started)
        streams.synchronize()
        self.whole.append(time.perf_counter() - started)
        self.engine.step()
        self.losses.append(loss.detach())

    def seconds(self) -> tuple[float, float]:
        return median(self.host[WARM_UP:]), median(self.whole[WARM_UP:])


def main(
    device: Annotated[str, typer.Option()] = "sim",
    inner: Annotated[str, typer.Option(help="aot_eager or inductor")] = "aot_eager",
    size: Annotated[str, typer.Option()] = "tiny",
    length: Annotated[int, typer.Option(min=1)] = 32,
    steps: Annotated[int, typer.Option(min=WARM_UP + 1)] = 30,
    to: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Train both ways in turn, and compare bits and times. Inductor fuses other operations where it compiles
    segments by themselves, so that its losses are near and not the same."""
    accelz.use(device)
    if inner == "aot_eager":  # its bits are compared
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False
    generator = torch.Generator().manual_seed(0)
    called, replayed = (Run(graphs, inner, size, length) for graphs in (False, True))
    for number in range(steps):
        tokens = torch.randint(SIZES[size].vocabulary, (1, length + 1), generator=generator)
        for run in (called, replayed):
            run.step(number, tokens)
    pairs = list(zip(called.losses, replayed.losses, strict=True))
    count = replayed.engine.explain().replays
    assert count is not None
    host, whole = zip(called.seconds(), replayed.seconds(), strict=True)
    Rows(to, device=device, size=size, length=length, steps=steps).add(
        inner=inner,
        called=whole[0],
        replayed=whole[1],
        host_called=host[0],
        host_replayed=host[1],
        segments=count.segments,
        captured=count.captured,
        replays=count.replayed,
        failed=count.failed,
        kept_bytes=count.nbytes,
        furthest=max(((one - other).abs() / one.abs()).item() for one, other in pairs),
    )


if __name__ == "__main__":
    typer.run(main)
