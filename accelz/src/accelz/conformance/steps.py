"""Steps of optimizers in float64, as in their papers, and the cases in which kernels are held to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from accelz.dynamic_map import BLOCK
from accelz.updates import UPDATES, Update, joined_master, split_master

SIZES = (0, 1, 3, 17, 1023, 70_001)
OFFSETS = (0, 1, 3)
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
NAN, INFINITY = float("nan"), float("inf")

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Paper:
    """An optimizer. step: (settings, number of the step, weights, gradient, *moments) gives new weights and
    moments; the gradient is scaled and signed. settings: the usual ones. variants: others that are tried, by
    name. moments: out of rows of random numbers. atol: what fp32 may be wrong by."""

    step: Callable[..., tuple[Tensor, ...]]
    settings: Settings
    variants: Mapping[str, Settings]
    moments: Callable[..., tuple[Tensor, ...]] = lambda *rows: rows
    atol: float = 1e-6


def _adamw(
    s: Settings, number: int, w: Tensor, g: Tensor, m: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g = g if s["decoupled"] else g + s["weight_decay"] * w
    w = w * (1 - s["lr"] * s["weight_decay"]) if s["decoupled"] else w
    m = s["beta1"] * m + (1 - s["beta1"]) * g
    v = s["beta2"] * v + (1 - s["beta2"]) * g * g
    m_hat, v_hat = m / (1 - s["beta1"] ** number), v / (1 - s["beta2"] ** number)
    return w - s["lr"] * m_hat / (v_hat.sqrt() + s["eps"]), m, v


def _sgd(s: Settings, number: int, w: Tensor, g: Tensor) -> tuple[Tensor]:
    return (w - s["lr"] * (g + s["weight_decay"] * w),)


def _momentum(s: Settings, number: int, w: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    g = g + s["weight_decay"] * w
    m = s["momentum"] * m + g
    return w - s["lr"] * (g + s["momentum"] * m if s["nesterov"] else m), m


def _lion(s: Settings, number: int, w: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    direction = (s["beta1"] * m + (1 - s["beta1"]) * g).sign()
    return w - s["lr"] * (direction + s["weight_decay"] * w), s["beta2"] * m + (1 - s["beta2"]) * g


def _far_from_zero(row: Tensor) -> tuple[Tensor]:
    """No direction is close to zero, where rounding decides its sign."""
    return (row + 4 * row.sign(),)


ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
PAPERS = {
    "adamw": Paper(
        _adamw,
        ADAMW,
        {
            "L2": {"decoupled": False},
            "L2, no weight decay": {"decoupled": False, "weight_decay": 0.0},
            "L2, maximize": {"decoupled": False, "maximize": True},
            "beta1 0": {"beta1": 0.0},
            "other betas": {"beta1": 0.6, "beta2": 0.8},
            "eps 0.01": {"eps": 1e-2},
            "lr 0.5": {"lr": 0.5, "weight_decay": 0.01},
        },
        lambda m, v: (0.1 * m, 0.01 * v.square()),
        1e-7,
    ),
    "sgd": Paper(
        _sgd, {"lr": 1e-2, "weight_decay": 0.1}, {"other settings": {"lr": 0.5, "weight_decay": 0.01}}
    ),
    "momentum": Paper(
        _momentum,
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": False},
        {
            "nesterov": {"nesterov": True},
            "other settings": {"momentum": 0.5, "weight_decay": 0.01, "lr": 0.5},
        },
        _far_from_zero,
    ),
    "lion": Paper(
        _lion,
        {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
        {"other settings": {"beta1": 0.6, "beta2": 0.8, "weight_decay": 0.01, "lr": 0.5}},
        _far_from_zero,
    ),
}
"""By the kernel's name."""


