"""`python -m benchmarks.compile_time`: the time of a compiled model's first steps, from empty caches."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # of the ranks, which inherit it

import torch
import typer

import accelz
import zero
from benchmarks import model, peers
from benchmarks.compiled_peers import AutocastPeer, AutocastTorchPeer
from benchmarks.machine import generates_code
from benchmarks.rows import Rows, one_rank

FIRST, AFTER = 4, 3  # steps in which code is generated, and steps that show what one takes without
WAYS = ("plain", "zero3", "fsdp2")


class CompileRank:
    """One way to train fp32 parameters under bf16 autocast. inner: torch.compile's backend."""

    def __init__(self, device: str, way: str, inner: str, size: str, length: int, batch: int) -> None:
        accelerator = accelz.use(device)
        accelerator.bind(int(os.environ["LOCAL_RANK"]))
        if not generates_code(accelerator.device.type):
            inner = "aot_eager"
        setting = peers.Setting("fp32", 1, batch, 120.0)
        with accelerator.device:
            network = model.build(size, length)
        self._accelerator = accelerator
        ((x, y),) = model.make_batches(size, batch, length, 0, 1)
        self._batch = x.to(accelerator.device), y.to(accelerator.device)
        self._peer: peers.Peer
        if way == "zero3":
            self._peer = AutocastPeer(network, setting, zero.Compile.model_validate({"inner": inner}))
            return
        build = peers.build_plain if way == "plain" else peers.build_fsdp2
        self._peer = AutocastTorchPeer(build(network, setting))
        network.compile(backend=inner)

    def steps(self) -> list[float]:
        """Seconds of every step."""
        seconds = []
        for _ in range(FIRST + AFTER):
            started = time.perf_counter()
            self._peer.step(*self._batch)
            self._accelerator.streams.synchronize()
            seconds.append(time.perf_counter() - started)
        return seconds


def main(
    device: Annotated[str, typer.Option()] = "sim",
    size: Annotated[str, typer.Option()] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 32,
    inner: Annotated[str, typer.Option(help="torch.compile's backend: inductor or aot_eager.")] = "inductor",
    ways: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(WAYS),
    limit: Annotated[float, typer.Option(help="Seconds that a way may take.")] = 150.0,
    to: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time each way in a process of its own. compiling: what its first steps took more than later ones."""
    rows = Rows(
        to, device=device, size=size, batch=batch, length=length, inner=inner, torch=torch.__version__
    )
    chosen = ways.split(",")
    if unknown := set(chosen) - set(WAYS):
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; the ways are {', '.join(WAYS)}")
    for way in chosen:
        arguments = (device, way, inner, size, length, batch)
        with rows.attempt(way=way), one_rank(CompileRank, *arguments, limit=limit) as job:
            (seconds,) = job.call("steps")
            after = min(seconds[FIRST:])
            rows.add(way=way, compiling=sum(seconds[:FIRST]) - FIRST * after, step=after, seconds=seconds)


if __name__ == "__main__":
    typer.run(main)
