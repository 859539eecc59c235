"""One AdamW step on a flat shard: the backend's kernel against torch's fused AdamW and a memory copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import accelz
from accelz.updates import AdamWUpdate
from benchmarks.job import Job
from benchmarks.result import Result, ratio, spread

ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}
BETAS = (0.9, 0.95)
REFERENCES = {"accelz bf16": "torch cast + fused + cast", "accelz fp32": "torch fused fp32"}
"""For each kernel case, the torch case that computes the same."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of the benchmark.

    elements: of the shard. repeats: steps in a timed turn. limit: seconds that one call may take.
    """

    elements: int = 1 << 24
    threads: int = 1
    rounds: int = 9
    repeats: int = 3
    limit: float = 120.0


@dataclass(frozen=True)
class Case:
    """One thing that is timed.

    step: does it once. traffic: bytes per element that it has to read and write. master: the values that it
    updates, if any.
    """

    step: Callable[[], object]
    traffic: int
    master: Tensor | None = None


class KernelRank:
    """All cases in one process, each with its own buffers that hold the same values."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        wide, narrow = torch.float32, torch.bfloat16
        self._cases = {
            "accelz bf16": _accelz_case(elements, narrow),
            "accelz fp32": _accelz_case(elements, wide),
            "torch cast + fused + cast": _torch_case(elements, narrow),
            "torch fused fp32": _torch_case(elements, wide),
            "memory copy": _copy_case(elements),
        }

    def traffic(self) -> dict[str, int]:
        """Bytes that one step moves, by case."""
        return {name: case.traffic * self._elements for name, case in self._cases.items()}

    def first(self) -> dict[str, float]:
        """Do the first step; returns each kernel's largest difference from torch, in learning rates."""
        for case in self._cases.values():
            case.step()
        return {name: self._difference(name, other) for name, other in REFERENCES.items()}

    def round(self, repeats: int) -> dict[str, float]:
        """Seconds per step, by case, taken one after another."""
        return {name: _time(case.step, repeats) for name, case in self._cases.items()}

    def origin(self) -> str:
        """Who implements the backend's kernel."""
        return accelz.current().kernels.origin("adamw")

    def _difference(self, name: str, other: str) -> float:
        mine, theirs = self._cases[name].master, self._cases[other].master
        assert mine is not None
        assert theirs is not None
        return float((mine - theirs).abs().max()) / float(ADAMW["lr"])


def run(options: OptimizerOptions) -> Result:
    with Job(KernelRank, (options.elements,), 1, options.threads, options.limit) as job:
        origin, traffic, errors = (job.call(m)[0] for m in ("origin", "traffic", "first"))
        rounds = [job.call("round", options.repeats)[0] for _ in range(options.rounds)]
    rows = [_row(name, size, rounds, errors) for name, size in traffic.items()]
    return Result("optimizer", {**asdict(options), "kernel": origin}, rows)


def _row(name: str, size: int, rounds: list[dict[str, float]], errors: dict[str, float]) -> dict[str, Any]:
    seconds = [r[name] for r in rounds]
    others = {"cast": "torch cast + fused + cast", "fused": "torch fused fp32", "copy": "memory copy"}
    return {
        "case": name,
        **spread(seconds),
        "bytes": size,
        "bytes_per_second": size / median(seconds),
        **{f"to_{key}": ratio(seconds, [r[other] for r in rounds]) for key, other in others.items()},
        "error": errors.get(name),
        "rounds": seconds,
    }


def _values(elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same master (fp32) and gradient (dtype) for every case."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(elements, generator=generator)
    return master, torch.randn(elements, generator=generator).mul_(1e-2).to(dtype)


def _accelz_case(elements: int, dtype: torch.dtype) -> Case:
    """The backend's kernel. bf16: gradients in, weights out; 14 bytes read, 14 written. fp32: 16 and 12."""
    kernels = accelz.current().kernels
    master, gradient = _values(elements, dtype)
    average, square, count = torch.zeros_like(master), torch.zeros_like(master), torch.zeros(())
    weights = None if dtype is torch.float32 else torch.zeros_like(gradient)

    update = AdamWUpdate(
        master=master, grad=gradient, exp_avg=average, exp_avg_sq=square, step=count, weights=weights,
        beta1=BETAS[0], beta2=BETAS[1], **ADAMW,
    )  # fmt: skip

    def step() -> None:
        count.add_(1)
        kernels.step(update)

    return Case(step, 28, master)


def _torch_case(elements: int, dtype: torch.dtype) -> Case:
    """torch's fused AdamW. At bf16 two casts move 6 bytes each, on top of the 28 of the fp32 step."""
    values, gradient = _values(elements, dtype)
    master = nn.Parameter(values)
    optimizer = torch.optim.AdamW([master], betas=BETAS, fused=True, **ADAMW)
    if dtype is torch.float32:
        master.grad = gradient
        return Case(optimizer.step, 28, master.detach())
    weights = torch.zeros_like(gradient)
    wide = master.grad = torch.zeros_like(values)

    def step() -> None:
        wide.copy_(gradient)
        optimizer.step()
        weights.copy_(master.detach())

    return Case(step, 40, master.detach())


def _copy_case(elements: int) -> Case:
    source, target = (
        torch.ones(14 * elements, dtype=torch.uint8),
        torch.zeros(14 * elements, dtype=torch.uint8),
    )
    return Case(lambda: target.copy_(source), 28)


def _time(step: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats
