"""One model, as jobs of four ranks arrange it: divided by tensors, experts and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import zero
from tests.zero.helpers.meshes import mesh_of
from zero.sharding.distributed import local_of

RANKS, LAYERS = 4, 2
Block = Callable[[Tensor, Any], Tensor]  # of a whole tensor in a mesh, a rank's part
Placed = tuple[tuple[Any, ...], Block]


def part_of(whole: Tensor, dim: int, mesh: Any, *names: str) -> Tensor:
    """A part of a part, along one dimension of the mesh after another: as torch.chunk cuts, or nothing."""
    for name in names:
        parts, place = whole.chunk(mesh[name].size(), dim), mesh[name].get_local_rank()
        whole = parts[place] if place < len(parts) else whole.narrow(dim, 0, 0)
    return whole


def rows(*names: str) -> Block:
    return lambda whole, mesh: part_of(whole, 0, mesh, *names)


def columns(*names: str) -> Block:
    return lambda whole, mesh: part_of(whole, whole.dim() - 1, mesh, *names)


def experts_and_columns(whole: Tensor, mesh: Any) -> Tensor:
    return columns("tp")(rows("ep")(whole, mesh), mesh)


@dataclass(frozen=True)
class Layout:
    """dims: of the mesh; none without one. placed: by the last part of a parameter's name, along which
    dimensions it is divided, how, and what a rank has then. stages: the layers of each stage, the first of
    which has what is before them. parts: a stage's layers are a part each."""

    dims: tuple[tuple[str, int], ...] = ()
    data: Sequence[str] = ("dp",)
    shards: Sequence[str] | None = None
    along: tuple[str, ...] = ()
    placed: tuple[tuple[str, Placed], ...] = ()
    stages: tuple[tuple[int, ...], ...] = ()
    parts: bool = False
    config: tuple[tuple[str, Any], ...] = (("stage", 3),)


TP = (
    ("up", ((Shard(0),), rows("tp"))),
    ("line", ((Shard(0),), rows("tp"))),
    ("down", ((Shard(1),), columns("tp"))),
    ("experts", ((Shard(2),), columns("tp"))),
    ("frozen", ((Shard(0),), rows("tp"))),
    ("norm", ((Replicate(),), lambda whole, mesh: whole)),
)
EXPERTS = (
    ("experts", ((Shard(0), Shard(2)), experts_and_columns)),
    ("up", ((Replicate(), Shard(0)), rows("tp"))),
    ("down", ((Shard(0), Shard(1)), lambda whole, mesh: columns("tp")(rows("ep")(whole, mesh), mesh))),
)
TWICE = (
    ("up", ((Shard(0), Shard(0)), rows("ep", "tp"))),
    ("down", ((_StridedShard(1, split_factor=2), Shard(1)), columns("tp", "ep"))),
    ("experts", ((_StridedShard(0, split_factor=2), Shard(0)), rows("tp", "ep"))),
)
LAYOUTS = {
    "no mesh": Layout(),
    "copies": Layout((("replicate", 2), ("shard", 2)), ("replicate", "shard"), ("shard",)),
    "dp tp": Layout((("dp", 2), ("tp", 2)), along=("tp",), placed=TP),
    "tp of four": Layout(
        (("dp", 1), ("tp", 4)), along=("tp",), placed=TP, config=(("stage", 1), ("precision", "bf16"))
    ),
    "ep tp": Layout((("dp", 1), ("ep", 2), ("tp", 2)), along=("ep", "tp"), placed=EXPERTS),
    "dp ep": Layout(
        (("dp", 2), ("ep", 2)),
        ("dp", "ep"),
        along=("ep",),
        placed=(("experts", ((Shard(0),), rows("ep"))),),
        config=(("local_modules", {"layers.*.experts": "ep"}),),
    ),
    "twice": Layout((("dp", 1), ("ep", 2), ("tp", 2)), along=("ep", "tp"), placed=TWICE),
    "pp dp": Layout((("pp", 2), ("dp", 2)), stages=((0,), (1,)), config=(("stage", 2),)),
    "pp tp": Layout(
        (("pp", 2), ("dp", 1), ("tp", 2)),
        along=("tp",),
        placed=TP,
        stages=((), (0, 1)),
        config=(("stage", 0),),
    ),
    "parts": Layout((("pp", 2), ("dp", 2)), stages=((1,), (0,)), parts=True),
    "cp tp": Layout(
        (("cp", 2), ("tp", 2)), ("cp",), along=("tp",), placed=TP, config=(("precision", "bf16"),)
    ),
}