@dataclass(frozen=True)
class StepCase:
    """One step of an optimizer: its settings where they are not the usual ones, and its inputs."""

    kernel: str
    numel: int = 1023
    offset: int = 0
    grad_dtype: torch.dtype = torch.float32
    settings: Settings = field(default_factory=dict)
    number: int = 3
    grad_scale: float | None = None
    skip: float | None = None
    weights_dtype: torch.dtype | None = None
    moments_dtype: torch.dtype = torch.float32
    split: bool = False
    special: float | None = None

    @property
    def paper(self) -> Paper:
        return PAPERS[self.kernel]

    @property
    def atol(self) -> float:
        """An update has the size of lr, and fp32's rounding of that."""
        return max(self.paper.atol, 1e-6 * float(self.settings.get("lr", self.paper.settings["lr"])))

    @property
    def coded(self) -> bool:
        """Whether moments are in 8 bits."""
        return self.moments_dtype is torch.uint8

    def inputs(self) -> dict[str, Tensor]:
        """Host tensors: master (or remainders), grad, the moments, and in 8 bits then the scales of each."""
        names = UPDATES[self.kernel].moment_names
        generator = torch.Generator().manual_seed(self.numel + self.offset)
        master, gradient, *rows = torch.randn(2 + len(names), self.numel, generator=generator)
        grad = gradient.to(self.grad_dtype)
        if self.special is not None and self.numel:
            grad[self.numel // 2] = self.special
        wide, scales = self.paper.moments(*rows), {}
        if self.coded:
            coded = [
                each.encode(moment) for each, moment in zip(UPDATES[self.kernel].maps(), wide, strict=True)
            ]
            wide = tuple(codes for codes, _ in coded)
            scales = {scales_of(name): each for name, (_, each) in zip(names, coded, strict=True)}
        moments = (moment.to(self.moments_dtype) for moment in wide)
        master = split_master(master)[1] if self.split else master
        return {"master": master, "grad": grad, **dict(zip(names, moments, strict=True)), **scales}

    def weights(self) -> Tensor | None:
        """What the 16-bit weights are before the step; None where there are none."""
        if self.split:
            return split_master(replace(self, split=False).inputs()["master"])[0]
        if self.weights_dtype is None:
            return None
        before = self.inputs()["master"] if self.skip else torch.zeros(self.numel)
        return before.to(self.weights_dtype)

    def values(self, state: Mapping[str, Tensor], weights: Tensor | None = None) -> dict[str, Tensor]:
        """What master and moments stand for. state: by the names of `inputs`. weights: beside remainders."""
        names = UPDATES[self.kernel].moment_names
        found = {name: state[name] for name in ("master", *names)}
        if self.split:
            assert weights is not None
            found["master"] = joined_master(weights, state["master"])
        if self.coded:
            for name, each in zip(names, UPDATES[self.kernel].maps(), strict=True):
                found[name] = each.decode(state[name], state[scales_of(name)])
        return found

    def half_steps(self, name: str, want: Tensor) -> Tensor:
        """The most by which a moment in 8 bits may differ from what its new value is in float64."""
        kind = UPDATES[self.kernel]
        each = dict(zip(kind.moment_names, kind.maps(), strict=True))[name]
        rows = torch.nn.functional.pad(want.abs(), (0, -want.numel() % BLOCK)).view(-1, BLOCK)
        scales = rows.amax(1, keepdim=True)
        return (each.half_steps(rows / scales) * scales).view(-1)[: want.numel()]

    def exact(self) -> dict[str, Tensor]:
        """Master and moments after the same step in float64."""
        inputs = self.inputs()
        w, *moments = (value.double() for value in self.values(inputs, self.weights()).values())
        g = inputs["grad"].double()
        settings = {**self.paper.settings, **self.settings}
        g = (
            g
            * (1.0 if self.grad_scale is None else self.grad_scale)
            * (-1 if settings.get("maximize") else 1)
        )
        after = (w, *moments) if self.skip else self.paper.step(settings, self.number, w, g, *moments)
        return dict(zip(("master", *UPDATES[self.kernel].moment_names), after, strict=True))

    def update(self, master: Tensor, grad: Tensor, *state: Tensor, weights: Tensor | None) -> Update:
        """The kernel's operands, with those of the case that are scalars on the master's device. state: as
        in `inputs`."""
        count = len(UPDATES[self.kernel].moment_names)
        moments, of_blocks = state[:count], state[count:]
        scale, skip = (None if x is None else _scalar(x, master) for x in (self.grad_scale, self.skip))
        operands: dict[str, Any] = {
            "number": _scalar(self.number, master),
            "grad_scale": scale,
            "skip": skip,
            "scales": of_blocks,
        }
        return usual_step(self.kernel, master, grad, *moments, weights=weights, **operands, **self.settings)


def usual_step(
    kernel: str, master: Tensor, grad: Tensor, *moments: Tensor, number: Tensor | None = None, **others: Any
) -> Update:
    """A step with the usual settings, except for `others`. number: of the step, where it counts."""
    kind = UPDATES[kernel]
    state: dict[str, Any] = dict(zip(kind.moment_names, moments, strict=True))
    settings = {**PAPERS[kernel].settings, **others}
    return kind(master=master, grad=grad, step=number if kind.counts else None, **state, **settings)


def scales_of(name: str) -> str:
    """What the scales of a moment are called."""
    return f"{name}, scales"


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.tensor(float(value), device=like.device)


def _cases(kernel: str) -> Iterator[tuple[str, StepCase]]:
    for numel in SIZES:
        for offset in OFFSETS:
            yield f"{numel} elements at offset {offset}", StepCase(kernel, numel, offset)
    for dtype in GRADIENTS:
        yield f"gradient {dtype}", StepCase(kernel, offset=1, grad_dtype=dtype)
    for dtype in GRADIENTS[1:]:
        yield f"weights {dtype}", StepCase(kernel, offset=1, weights_dtype=dtype)
    if UPDATES[kernel].moment_names:
        yield from _with_narrow_moments(kernel)
    yield from _with_split_masters(kernel)
    for number in (1, 2, 10_000) if UPDATES[kernel].counts else ():
        yield f"step {number}", StepCase(kernel, number=number)
    settings: dict[str, Settings] = {
        "no weight decay": {"weight_decay": 0.0},
        "maximize": {"maximize": True},
        **PAPERS[kernel].variants,
    }
    for name, others in settings.items():
        yield name, StepCase(kernel, settings=others)
    yield "grad_scale", StepCase(kernel, grad_scale=0.125)
    scaled = StepCase(kernel, 1023, 3, torch.bfloat16, {"maximize": True}, grad_scale=1 / 3)
    yield "grad_scale, maximize, bf16", scaled
    yield "skip 0", StepCase(kernel, skip=0.0)
    yield "skip 1", StepCase(kernel, skip=1.0, weights_dtype=torch.bfloat16)
    yield "skip 1, NaN", StepCase(kernel, skip=1.0, special=NAN, grad_scale=0.5)
    yield "skip 1, infinite", StepCase(kernel, skip=1.0, special=INFINITY)
    everything = StepCase(kernel, 70_001, 3, torch.bfloat16, {"maximize": True, "lr": 1e-2}, 17, 0.5, 0.0)
    yield "everything, bf16", replace(everything, weights_dtype=torch.bfloat16)
    yield "everything, fp16", replace(everything, weights_dtype=torch.float16)


def _with_narrow_moments(kernel: str) -> Iterator[tuple[str, StepCase]]:
    for numel, offset in ((3, 1), (1023, 0), (70_001, 3)):
        case = StepCase(kernel, numel, offset, moments_dtype=torch.bfloat16)
        yield f"moments bf16, {numel} elements at offset {offset}", case
        yield f"moments bf16 at random, {numel} elements", replace(case, settings={"stochastic": True})
        yield (
            f"moments in 8 bits, {numel} elements at offset {offset}",
            replace(case, moments_dtype=torch.uint8),
        )
    everything = StepCase(kernel, 1023, 1, torch.bfloat16, {}, 17, 0.5, 0.0, weights_dtype=torch.bfloat16)
    yield "moments in 8 bits, everything", replace(everything, moments_dtype=torch.uint8)
    at_random = replace(everything, settings={"stochastic": True})
    yield "moments bf16, everything", replace(at_random, moments_dtype=torch.bfloat16)
    for name, dtype in (("bf16", torch.bfloat16), ("in 8 bits", torch.uint8)):
        skipped = StepCase(kernel, skip=1.0, special=NAN, moments_dtype=dtype)
        yield f"moments {name}, skip 1, NaN", skipped


def _with_split_masters(kernel: str) -> Iterator[tuple[str, StepCase]]:
    split = StepCase(kernel, weights_dtype=torch.bfloat16, split=True)
    for numel, offset in ((0, 0), (3, 1), (1023, 0), (70_001, 3)):
        yield f"split, {numel} elements at offset {offset}", replace(split, numel=numel, offset=offset)
    yield "split, skip 1, NaN", replace(split, skip=1.0, special=NAN)
    everything = replace(split, offset=1, grad_dtype=torch.bfloat16, number=17, grad_scale=0.5, skip=0.0)
    kinds = (torch.float32, torch.bfloat16, torch.uint8) if UPDATES[kernel].moment_names else (torch.float32,)
    for dtype in kinds:
        stochastic = {"stochastic": dtype is torch.bfloat16}
        case = replace(everything, moments_dtype=dtype, settings=stochastic)
        yield f"split, moments {dtype}, everything", case


CASES = {f"{kernel}, {name}": case for kernel in UPDATES for name, case in _cases(kernel)}
CASES["adamw, NaN spreads to its element alone"] = StepCase("adamw", special=NAN)
