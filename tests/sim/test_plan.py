"""`zero.plan` predicts the memory that a device counts and the traffic that the engine counts."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.sim.layers import peak_of
from tests.zero.helpers.training import collected
from zero.config.training import dtype_named

WIDTH, VOCABULARY, LAYERS = 192, 512, 4
SCALARS = 24 * 1024  # bytes of one token's activations, of inputs, and of what is as small


class Block(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        if frozen:
            self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Outer(nn.Module):
    """A unit with its own matrix, and with blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(Block(frozen=False), Block(frozen=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


class Model(nn.Module):
    """Embedding and head in the root unit, and blocks of two matrices, one of which is frozen."""

    def __init__(self, blocks: nn.ModuleList | None = None, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = blocks or nn.ModuleList(Block(frozen=index == 1) for index in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied(bias: bool = False) -> Model:
    """Tied embedding and head. With a bias, another gradient exists when the tied ones are added up."""
    model = Model(bias=bias)
    model.head.weight = model.embedding.weight
    return model


def frozen_first(blocks: int = LAYERS // 2) -> Model:
    """A model whose first blocks no backward reaches."""
    model = Model()
    for module in (model.embedding, *model.blocks[:blocks]):
        module.requires_grad_(False)
    return model


def nested() -> Model:
    return Model(nn.ModuleList(Outer() for _ in range(2)))


MODELS = {
    "tied": tied,
    "tied beside a bias": partial(tied, bias=True),
    "frozen first": frozen_first,
    "all blocks frozen": partial(frozen_first, LAYERS),
    "nested": nested,
}


def build(case: str) -> Model:
    torch.manual_seed(0)
    return MODELS.get(case.split(",")[0], Model)()


@collected()
def measured_body(
    context: Context, settings: dict[str, Any], optimizer: Any, autocast: torch.dtype | None, case: str
) -> dict[str, Any]:
    """Peaks by phase, counted from nothing, and traffic, in the last of three optimizer steps."""
    accelerator = context.accelerator
    gc.collect()
    before = accelerator.memory.stats().allocated
    config = zero.Config(timeout=20, **settings)
    model = build(case)
    init, engine = peak_of(
        accelerator, lambda: zero.initialize(model, optimizer(model.parameters(), lr=1e-3), config)
    )
    tokens = torch.tensor([[1]], device=accelerator.device)

    def forward() -> Tensor:
        with torch.autocast(accelerator.device.type, autocast, enabled=autocast is not None):
            return engine(tokens).float().square().mean()

    for _ in range(3):
        engine.traffic.clear()
        peaks = {"init": init, "forward": 0, "backward": 0, "step": 0}
        for _ in range(config.gradient_accumulation_steps or 1):
            peak, loss = peak_of(accelerator, forward)
            peaks["forward"] = max(peaks["forward"], peak)
            peak, _ = peak_of(accelerator, partial(engine.backward, loss))
            peaks["backward"] = max(peaks["backward"], peak)
            peaks["step"], _ = peak_of(accelerator, engine.step)
        del loss
    gc.collect()
    rest = accelerator.memory.stats().allocated - before
    peaks = {phase: peak - before for phase, peak in peaks.items()}
    traffic = {k: v for k, v in engine.traffic.bytes.items() if k not in ("broadcast", "barrier")}
    # Real kernels would need none, but the references have up to six fp32 tensors of a chunk at a time, and
    # put split masters together.
    tensors = 8 if config.masters == "split" else 6
    scratch = tensors * 4 * accelerator.kernels.chunk
    return {**peaks, "rest": rest, "traffic": traffic, "scratch": scratch}


class Stranger(torch.optim.SGD):
    """An optimizer unknown to zero, which therefore steps whole parameters; it makes no temporaries."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9, foreach=False)


def beside_a_kernel(params: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Matrices are stepped whole, and the rest by a kernel."""
    every = list(params)
    matrices, rest = ([p for p in every if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [Stranger(matrices, lr), torch.optim.AdamW(rest, lr)]


def two_kernels(params: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Two optimizers with kernels, which keep one moment and two moments per element."""
    every = list(params)
    return [zero.Lion(every[::2], lr), torch.optim.AdamW(every[1::2], lr)]


def only_some(params: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer that has no parameter of one unit, and only some of others."""
    return torch.optim.AdamW(list(params)[4:-2], lr)


WHOLE = (Stranger, beside_a_kernel)
FP32, BESIDE = "fp32 on the host", "whole parameters beside a kernel, on the host"
TIED_AWAY, BIASED_AWAY = "tied, gradients on the host", "tied beside a bias, gradients on the host"
NARROW = "whole gradients kept, sent narrow"
TWO_WAYS = (FP32, BESIDE, TIED_AWAY, BIASED_AWAY, NARROW)
AWAY: dict[str, Any] = {"offload": {"optimizer": "host", "gradients": "host"}}
SPLIT: dict[str, Any] = {"precision": "bf16", "masters": "split"}
NESTED: dict[str, Any] = {"precision": "bf16", "units": ("Outer", "Block")}
CASES: dict[str, tuple[dict[str, Any], Any, torch.dtype | None]] = {
    "tied": ({"precision": "bf16"}, torch.optim.AdamW, None),
    "tied, stage 2": ({"stage": 2}, torch.optim.AdamW, None),
    "tied, accumulated": ({"gradient_accumulation_steps": 2}, torch.optim.AdamW, None),
    "tied, accumulated, bf16": (
        {"precision": "bf16", "gradient_accumulation_steps": 2},
        torch.optim.AdamW,
        None,
    ),
    "tied, accumulated, stage 0": ({"stage": 0, "gradient_accumulation_steps": 2}, torch.optim.AdamW, None),
    TIED_AWAY: (AWAY, torch.optim.AdamW, None),
    "tied beside a bias": ({"precision": "bf16"}, torch.optim.AdamW, None),
    "tied beside a bias, accumulated": ({"gradient_accumulation_steps": 2}, torch.optim.AdamW, None),
    BIASED_AWAY: (AWAY, torch.optim.AdamW, None),
    "frozen first": ({"precision": "bf16"}, torch.optim.AdamW, None),
    "frozen first, accumulated": ({"gradient_accumulation_steps": 2}, torch.optim.AdamW, None),
    "all blocks frozen": ({"precision": "bf16", "prefetch": 3}, torch.optim.AdamW, None),
    "nested": (NESTED, torch.optim.AdamW, None),
    "nested, no prefetch": ({**NESTED, "prefetch": 0}, torch.optim.AdamW, None),
    "nested, prefetch 3": ({**NESTED, "prefetch": 3}, torch.optim.AdamW, None),
    "stage 0, accumulated": ({"stage": 0, "gradient_accumulation_steps": 2}, torch.optim.AdamW, None),
    "stage 0": ({"stage": 0}, torch.optim.AdamW, None),
    "stage 1": ({"stage": 1, "precision": "bf16"}, torch.optim.AdamW, None),
    "stage 2": ({"stage": 2, "precision": "bf16"}, torch.optim.AdamW, None),
    "stage 3": ({}, torch.optim.AdamW, None),
    "bf16": ({"precision": "bf16"}, torch.optim.AdamW, None),
    "lion": ({"precision": "bf16"}, zero.Lion, None),
    "sgd": ({"precision": "bf16"}, torch.optim.SGD, None),
    "moments in bf16": ({"moments": "bf16_stochastic"}, torch.optim.AdamW, None),
    "moments in bf16, half on the host": (
        {"precision": "bf16", "moments": "bf16", "offload": {"optimizer": "host", "fraction": 0.5}},
        torch.optim.AdamW,
        None,
    ),
    "moments in 8 bits": ({"precision": "bf16", "moments": "8bit"}, torch.optim.AdamW, None),
    "moments in 8 bits, half on the host": (
        {"moments": "8bit", "offload": {"optimizer": "host", "fraction": 0.5}},
        torch.optim.AdamW,
        None,
    ),
    "split masters": ({**SPLIT, "moments": "bf16"}, torch.optim.AdamW, None),
    "split masters alone": (SPLIT, torch.optim.SGD, None),
    "split masters, captured": ({**SPLIT, "capture_step": True}, torch.optim.AdamW, None),
    "split masters, half on the host": (
        {**SPLIT, "offload": {"optimizer": "host", "fraction": 0.5}},
        torch.optim.AdamW,
        None,
    ),
    "split masters, stepped on the device": (
        {**SPLIT, "offload": {"optimizer": "host", "step": "device", "sub_group_size": 1 << 15}},
        torch.optim.AdamW,
        None,
    ),
    "no prefetch": ({"precision": "bf16", "prefetch": 0}, torch.optim.AdamW, None),
    "prefetch 2": ({"precision": "bf16", "prefetch": 2}, torch.optim.AdamW, None),
    "persistent": ({"persistent_below": 1000}, torch.optim.AdamW, None),
    "reduced in fp32": ({"precision": "bf16", "reduce_dtype": "fp32"}, torch.optim.AdamW, None),
    "accumulated": ({"precision": "bf16", "gradient_accumulation_steps": 2}, torch.optim.AdamW, None),
    "accumulated in fp32": ({"gradient_accumulation_steps": 2}, torch.optim.AdamW, None),
    "accumulated locally, sent narrow": (
        {"gradient_accumulation_steps": 2, "accumulate": "local", "reduce_dtype": "bf16"},
        torch.optim.AdamW,
        None,
    ),
    "accumulated locally at stage 0, sent narrow": (
        {"stage": 0, "gradient_accumulation_steps": 2, "accumulate": "local", "reduce_dtype": "bf16"},
        torch.optim.AdamW,
        None,
    ),
    "accumulated locally": (
        {"precision": "bf16", "gradient_accumulation_steps": 2, "accumulate": "local"},
        torch.optim.AdamW,
        None,
    ),
    "stage 1, one counted": (
        {"stage": 1, "precision": "bf16", "gradient_accumulation_steps": 1},
        torch.optim.AdamW,
        None,
    ),
    "stage 0, whole gradients kept": ({"stage": 0, "accumulate": "local"}, torch.optim.AdamW, None),
    "tied, whole gradients kept": ({"accumulate": "local"}, torch.optim.AdamW, None),
    NARROW: ({"accumulate": "local", "reduce_dtype": "bf16"}, torch.optim.AdamW, None),
    "whole gradients kept, slices on the host": (
        {**AWAY, "accumulate": "local", "precision": "bf16"},
        torch.optim.AdamW,
        None,
    ),
    "copies, sent narrow": (
        {"stage": 2, "reduce_dtype": "bf16", "shard_ranks": 2},
        torch.optim.AdamW,
        None,
    ),
    "copies, one counted": (
        {"precision": "bf16", "shard_ranks": 2, "gradient_accumulation_steps": 1},
        torch.optim.AdamW,
        None,
    ),
    "autocast": ({}, torch.optim.AdamW, torch.bfloat16),
    "8 bits": ({"precision": "bf16", "gather_dtype": "int8"}, torch.optim.AdamW, None),
    "optimizer on the host": (
        {"precision": "bf16", "offload": {"optimizer": "host"}},
        torch.optim.AdamW,
        None,
    ),
    "half the optimizer on the host": (
        {"precision": "bf16", "offload": {"optimizer": "host", "fraction": 0.5}},
        torch.optim.AdamW,
        None,
    ),
    "parameters on the host": (
        {"precision": "bf16", "offload": {"optimizer": "host", "params": "host"}},
        torch.optim.AdamW,
        None,
    ),
    FP32: ({"offload": {"optimizer": "host", "params": "host"}}, torch.optim.AdamW, None),
    "stepped on the device": (
        {"precision": "bf16", "offload": {"optimizer": "host", "step": "device", "sub_group_size": 1 << 15}},
        torch.optim.AdamW,
        None,
    ),
    "whole parameters": ({}, Stranger, None),
    "whole parameters, bf16": ({"precision": "bf16"}, Stranger, None),
    "whole parameters, stage 2": ({"stage": 2, "gradient_accumulation_steps": 2}, Stranger, None),
    "whole parameters on the host": (
        {"precision": "bf16", "offload": {"optimizer": "host"}},
        Stranger,
        None,
    ),
    "whole parameters beside a kernel": ({"precision": "bf16"}, beside_a_kernel, None),
    BESIDE: (
        {"precision": "bf16", "offload": {"optimizer": "host"}},
        beside_a_kernel,
        None,
    ),
    "unknown to the optimizer": ({"precision": "bf16"}, only_some, None),
    "copies": ({"precision": "bf16", "shard_ranks": 2}, torch.optim.AdamW, None),
    "copies, stage 2": ({"stage": 2, "shard_ranks": 2}, torch.optim.AdamW, None),
    "copies, accumulated": (
        {"precision": "bf16", "gradient_accumulation_steps": 2, "shard_ranks": 2},
        torch.optim.AdamW,
        None,
    ),
    "copies, accumulated locally, sent narrow": (
        {"gradient_accumulation_steps": 2, "accumulate": "local", "reduce_dtype": "bf16", "shard_ranks": 2},
        torch.optim.AdamW,
        None,
    ),
    "copies, optimizer on the host": (
        {"precision": "bf16", "offload": {"optimizer": "host"}, "shard_ranks": 2},
        torch.optim.AdamW,
        None,
    ),
    "copies, whole parameters": ({"shard_ranks": 2}, Stranger, None),
    "captured": ({"precision": "bf16", "capture_step": True}, torch.optim.AdamW, None),
    "captured, stage 2": ({"stage": 2, "capture_step": True}, torch.optim.AdamW, None),
    "captured, stage 0, accumulated": (
        {"stage": 0, "capture_step": True, "gradient_accumulation_steps": 2, "accumulate": "local"},
        torch.optim.AdamW,
        None,
    ),
    "captured, accumulated": (
        {"precision": "bf16", "capture_step": True, "gradient_accumulation_steps": 2},
        torch.optim.AdamW,
        None,
    ),
    "captured, whole gradients kept": (
        {"accumulate": "local", "capture_step": True},
        torch.optim.AdamW,
        None,
    ),
    "captured, copies": ({"shard_ranks": 2, "capture_step": True}, torch.optim.AdamW, None),
    "captured, sent narrow": ({"reduce_dtype": "bf16", "capture_step": True}, torch.optim.AdamW, None),
    "two kernels": ({"precision": "bf16"}, two_kernels, None),
    "two kernels, half on the host": (
        {"precision": "bf16", "offload": {"optimizer": "host", "fraction": 0.5}},
        two_kernels,
        None,
    ),
}


def _sizes(case: str) -> tuple[int, ...]:
    return (4,) if "shard_ranks" in CASES[case][0] else (1, 2)


@pytest.mark.filterwarnings("ignore:Stranger will step whole parameters:UserWarning")
@pytest.mark.parametrize(
    ("case", "size"),
    # At one rank parameters stay whole, and what autocast casts there is its own, as activations are.
    [(case, size) for case in CASES for size in _sizes(case) if size > 1 or CASES[case][2] is None],
)
def test_peaks_and_traffic_are_those_planned(sim: Clusters, size: int, case: str) -> None:
    settings, optimizer, autocast = CASES[case]
    model, config = build(case), zero.Config(**settings)
    plan = zero.plan(model, optimizer(model.parameters(), lr=1e-3), config, ranks=size, autocast=autocast)
    ranks = sim(size).run(measured_body, settings=settings, optimizer=optimizer, autocast=autocast, case=case)
    if optimizer in WHOLE:  # the plan is for the rank that has most
        ranks = [max(ranks, key=lambda found: found["rest"])]
    for found in ranks:
        assert found["traffic"] == plan.traffic.collectives, case
        planned = {phase: held.total for phase, held in plan.memory.peaks.items()}
        planned["rest"] = plan.memory.rest["device"].total
        extra = {name: found[name] - nbytes for name, nbytes in planned.items()}
        scratch = dict.fromkeys(extra, 0) | {"step": found["scratch"]}
        if config.masters == "split":  # they are split a chunk at a time
            scratch["init"] = found["scratch"]
        if config.capture_step:  # a graph keeps what its references take, which real kernels do not
            scratch["step"] = scratch["rest"] = 4 * found["scratch"]
        if dtype_named(config.gather_dtype) is not None and size > 1:
            scratch["forward"] = scratch["backward"] = found["scratch"]
        # It is not known exactly how many small groups are on their way, to the host or to other ranks, so
        # the plan may be too high by this much.
        spare = max(g.gradient_bytes for u in plan.units for g in u.groups) if case in TWO_WAYS else 0
        if optimizer in WHOLE:  # nor is the order known in which groups are put together
            exchanged = plan.memory.peaks["step"].optimizer - plan.memory.rest["device"].optimizer
            spare = max(spare, exchanged)
            scaled = [group.whole.numel for unit in plan.units for group in unit.groups if group.whole]
            kernels = found["scratch"] if optimizer is beside_a_kernel else 0
            scratch["step"] = max(2 * 4 * max(scaled, default=0), kernels)
        assert all(-SCALARS - spare <= nbytes <= scratch[name] + SCALARS for name, nbytes in extra.items()), (
            extra
        )