class Layer(nn.Module):
    """Odd sizes, which no number of ranks divides; a matrix in another memory order."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.up, self.line, self.norm = drawn(7, 6), drawn(7), drawn(6)
        self.down = nn.Parameter(drawn(7, 6).detach().t())
        self.experts = drawn(3, 4, 5)
        whole_numbers = torch.randint(200, (9,), generator=generator).float()
        self.frozen = nn.Parameter(whole_numbers, requires_grad=False)
        self.register_buffer("shift", whole_numbers[:3].clone())

    def forward(self) -> Tensor:
        each = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters())
        return torch.stack([(value * value * value).float().sum() for value in each]).sum()


class Model(nn.Module):
    def __init__(self, seed: int, layers: Sequence[int], has_first: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        every = {str(number): Layer(generator) for number in range(LAYERS)}
        self.first: nn.Module = nn.Linear(2, 3)
        self.layers = nn.ModuleDict({str(number): every[str(number)] for number in layers})
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if not has_first:
            self.first = nn.Identity()

    def forward(self) -> Tensor:
        x = torch.ones(1, 2, dtype=next(self.parameters()).dtype)
        found: Tensor = self.first(x).float().square().sum()
        for layer in self.layers.values():
            found = found + layer()
        return found


class Job:
    """An engine with a model of a layout, and what it is to have of whole tensors."""

    def __init__(self, layout: Layout, seed: int, weights: Path | None = None) -> None:
        """weights: to fill the model with before it has an engine."""
        self.layout = layout
        self.mesh: Any = mesh_of(*layout.dims) if layout.dims else None
        local = {"local_modules": {"*": "pp"}} if layout.stages else {}
        stage = self.mesh.get_local_rank("pp") if layout.stages else 0
        layers = layout.stages[stage] if layout.stages else range(LAYERS)
        parts = [Model(seed, () if layout.parts else layers)] if not stage else []
        if stage or layout.parts:
            parts += [Model(seed, layers, has_first=False)]
        self.parts = parts
        self._divide()
        if weights is not None:
            zero.load_pretrained(self.parts[0], weights)
        every = [p for part in parts for p in part.parameters()]
        wide = [p for p in every if p.dim() > 1]
        narrow = [p for p in every if p.dim() == 1 and p.requires_grad]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        config = zero.Config(timeout=30, **local, **dict(layout.config))
        dims = {"data_dims": layout.data, "shard_dims": layout.shards} if self.mesh is not None else {}
        model = parts if layout.parts else parts[0]
        self.engine = zero.initialize(model, optimizer, config, mesh=self.mesh, **dims)  # type: ignore[arg-type]

    def loss(self) -> Tensor:
        return torch.stack([part() for part in self.parts]).sum()

    def named(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Parameters by their names in the engine, and in a part."""
        for number, part in enumerate(self.parts):
            for name, parameter in part.named_parameters():
                yield f"{number}.{name}" if self.layout.parts else name, name, parameter

    def _divide(self) -> None:
        placed = dict(self.layout.placed)
        for layer in (layer for part in self.parts for layer in part.layers.values()):
            for name, whole in list(layer.named_parameters()):
                if name not in placed:
                    continue
                placements, block = placed[name]
                local = block(whole.detach(), self.mesh).clone(memory_format=torch.preserve_format)
                made = DTensor.from_local(
                    local,
                    self.mesh[self.layout.along],
                    placements,
                    run_check=False,
                    shape=whole.shape,
                    stride=whole.stride(),
                )
                setattr(layer, name, nn.Parameter(made, requires_grad=whole.requires_grad))

    def block(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of a whole tensor."""
        placed = dict(self.layout.placed).get(name.rpartition(".")[2])
        return whole if placed is None else placed[1](whole, self.mesh)

    def wholes(self) -> dict[str, Tensor]:
        """Whole masters, moments and buffers, put together from all ranks' blocks, element by element."""
        shapes = {name: tuple(p.shape) for _, name, p in self.named()}
        mine = {}
        for key, value in self.state().items():
            name, _, state = key.partition(": ")
            shape = tuple(value.shape) if state == "step" or name not in shapes else shapes[name]
            places = torch.arange(torch.Size(shape).numel()).view(shape)
            mine[key] = shape, value, places if shape == tuple(value.shape) else self.block(name, places)
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, mine)
        found: dict[str, Tensor] = {}
        for of_rank in every:
            for key, (shape, value, places) in of_rank.items():
                whole = found.setdefault(key, torch.full(shape, torch.nan))
                whole.view(-1)[places.flatten()] = value.flatten()
        return found

    def has(self, wholes: dict[str, Tensor]) -> list[str]:
        """What this rank has otherwise than in these whole tensors."""
        wrong = []
        for key, value in self.state().items():
            name, _, state = key.partition(": ")
            wanted = wholes[key] if state == "step" else self.block(name, wholes[key])
            if not torch.equal(value, wanted):
                wrong.append(key)
        return wrong

    def state(self) -> dict[str, Tensor]:
        """This rank's blocks of masters, moments and buffers, gathered over its data."""
        found = {name: b.clone().cpu() for part in self.parts for name, b in part.named_buffers()}
        for called, name, parameter in self.named():
            found[name] = local_of(self.engine.full_master(called)).cpu()  # type: ignore[arg-type]
            if parameter.requires_grad:
                for key, value in self.engine.full_optimizer_state(called).items():
                    found[f"{name}: {key}"] = value.cpu()
        return found
