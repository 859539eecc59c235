"""Training runs to compare: with zero, and unsharded with torch's DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.loops import Training
from zero.tiers import apart

Loss = Callable[[nn.Module, int, int], Tensor]  # (model, step, rank) -> loss of that rank's micro-batch

# For comparisons, avoid GPU kernels that sum in any order, or with ten bits. On the host nothing changes.
torch.backends.cudnn.deterministic = True
torch.backends.cudnn.allow_tf32 = False
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)


def collect_all() -> None:
    """Collect garbage until there is none: what goes may release more, which the next collection finds."""
    while gc.collect():
        pass


def living(kind: type) -> int:
    """How many objects of this kind remain after collecting garbage; in collected(), of those made in it."""
    collect_all()
    return sum(issubclass(type(o), kind) for o in gc.get_objects())


@contextmanager
def collected() -> Iterator[None]:
    """Make frequent garbage collection cheap in the block: collect or freeze what exists already.

    It stays frozen, so that the next block need not look at it again. So this is where a body begins, whose
    own objects are still to come: what is alive then, such as modules, is there for as long as the process.
    """
    collect_all()
    gc.freeze()
    yield


@contextmanager
def own_work_seen() -> Iterator[None]:
    """Let dispatch modes see what the engine does on its own tensors, which they do not otherwise."""
    modes, apart._modes = apart._modes, lambda: 0
    try:
        yield
    finally:
        apart._modes = modes


@dataclass
class Run:
    """What a run gave. losses: one per micro-batch. state: the final whole model (rank 0; {} elsewhere)."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


def adamw(model: nn.Module) -> Optimizer:
    """Two param groups with different weight decay, as users have them."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train_zero(
    context: Context,
    model: nn.Module,
    loss: Loss,
    config: zero.Config,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    steps: int = 10,
    process_group: Any = None,
) -> Run:
    """Train `model` (which is used up) for `steps` micro-batches."""
    training = Training(model, optimizer(model), config, process_group)
    engine, run = training.engine, Run()
    for step in range(steps):
        value = loss(model, step, engine.rank)
        training.backward(value)
        if training.step() and (config.clip_norm or config.loss_scale):
            run.norms.append(float(engine.grad_norm))
        run.losses.append(value.item())
    run.state = engine.state_dict()
    check_order(engine)
    return run


def check_order(engine: zero.Engine) -> None:
    """Check that all ranks issued the same collectives in one order, as libraries with one queue need."""
    ledger = engine._communicator.ledger.line
    every = engine._communicator.all_gather_object([ledger.count, *(each.text for each in ledger.issued)])
    assert all(each == every[0] for each in every), "gathers and reductions in other orders on some ranks"


def train_reference(
    context: Context,
    model: nn.Module,
    loss: Loss,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    steps: int = 10,
    accumulation: int = 1,
    clip: float | None = None,
) -> Run:
    """The same with DistributedDataParallel on a copy of `model`."""
    model = _where_torch_averages(context, copy.deepcopy(model))
    wrapped = _Wrapped(model, loss)
    parallel = DistributedDataParallel(wrapped, find_unused_parameters=True)
    optimize = optimizer(model)
    run = Run()
    for step in range(steps):
        value = parallel(step, context.rank)
        (value / accumulation).backward()
        run.losses.append(value.item())
        if (step + 1) % accumulation == 0:
            if clip is not None:
                run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimize.step()
            optimize.zero_grad()
    run.state = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
    return run


def train_averaging(
    context: Context,
    model: nn.Module,
    loss: Loss,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    steps: int = 10,
) -> Run:
    """Unsharded data-parallel training in its simplest form, for models that DDP refuses.

    Gradients are averaged after backward; a parameter that no rank used keeps `grad = None`.
    """
    model = _where_torch_averages(context, copy.deepcopy(model))
    optimize = optimizer(model)
    run = Run()
    for step in range(steps):
        value = loss(model, step, context.rank)
        value.backward()
        _average(list(model.parameters()), context.size)
        optimize.step()
        optimize.zero_grad()
        run.losses.append(value.item())
    run.state = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
    return run


def _average(parameters: list[nn.Parameter], ranks: int) -> None:
    """Average gradients over the host, those of a dtype in one collective: tests spend their time here."""
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    torch.distributed.all_reduce(used)
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        alike = [p for p in parameters if p.dtype is dtype]
        whole = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in alike]
        flat = torch.cat(whole).cpu()
        torch.distributed.all_reduce(flat)
        for parameter, part in zip(alike, (flat / ranks).split([p.numel() for p in alike]), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.device)
    for parameter, any_rank in zip(parameters, used.tolist(), strict=True):
        parameter.grad = parameter.grad if any_rank else None


def train_mixed_reference(
    context: Context,
    model: nn.Module,
    loss: Loss,
    optimizer: Callable[[nn.Module], Optimizer],
    steps: int,
    dtype: torch.dtype,
) -> Run:
    """Unsharded training with 16-bit weights and gradients, fp32 masters and fp32 optimizer state.

    On the device: in 16 bits, the host's kernels may round each operator's parts otherwise.
    """
    where_kernels_are(context, model)
    narrow = copy.deepcopy(model)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.to(dtype)
    optimize = optimizer(model)  # steps the masters, which are the original model
    run = Run()
    for step in range(steps):
        value = loss(narrow, step, context.rank)
        value.backward()
        _average(list(narrow.parameters()), context.size)
        for master, weight in zip(model.parameters(), narrow.parameters(), strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        optimize.step()
        with torch.no_grad():
            for master, weight in zip(model.parameters(), narrow.parameters(), strict=True):
                weight.copy_(master)
        run.losses.append(value.item())
    return run


def _where_torch_averages(context: Context, model: nn.Module) -> nn.Module:
    """Move the model to the device, or leave it on the host where torch.distributed has no library for the
    device's tensors."""
    accelerator = context.accelerator
    return (
        where_kernels_are(context, model)
        if accelerator.device.type in accelerator.collectives.spec
        else model
    )


