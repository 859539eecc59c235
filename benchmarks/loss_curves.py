"""`python -m benchmarks.loss_curves`: losses of training in bf16 and with products in float8, for two seeds.

What float8 changes is to be no more than what another seed changes. The tokens follow each other by a chain
in which each has a few successors, so that there is something to learn. Needs torchao.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import Annotated, cast

import torch
import typer

import accelz
from benchmarks.compiled_peers import AutocastPeer, Products
from benchmarks.model import SIZES, Decoder
from benchmarks.peers import Setting
from benchmarks.rows import Rows, one_rank

SUCCESSORS = 4  # of a token; the loss of a perfect model is their logarithm
WINDOW = 10  # steps that are averaged
WAYS = ("bf16", "tensorwise", "rowwise")


class CurveRank:
    """Trains a model on a chain's tokens. seed: of the weights; the tokens are the same for all."""

    def __init__(self, device: str, size: str, batch: int, length: int) -> None:
        self._accelerator = accelz.use(device)
        self._accelerator.bind(int(os.environ["LOCAL_RANK"]))
        self._size, self._batch, self._length = size, batch, length

    def losses(self, way: str, seed: int, steps: int) -> list[float]:
        """The loss of every step."""
        torch.manual_seed(seed)
        model = Decoder(SIZES[self._size], self._length)
        products = None if way == "bf16" else cast(Products, way)
        model.to(self._accelerator.device)
        peer = AutocastPeer(model, Setting("bf16", 1, self._batch, 120.0), None, products=products)
        generator = torch.Generator().manual_seed(0)
        vocabulary = SIZES[self._size].vocabulary
        after = torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=generator)
        found = []
        for _ in range(steps):
            tokens = [torch.randint(vocabulary, (self._batch,), generator=generator)]
            choices = torch.randint(SUCCESSORS, (self._length, self._batch), generator=generator)
            for choice in choices:
                tokens.append(after[tokens[-1], choice])
            text = torch.stack(tokens, dim=1).to(self._accelerator.device)
            found.append(peer.step(text[:, :-1].contiguous(), text[:, 1:].contiguous()))
        return [loss.item() for loss in found]


def apart(first: list[float], second: list[float]) -> float:
    """The largest difference of two curves, averaged over windows of steps."""
    starts = range(0, len(first), WINDOW)
    return max(abs(fmean(first[i : i + WINDOW]) - fmean(second[i : i + WINDOW])) for i in starts)


def main(
    device: Annotated[str, typer.Option()] = "cpu",
    size: Annotated[str, typer.Option()] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 32,
    steps: Annotated[int, typer.Option(min=1)] = 20,
    ways: Annotated[str, typer.Option(help="Comma-separated; bf16 first.")] = ",".join(WAYS),
    limit: Annotated[float, typer.Option(help="Seconds that a run may take.")] = 120.0,
    to: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Tell how far curves are apart: `of_seeds` in bf16, and `of_way` beside bf16 from the same weights."""
    rows = Rows(to, device=device, size=size, batch=batch, length=length, steps=steps)
    curves: dict[tuple[str, int], list[float]] = {}
    first, *others = ways.split(",")
    if first != "bf16":
        raise typer.BadParameter("bf16 has to be the first of the ways: others are compared with it")
    for way in (first, *others):
        if way != first and (first, 1) not in curves:
            break  # there is nothing to compare with
        with rows.attempt(way=way), one_rank(CurveRank, device, size, batch, length, limit=limit) as job:
            for seed in (0, 1):
                (curves[way, seed],) = job.call("losses", way, seed, steps)
            of_way = max(apart(curves[way, seed], curves["bf16", seed]) for seed in (0, 1))
            of_seeds = apart(curves["bf16", 0], curves["bf16", 1])
            last = [fmean(curves[way, seed][-WINDOW:]) for seed in (0, 1)]
            rows.add(
                way=way,
                of_way=of_way,
                of_seeds=of_seeds,
                last=max(last),
                losses=[curves[way, s] for s in (0, 1)],
            )


if __name__ == "__main__":
    typer.run(main)
