"""The peers: each wraps the same model and does one training step.

In bf16 all of them compute with bf16 weights and gradients, and have fp32 masters and fp32 moments: `plain`
and `ddp` by masters kept beside the bf16 model, fsdp2 by its mixed-precision policy, zero and DeepSpeed by
their configuration. Gradients travel in bf16 everywhere.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import accelz
import zero
from benchmarks.model import Decoder

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Setting:
    """What a peer is built from.

    batch: sequences per rank. timeout: of one collective, in seconds. optimizer: AdamW, or Muon for the
    blocks' matrices and AdamW for the rest. hosts: how many the ranks are divided among.
    """

    precision: Literal["bf16", "fp32"]
    ranks: int
    batch: int
    timeout: float
    optimizer: Literal["adamw", "muon"] = "adamw"
    hosts: int = 1


class Peer(ABC):
    """One way to train the model."""

    @abstractmethod
    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Do forward, backward and optimizer step; returns the loss, detached."""

    def traffic(self) -> dict[str, int] | None:
        """Bytes of this rank's collectives so far, by kind; None if the peer does not count them."""
        return None


class TorchPeer(Peer):
    """An ordinary torch loop. network: the module that is called."""

    def __init__(self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer | Masters]) -> None:
        self._network = network
        self._optimizers = optimizers

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._network(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> list[Tensor]:
        """The values that the optimizers update."""
        return [p for o in self._optimizers for group in o.param_groups for p in group["params"]]


class PlainPeer(TorchPeer):
    """Unsharded training, every rank by itself, which shows what the computation alone costs."""

    def traffic(self) -> dict[str, int]:
        return {}


class Masters:
    """Optimizers over fp32 masters of a model, which it casts to bf16. Buffers are made once."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self._weights: list[Tensor] = list(model.parameters())
        named = [(name, nn.Parameter(w.detach().clone())) for name, w in model.named_parameters()]
        self._masters: list[Tensor] = [master for _, master in named]
        self._gradients = [torch.zeros_like(m) for m in self._masters]
        for weight, master, gradient in zip(self._weights, self._masters, self._gradients, strict=True):
            weight.data = weight.data.bfloat16()
            master.grad = gradient
        self._optimizers = _of_parameters(named, setting)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self._gradients, [w.grad for w in self._weights if w.grad is not None])
        for optimizer in self._optimizers:
            optimizer.step()
        torch._foreach_copy_(self._weights, self._masters)

    def zero_grad(self) -> None:
        for weight in self._weights:
            weight.grad = None


class ZeroPeer(Peer):
    """zero. dims: those of the mesh with different data. config: further settings of `zero.Config`."""

    def __init__(
        self,
        model: Decoder,
        setting: Setting,
        mesh: DeviceMesh | None = None,
        dims: str | Sequence[str] | None = None,
        **config: Any,
    ) -> None:
        config = {"precision": setting.precision, "timeout": setting.timeout, **config}
        optimizers = optimizers_of(model, setting)
        self.engine = zero.initialize(model, optimizers, zero.Config(**config), mesh=mesh, data_dims=dims)
        self.engine.traffic.clear()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return dict(self.engine.traffic.bytes)

    def weights(self) -> list[Tensor]:
        """The whole masters, which all ranks ask for together."""
        return [value for value in self.engine.state_dict(master=True).values() if isinstance(value, Tensor)]


class DeepSpeedPeer(Peer):
    """host: whether parameters and optimizer state are there."""

    def __init__(self, model: Decoder, setting: Setting, host: bool = False) -> None:
        import deepspeed  # type: ignore[import-not-found,unused-ignore]

        deepspeed.init_distributed(_library(), timeout=timedelta(seconds=setting.timeout))
        self._engine, *_ = deepspeed.initialize(model=model, config=_deepspeed_config(setting, host))

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._engine(inputs, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()


def build_plain(model: Decoder, setting: Setting) -> PlainPeer:
    _move(model)
    return PlainPeer(model, _torch_optimizers(model, setting))


def build_ddp(model: Decoder, setting: Setting) -> Peer:
    join(setting)
    _move(model)
    optimizers = _torch_optimizers(model, setting)  # first, as it changes dtypes, which DDP looks at
    return TorchPeer(DistributedDataParallel(model, gradient_as_bucket_view=True), optimizers)


def build_fsdp2(
    model: Decoder,
    setting: Setting,
    mesh: Callable[[str], DeviceMesh] | None = None,
    **options: Any,
) -> Peer:
    """FSDP2, with each block sharded on its own.

    mesh: makes the mesh for a device type, after the process group is initialised; None for all ranks in one
    dimension. options: further options of `fully_shard`.
    """
    join(setting)
    kind = _move(model).type
    options["mesh"] = init_device_mesh(kind, (setting.ranks,)) if mesh is None else mesh(kind)
    options |= policy(setting)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return TorchPeer(model, optimizers_of(model, setting))


def policy(setting: Setting) -> dict[str, Any]:
    """FSDP2's options for the precision."""
    if setting.precision == "fp32":
        return {}
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}


