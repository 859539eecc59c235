"""`python -m benchmarks.moments`: moments in fewer bits, and split masters: losses, step and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import mean, median, stdev

import torch
from torch import Tensor

import accelz
import zero
from accelz.dynamic_map import BLOCK
from accelz.updates import AdamWUpdate, split_master
from benchmarks.model import SIZES, Decoder
from benchmarks.result import ratio
from zero.config.training import Masters, Moments

Way = tuple[Masters, Moments]
WAYS: tuple[Way, ...] = (
    ("fp32", "fp32"),
    ("fp32", "bf16"),
    ("fp32", "bf16_stochastic"),
    ("fp32", "8bit"),
    ("split", "fp32"),
    ("split", "bf16"),
    ("split", "bf16_stochastic"),
    ("split", "8bit"),
)
DTYPES = {"fp32": torch.float32, "8bit": torch.uint8}  # others: bf16
SEEDS = (0, 1, 2)
STEPS, LAST = 300, 50
LENGTH, BATCH = 32, 8
ELEMENTS, ROUNDS, REPEATS = 1 << 23, 9, 3


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens that follow from the one before in three of four places, so that there is something to learn."""
    high, generator = SIZES["tiny"].vocabulary, torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(high, (BATCH, LENGTH + 1), generator=generator)
        for place in range(1, LENGTH + 1):
            follows = torch.rand(BATCH, generator=generator) < 0.75
            tokens[:, place] = torch.where(follows, (5 * tokens[:, place - 1] + 7) % high, tokens[:, place])
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def engine_of(size: str, way: Way, seed: int) -> zero.Engine:
    masters, moments = way
    torch.manual_seed(seed)
    model = Decoder(SIZES[size], LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.999))
    return zero.initialize(model, optimizer, zero.Config(precision="bf16", masters=masters, moments=moments))


def losses_of(way: Way, seed: int) -> list[float]:
    engine, data, losses = engine_of("tiny", way, seed), batches(seed), []
    for _ in range(STEPS):
        loss = engine(*next(data))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def report_losses() -> None:
    """The mean loss of the last steps, by seed, which decides both the initial values and the data."""
    found = {way: [mean(losses_of(way, seed)[-LAST:]) for seed in SEEDS] for way in WAYS}
    noise = stdev(found[WAYS[0]])
    print(f"\n{STEPS} steps, mean loss of the last {LAST}, seeds {SEEDS}; between seeds: {noise:.4f}")
    for way, ends in found.items():
        apart = mean(abs(a - b) for a, b in zip(ends, found[WAYS[0]], strict=True))
        print(f"| {' | '.join(way)} | {' | '.join(f'{end:.4f}' for end in ends)} | {apart:.4f} |")


def update_of(way: Way) -> AdamWUpdate:
    masters, moments = way
    dtype = DTYPES.get(moments, torch.bfloat16)
    blocks = ELEMENTS // BLOCK if moments == "8bit" else 0
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(ELEMENTS, generator=generator)
    weights, rest = split_master(master)
    return AdamWUpdate(
        master=rest if masters == "split" else master,
        grad=torch.randn(ELEMENTS, generator=generator).bfloat16(),
        exp_avg=torch.zeros(ELEMENTS, dtype=dtype),
        exp_avg_sq=torch.zeros(ELEMENTS, dtype=dtype),
        weights=weights,
        step=torch.tensor(3.0),
        lr=1e-3,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        stochastic=moments == "bf16_stochastic",
        scales=(torch.zeros(blocks), torch.zeros(blocks)) if blocks else (),
    )


def report_steps() -> None:
    """The kernel's step in interleaved rounds, with bf16 gradients and weights."""
    kernels = accelz.current().kernels
    updates = {way: update_of(way) for way in WAYS}
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    for turn in range(ROUNDS + 1):
        for way, update in updates.items():
            begin = time.perf_counter()
            for _ in range(REPEATS):
                kernels.step(update)
            if turn:  # the first round is warm-up
                seconds[way].append((time.perf_counter() - begin) / REPEATS)
    print(f"\n{ELEMENTS:,} elements, {torch.get_num_threads()} threads, {ROUNDS} rounds of {REPEATS} steps")
    for way, update in updates.items():
        kept = (update.master, *update.moments, *update.scales)
        state = sum(values.nbytes for values in kept)
        times = f"{1e3 * median(seconds[way]):.2f} ms | {ratio(seconds[way], seconds[WAYS[0]]):.3f}"
        print(f"| {' | '.join(way)} | {times} | {state / ELEMENTS:.2f} bytes |")


def main() -> None:
    accelz.use("cpu")
    report_steps()
    report_losses()


if __name__ == "__main__":
    main()
