"""`python -m benchmarks.lengths`: memory over steps whose sequences change in length.

An allocator that keeps freed blocks for later ones of the same size grows when sizes change: `reserved` is
the most that it has taken from the device, `peak` the most that was in use. All peers train on the same
lengths.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.peers import Setting, ZeroPeer
from benchmarks.rows import Rows, one_rank
from benchmarks.step_rank import StepRank

SHORTEST = 8  # times shorter than the longest
GRAIN = 8  # lengths are multiples of this many tokens


class LengthsRank(StepRank):
    """One peer."""

    def vary(self, lengths: list[int]) -> dict[str, Any]:
        """Train a step of every length, from an empty cache. In bytes; None where the device counts none."""
        memory = self._accelerator.memory
        memory.trim()
        memory.reset_peak()
        for length in lengths:
            self._step(length)
        self._accelerator.streams.synchronize()
        exact = self._accelerator.capabilities.exact_memory
        reserved = getattr(torch.get_device_module(self._accelerator.device), "max_memory_reserved", None)
        return {
            "peak": memory.stats().peak if exact else None,
            "reserved": reserved() if reserved is not None else None,
        }

    def attributed(self) -> dict[str, dict[str, int]]:
        """What each phase's peak in a step at full length was for, in bytes; empty for other peers."""
        if not isinstance(self._peer, ZeroPeer):
            return {}
        self._peer.engine.trace_memory()
        self._step()
        return {phase: asdict(peak.use) for phase, peak in self._peer.engine.memory_report().peaks().items()}


def main(
    device: Annotated[str, typer.Option()] = "sim",
    size: Annotated[str, typer.Option()] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 2,
    length: Annotated[int, typer.Option(min=SHORTEST * GRAIN, help="Tokens of the longest.")] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 200,
    peers: Annotated[str, typer.Option(help="Comma-separated.")] = "zero3,fsdp2,plain",
    limit: Annotated[float, typer.Option(help="Seconds that a peer may take.")] = 150.0,
    to: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Train each peer in a process of its own."""
    rows = Rows(to, device=device, size=size, batch=batch, length=length, steps=steps)
    draw = random.Random(0)
    lengths = [GRAIN * draw.randint(length // SHORTEST // GRAIN, length // GRAIN) for _ in range(steps)]
    setting = Setting("bf16", 1, batch, limit)
    for name in peers.split(","):
        with (
            rows.attempt(peer=name),
            one_rank(LengthsRank, device, name, size, length, setting, limit=limit) as job,
        ):
            job.call("build")
            (found,) = job.call("vary", [length, *lengths])
            rows.add(peer=name, **found)
            (phases,) = job.call("attributed")
            if phases:
                rows.add(peer=f"{name}, by use", phases=phases)


if __name__ == "__main__":
    typer.run(main)