def where_kernels_are(context: Context, model: nn.Module) -> nn.Module:
    """Move the model to the device, whose kernels may round differently from the host's.

    By swapping tensors, where `Module.to` would make new parameters and so untie those that modules share.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(
        not context.accelerator.capabilities.host_data_assignment
    )
    try:
        return model.to(context.accelerator.device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class _Wrapped(nn.Module):
    """A module that returns the loss, as DDP expects of a forward."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, step: int, rank: int) -> Tensor:
        return self._loss(self.model, step, rank)


def relative_error(got: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two series; infinite if a value is not a number."""
    assert len(got) == len(expected)
    return _worst(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(got, expected, strict=True))


def scaled_error(got: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of two series of losses, relative to the first expected; infinite as above."""
    assert len(got) == len(expected)
    return _worst(abs(a - b) for a, b in zip(got, expected, strict=True)) / abs(expected[0])


def state_error(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest difference of two state dicts, relative to each tensor's largest magnitude."""
    assert list(got) == list(expected)
    errors = [0.0]
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        if value.numel():
            difference = (got[name].double() - value.double()).abs().max()
            errors.append(float(difference / value.double().abs().max().clamp(min=1e-3)))
    return _worst(errors)


def _worst(errors: Iterable[float]) -> float:
    """The largest error, infinite if one is not a number: `max` would pass over these."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def same_bits(first: Run, second: Run) -> bool:
    """Whether two runs agree bit for bit."""
    return first.losses == second.losses and all(
        torch.equal(value, second.state[name]) for name, value in first.state.items()
    )


def exchanges_of(engine: zero.Engine) -> list[str]:
    """A list to which every later exchange over host memory is added."""
    seen: list[str] = []
    exchange = engine._communicator._exchange

    def noted(what: str, *arguments: Any) -> None:
        seen.append(what)
        exchange(what, *arguments)

    engine._communicator._exchange = noted  # type: ignore[method-assign]
    return seen


def errors_of(run: Run, reference: Run) -> float:
    losses = relative_error([*run.losses, *run.norms], [*reference.losses, *reference.norms])
    return max(losses, state_error(run.state, reference.state)) if run.state else losses
