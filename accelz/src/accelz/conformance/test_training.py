"""A small language model, trained on the device as an engine does it: what all the other tests are for.

Each rank keeps its shard of every block. A block's parameters are gathered for its forward, dropped, gathered
again when backward reaches it, and their gradients are reduced to shards, on which the kernels step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelz.accelerator import Accelerator
from accelz.conformance.cluster import Cluster, Context
from accelz.conformance.contract import checked, expect, expect_close
from accelz.conformance.marks import about
from accelz.conformance.operators import operator
from accelz.conformance.steps import usual_step
from accelz.roles.flat_buffer import Slot, dense_stride, rebind

WHERE = "torch"
TOKENS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 17, 16, 2, 8, 4, 4
SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
DEVIATION = 1e-3
"""By how much, relatively, a loss may differ from the host's after a few steps in fp32."""
DO = "see to the operators and roles that fail first; if none does, this is what an engine sees of the device"


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places.weight  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.second(x))))  # type: ignore[no-any-return]


class Sharded:
    """A module of which this rank keeps one shard in fp32, and the optimizer's state for it."""

    def __init__(self, module: nn.Module, context: Context, accelerator: Accelerator) -> None:
        self.module, self.context, self.accelerator = module, context, accelerator
        self.parameters = list(module.parameters())
        slots, end = [], 0
        for p in self.parameters:
            slots.append(Slot(end, tuple(p.shape), dense_stride(p.data), p.numel()))
            end += p.numel()
        numel = -(-end // context.size) * context.size
        self.buffer = accelerator.flat_buffers.flatten(self.parameters, slots, numel, torch.float32)
        self.shard = self.buffer.data.chunk(context.size)[context.rank].clone()
        self.moments = [torch.zeros_like(self.shard) for _ in range(2)]
        self.release()

    def release(self) -> None:
        self.accelerator.streams.synchronize()
        self.buffer.release()

    def gather(self) -> None:
        self.buffer.materialize()
        self.accelerator.collectives.all_gather(self.buffer.data, self.shard, self.context.group)

    def __call__(self, x: Tensor) -> Tensor:
        self.gather()
        with operator(WHERE, "a forward of the model must run"):
            result: Tensor = self.module(x)
        result.register_hook(lambda _: self.gather())
        self.release()
        return result

    def step(self, number: Tensor) -> None:
        gradient = torch.zeros_like(self.buffer.data, memory_format=torch.contiguous_format)
        for p, slot in zip(self.parameters, self.buffer.slots, strict=True):
            assert p.grad is not None
            gradient[slot.offset : slot.offset + slot.numel].copy_(p.grad.flatten())
            p.grad = None
        own = torch.empty_like(self.shard)
        self.accelerator.collectives.reduce_scatter(own, gradient, self.context.group)
        self.accelerator.kernels.scale_cast(own, own.clone(), torch.ones_like(number) / self.context.size)
        self.accelerator.kernels.step(
            usual_step("adamw", self.shard, own, *self.moments, number=number, **SETTINGS)
        )
        self.release()


def training_body(context: Context) -> list[float]:
    """The losses of all steps, over the ranks' mean."""
    accelerator = checked(context.accelerator)
    blocks = [Sharded(m, context, accelerator) for m in _model()]
    losses = []
    for number in range(1, STEPS + 1):
        tokens = _batch(number).chunk(context.size)[context.rank].to(accelerator.device)
        x = tokens
        for block in blocks:
            x = block(x)
        with operator(WHERE, "a loss and its backward must run"):
            loss = _loss(x, tokens)
            loss.backward()
        for block in blocks:
            block.step(torch.tensor(float(number), device=accelerator.device))
        mean = loss.detach().clone().reshape(1)
        accelerator.collectives.all_reduce(mean, context.group)
        losses.append(mean.item() / context.size)
    return losses


class TrainingContract:
    @about("torch")
    def test_a_model_trains(self, accelerator: Accelerator) -> None:
        """A model moved to the device and torch's own optimizer train as on the host."""
        blocks = copy.deepcopy(_model())
        for parameter in blocks.parameters():
            rebind(parameter, parameter.detach().to(accelerator.device))
        with operator(WHERE, "training with torch's own AdamW must run"):
            losses = _plain(blocks, accelerator.device)
        _compare(losses, "with torch.optim.AdamW")

    @about("torch", "FlatBuffer.materialize", "Collectives.all_gather", "Kernels.step")
    @pytest.mark.parametrize("size", [1, 2], ids=lambda n: f"{n} ranks")
    def test_a_sharded_model_trains(self, cluster: Callable[[int], Cluster], size: int) -> None:
        """The same model in shards, with flat buffers, collectives and kernels, trains as on the host."""
        losses = cluster(size).run(training_body)
        expect(all(x == losses[0] for x in losses), WHERE, "every rank must see the same losses", str(losses))
        _compare(losses[0], f"in shards, on {size} ranks")


class TestTraining(TrainingContract):
    pass


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Inputs(), Block(), Block(), nn.Linear(WIDTH, TOKENS))


def _batch(number: int) -> Tensor:
    """(BATCH, LENGTH) sequences that count in steps of three, from random numbers."""
    start = torch.randint(TOKENS, (BATCH, 1), generator=torch.Generator().manual_seed(number))
    return (start + 3 * torch.arange(LENGTH)) % TOKENS


def _loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _plain(model: nn.Module, device: torch.device) -> list[float]:
    """The losses of training with torch alone."""
    betas = (SETTINGS["beta1"], SETTINGS["beta2"])
    settings = {name: SETTINGS[name] for name in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, **settings)  # type: ignore[arg-type]
    losses = []
    for number in range(1, STEPS + 1):
        tokens = _batch(number).to(device)
        loss = _loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _compare(losses: list[float], how: str) -> None:
    want = torch.tensor(_plain(_model(), torch.device("cpu")))
    assert want[-1] < want[0] - 0.1, "the model learns"
    expected = f"losses must be those of the host ({how})"
    expect_close(torch.tensor(losses), want, WHERE, expected, rtol=DEVIATION, do=DO)
