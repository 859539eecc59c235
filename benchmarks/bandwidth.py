"""How close each flat-buffer kernel comes to a device copy's bandwidth, and what a launch costs the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import accelz
from accelz.accelerator import Accelerator
from benchmarks.job import Job
from benchmarks.result import Result

COPY = "copy"
BLOCK = 256
LAUNCH_ELEMENTS = 1024
LAUNCHES = 200
ADAMW: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class BandwidthOptions:
    """elements: of every buffer; several times the device's cache. repeats: calls in a timed turn."""

    device: str = "cpu"
    elements: int = 1 << 24
    threads: int = 1
    rounds: int = 9
    repeats: int = 3
    limit: float = 120.0


class Case(NamedTuple):
    """traffic: bytes per element that the call has to read and write."""

    kernel: str
    dtypes: str
    traffic: float
    call: Callable[[], object]


class BandwidthRank:
    """All cases in one process on the device."""

    def __init__(self, device: str, elements: int) -> None:
        self._accelerator = accelz.use(device)
        self._accelerator.bind(0)
        self._cases = list(_cases(self._accelerator, elements))
        self._small = list(_cases(self._accelerator, LAUNCH_ELEMENTS))
        for case in (*self._cases, *self._small):
            case.call()  # compiles, allocates
        self._accelerator.streams.synchronize()

    def cases(self) -> list[tuple[str, str, float, str]]:
        """(kernel, dtypes, bytes per element, who implements it)."""
        kernels = self._accelerator.kernels
        return [
            (c.kernel, c.dtypes, c.traffic, "torch" if c.kernel == COPY else kernels.origin(c.kernel))
            for c in self._cases
        ]

    def round(self, repeats: int) -> list[float]:
        """Device seconds per call, by case, taken one after another."""
        return [self._device_seconds(case.call, repeats) for case in self._cases]

    def launches(self) -> list[float]:
        """Host seconds to start a call on few elements, by case."""
        return [self._host_seconds(case.call) for case in self._small]

    def _device_seconds(self, call: Callable[[], object], repeats: int) -> float:
        stream = self._accelerator.streams.current()
        call()
        start = stream.record()
        for _ in range(repeats):
            call()
        return stream.record().seconds_since(start) / repeats

    def _host_seconds(self, call: Callable[[], object]) -> float:
        self._accelerator.streams.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        seconds = (time.perf_counter() - start) / LAUNCHES
        self._accelerator.streams.synchronize()
        return seconds


def run(options: BandwidthOptions) -> Result:
    """Raises JobError where a kernel raises or takes too long."""
    service = (options.device, options.elements)
    with Job(BandwidthRank, service, 1, options.threads, options.limit) as job:
        cases = job.call("cases")[0]
        rounds = [job.call("round", options.repeats)[0] for _ in range(options.rounds)]
        launches = job.call("launches")[0]
    copy = next(i for i, case in enumerate(cases) if case[0] == COPY)
    rates = [[options.elements * c[2] / s for c, s in zip(cases, r, strict=True)] for r in rounds]
    rows = [
        {
            "kernel": kernel,
            "dtypes": dtypes,
            "origin": origin,
            "bytes": round(options.elements * traffic),
            "median": median(r[i] for r in rounds),
            "bytes_per_second": median(r[i] for r in rates),
            "of_copy": median(r[i] / r[copy] for r in rates),
            "launch": launches[i],
        }
        for i, (kernel, dtypes, traffic, origin) in enumerate(cases)
    ]
    return Result("bandwidth", asdict(options), rows)


def _cases(accelerator: Accelerator, elements: int) -> Iterator[Case]:
    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=accelerator.device)

    def random(dtype: torch.dtype) -> Tensor:
        return empty(dtype).normal_(std=1e-2)

    wide, narrow = torch.float32, torch.bfloat16
    yield _copy_case(accelerator, elements)
    yield _adamw_case(accelerator, random(wide), random(narrow), empty(narrow))
    yield _adamw_case(accelerator, random(wide), random(wide), None)
    kernels, factor = accelerator.kernels, torch.full((), 0.5, device=accelerator.device)
    for source in (random(narrow), random(wide)):
        yield Case(
            "norm_and_nonfinite",
            _name(source.dtype),
            source.dtype.itemsize,
            lambda source=source: kernels.norm_and_nonfinite([source]),
        )
    for source, output in ((random(wide), empty(narrow)), (random(narrow), empty(wide))):
        yield Case(
            "scale_cast",
            f"{_name(source.dtype)} → {_name(output.dtype)}",
            6,
            lambda source=source, output=output: kernels.scale_cast(output, source, factor),
        )
    total, addend = random(wide), random(narrow)
    yield Case("accumulate", "bf16 into fp32", 10, lambda: kernels.accumulate(total, addend))
    yield from _quantise_cases(accelerator, random(narrow), empty)


def _copy_case(accelerator: Accelerator, elements: int) -> Case:
    """As many bytes as an AdamW step moves."""
    source = torch.ones(14 * elements, dtype=torch.uint8, device=accelerator.device)
    target = torch.zeros_like(source)
    return Case(COPY, "bytes", 28, lambda: target.copy_(source))


def _adamw_case(accelerator: Accelerator, master: Tensor, grad: Tensor, weights: Tensor | None) -> Case:
    average, square = torch.zeros_like(master), torch.zeros_like(master)
    step = torch.full((), 3.0, device=master.device)
    factor = torch.full((), 0.5, device=master.device)

    def call() -> None:
        accelerator.kernels.adamw(
            master, grad, average, square, step, grad_scale=factor, weights=weights, **ADAMW
        )

    name = f"{_name(grad.dtype)} gradient" + (
        f", {_name(weights.dtype)} weights" if weights is not None else ""
    )
    return Case("adamw", name, 28, call)


def _quantise_cases(
    accelerator: Accelerator, source: Tensor, empty: Callable[[torch.dtype], Tensor]
) -> Iterator[Case]:
    """3 bytes per element and a scale per block."""
    kernels, traffic = accelerator.kernels, 3 + 4 / BLOCK
    scales = torch.empty(-(-source.numel() // BLOCK), device=source.device)
    back = torch.empty_like(source)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        codes = empty(dtype)
        yield Case(
            "quantise",
            f"bf16 → {_name(dtype)}",
            traffic,
            lambda codes=codes: kernels.quantise(codes, scales, source, BLOCK),
        )
        yield Case(
            "dequantise",
            f"{_name(dtype)} → bf16",
            traffic,
            lambda codes=codes: kernels.dequantise(back, codes, scales, BLOCK),
        )


def _name(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