PEERS: dict[str, Callable[[Decoder, Setting], Peer]] = {
    "plain": build_plain,
    "ddp": build_ddp,
    "fsdp2": build_fsdp2,
    "zero3": partial(ZeroPeer, stage=3),
    "zero2": partial(ZeroPeer, stage=2),
    "zero1": partial(ZeroPeer, stage=1),
    "deepspeed3": DeepSpeedPeer,
}
"""Every peer by name, in the order of the report."""

DEEPSPEED_HOST = "deepspeed3-host"  # among the peers of `offload_peers`

REQUIRES = {"deepspeed3": "deepspeed", DEEPSPEED_HOST: "deepspeed"}
"""Peers that need a package of benchmarks/requirements-peers.txt, and that package."""


def is_installed(name: str) -> bool:
    """Whether the package that the peer `name` needs is installed."""
    return name not in REQUIRES or find_spec(REQUIRES[name]) is not None


def prepare(name: str) -> None:
    """Import what the peer `name` needs, so that its memory counts to the process and not to the peer."""
    import torch._dynamo  # noqa: F401 (the first optimizer would import it)

    if name in REQUIRES:
        warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed uses names that torch deprecates
        __import__(REQUIRES[name])


def join(setting: Setting) -> None:
    dist.init_process_group(_library(), timeout=timedelta(seconds=setting.timeout))


def _library() -> str:
    """The backend through which torch's own engines communicate on this device."""
    accelerator = accelz.current()
    return "gloo" if accelerator.device.type == "cpu" else accelerator.collectives.spec


def _move(model: nn.Module) -> torch.device:
    """Put the model on the device, as a user of torch would."""
    device = accelz.current().device
    model.to(device)
    return device


def optimizers_of(model: nn.Module, setting: Setting) -> list[torch.optim.Optimizer]:
    return _of_parameters(model.named_parameters(), setting)


def _of_parameters(named: Named, setting: Setting) -> list[torch.optim.Optimizer]:
    if setting.optimizer == "adamw":
        return [torch.optim.AdamW([p for _, p in named], fused=True, **ADAMW)]
    matrices, rest = [], []
    for name, parameter in named:
        (matrices if parameter.dim() == 2 and name.startswith("blocks.") else rest).append(parameter)
    return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, fused=True, **ADAMW)]


def _torch_optimizers(model: nn.Module, setting: Setting) -> Sequence[torch.optim.Optimizer | Masters]:
    return [Masters(model, setting)] if setting.precision == "bf16" else optimizers_of(model, setting)


def _deepspeed_config(setting: Setting, host: bool) -> dict[str, Any]:
    away = {"device": "cpu", "pin_memory": True}
    offload = {"offload_optimizer": away, "offload_param": away} if host else {}
    return {
        "train_micro_batch_size_per_gpu": setting.batch,
        "zero_optimization": {"stage": 3, **offload},
        "bf16": {"enabled": setting.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": not host, "adam_w_mode": True}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
