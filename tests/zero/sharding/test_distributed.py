"""Models whose parameters are DTensors over other dimensions than the engine's: tensor parallelism."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.tensor_parallel import BLOCKS, HIDDEN, WIDTH, compared, full, parallel, whole
from tests.zero.helpers.training import adamw, relative_error
from zero.sharding.distributed import local_of

STEPS, CLIP = 3, 0.05
pytestmark = pytest.mark.host  # meshes of gloo's


class Sequence(nn.Module):
    """Blocks between which ranks have parts of the tokens: gradients of norms come as partial sums."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.layers = mesh, whole()
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        for block in list(self.layers.children())[:BLOCKS]:
            parallelize_module(block, mesh, plan)
        parallelize_module(self.layers, mesh, {str(BLOCKS): ColwiseParallel(output_layouts=Replicate())})

    def forward(self, x: Tensor) -> Tensor:
        parts: Tensor = distribute_tensor(x, self.mesh, [Shard(0)], src_data_rank=None)
        found: Tensor = self.layers(parts)
        return found


def loss_of(model: nn.Module, data: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + data)
    x = torch.randn(5, WIDTH, generator=generator)
    dtype = next(p.dtype for p in model.parameters())
    return model(x.to(dtype)).float().square().mean()


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """It has state, DTensors of parameters that are, before its first step."""
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)


def unsharded(
    data: int, clip: float = 1e9, make: Any = sgd
) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses by step and rank with other data, the norms, and the weights that there are in the end."""
    model = whole()
    optimizer, told, norms = make(model), [], []
    for step in range(STEPS):
        losses = [loss_of(model, rank, step) for rank in range(data)]
        torch.stack(losses).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        told.append([loss.item() for loss in losses])
    return told, norms, {name: value.detach() for name, value in model.state_dict().items()}


def train(engine: zero.Engine, model: nn.Module, data: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, data, step)
        train_on(engine, loss)
        losses.append(loss.item())
    return losses


CONFIGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "host": {"offload": zero.Offload(params="host", optimizer="host")},
    "autocast": {},
    "bf16": {"precision": "bf16"},
}


def tensor_body(context: Context) -> dict[str, float]:
    data = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh.get_local_rank("dp")
    told, _, weights = unsharded(data)
    wanted = [each[mine] for each in told]
    errors = {}
    for name, settings in CONFIGS.items():
        model = parallel(mesh["tp"])
        ids, kinds = [id(p) for p in model.parameters()], [type(p) for p in model.parameters()]
        engine = zero.initialize(
            model, sgd(model), zero.Config(timeout=20, **settings), process_group=mesh.get_group("dp")
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            errors[f"{name}: losses"] = relative_error(train(engine, model, mine), wanted)
        errors[f"{name}: weights"] = compared(engine, model, weights)
        with zero.gathered(model):
            assert [id(p) for p in model.parameters()] == ids
            assert [type(p) for p in model.parameters()] == kinds
            assert {p.dtype for p in model.parameters()} == {
                torch.bfloat16 if name == "bf16" else torch.float32
            }
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_models_train_as_one_process(cluster: Clusters, ranks: int) -> None:
    for errors in cluster(ranks).run(tensor_body):
        for name, error in errors.items():
            assert error < (0.03 if "bf16" in name or "autocast" in name else 1e-5), (name, error)


def mesh_body(context: Context) -> dict[str, float]:
    """All ranks are one job: one norm, which counts each block once. Also of an optimizer that came later."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh.get_local_rank("dp")
    errors = {}
    for stage, by_program in ((1, True), (3, False)):
        model, norms, make = Sequence(mesh["tp"]), [], adagrad if by_program else sgd
        told, wanted_norms, weights = unsharded(2, CLIP, make)
        config = zero.Config(timeout=20, stage=stage, clip_norm=None if by_program else CLIP)
        first = make if by_program else adamw
        engine = zero.initialize(model, first(model), config, mesh=mesh, data_dims="dp")
        if not by_program:
            engine.attach(make(model))
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, mine, step)
            if by_program:
                loss.backward()
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            else:
                train_on(engine, loss)
                norms.append(float(engine.grad_norm or 0))
            losses.append(loss.item())
        errors[f"{stage}: losses"] = relative_error(losses, [each[mine] for each in told])
        errors[f"{stage}: norms"] = relative_error(norms, wanted_norms)
        errors[f"{stage}: weights"] = compared(engine, model, {f"layers.{n}": w for n, w in weights.items()})
    return errors


def test_a_mesh_with_tensor_parallelism_has_one_norm(cluster: Clusters) -> None:
    for errors in cluster(4).run(mesh_body):
        assert max(errors.values()) < 1e-5, errors


class Experts(nn.Module):
    """Three of them as one parameter, of which each rank uses those that it has."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.whole = torch.randn(3, 4, generator=generator)
        self.scale = nn.Parameter(torch.randn(4, generator=generator))
        made = distribute_tensor(self.whole, mesh, [Shard(0)], src_data_rank=None)
        self.experts = nn.Parameter(made)

    def forward(self, weight: float) -> Tensor:
        mine = self.experts.to_local()  # type: ignore[attr-defined]
        return weight * ((mine.square()).sum() + self.scale.square().sum())


def experts_body(context: Context) -> None:
    """Experts along a dimension of the data: summed over ranks that have the same, and counted once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Experts(mesh["ep"])
    with pytest.raises(zero.ModelError, match=r"'experts' is a DTensor over .*local_modules="):
        zero.initialize(model, sgd(model), mesh=mesh, data_dims=("dp", "ep"))
    for stage in (1, 3):
        model = Experts(mesh["ep"])
        before = model.scale.detach().clone()
        config = zero.Config(stage=stage, timeout=20, local_modules={"experts": "ep"})
        engine = zero.initialize(
            model, torch.optim.SGD(model.parameters(), 0.1), config, mesh=mesh, data_dims=("dp", "ep")
        )
        model(1.0 + context.rank).backward()
        factors = torch.tensor([1 + 3, 1 + 3, 2 + 4]) / 4  # the first two experts are on ranks 0 and 2
        expected = 2 * model.whole * factors[:, None]
        gradient = model.experts.grad
        torch.testing.assert_close(gradient.full_tensor(), expected)  # type: ignore[union-attr]
        of_scale = 2 * before * (1 + 2 + 3 + 4) / 4
        norm = torch.cat([expected.flatten(), of_scale]).norm()
        torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e9), norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        torch.testing.assert_close(full(engine.full_master("experts")), model.whole - 0.1 * expected)
        torch.testing.assert_close(engine.full_master("scale"), before - 0.1 * of_scale)


def test_grouped_experts_may_be_divided_along_data(cluster: Clusters) -> None:
    cluster(4).run(experts_body)


class Tied(nn.Module):
    """An embedding and a head that have one weight, divided by words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.inner = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def parallel(self, mesh: DeviceMesh) -> Tied:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self, mesh, plan)
        self.head.weight = self.embedding.weight
        return self

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.inner(self.embedding(words))))
        return found

    def loss(self, rank: int, step: int) -> Tensor:
        words = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))
        return nn.functional.cross_entropy(self(words).flatten(0, 1), words.flatten())


def tied_body(context: Context) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine, reference, model = mesh.get_local_rank("dp"), Tied(), Tied().parallel(mesh["tp"])
    plain = sgd(reference)
    plan = zero.plan(model, sgd(model), mesh=mesh, data_dims="dp")
    assert sum(unit.parameters for unit in plan.units) == sum(
        p.numel() for p in map(local_of, model.parameters())
    )
    same = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))  # ranks, under other names
    engine = zero.initialize(model, sgd(model), zero.Config(timeout=20), mesh=same, data_dims="rows")
    for step in range(0, 2 * STEPS, 2):
        for each in (step, step + 1):  # two micro-batches
            wanted = [reference.loss(rank, each) for rank in range(2)]
            torch.stack(wanted).mean().backward()
            loss = model.loss(mine, each)
            assert loss.item() == pytest.approx(wanted[mine].item(), abs=1e-5)
            with engine.no_sync() if each == step else nullcontext():
                loss.backward()
        for optimizer in (plain, engine.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    assert model.head.weight is model.embedding.weight
    state = engine.state_dict()
    if state:
        torch.testing.assert_close(full(state["head.weight"]), reference.head.weight.detach())


def test_a_tied_weight_may_be_divided(cluster: Clusters) -> None:
    cluster(4).run(tied_body)


def values_body(context: Context, folder: str) -> None:
    """Values in and out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine, part = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    group = mesh.get_group("dp")
    model = parallel(mesh["tp"])
    model[0].up.bias.requires_grad_(False)
    engine = zero.initialize(model, sgd(model), zero.Config(timeout=20), process_group=group)
    weight, before = model[0].up.weight, whole()[0].up.weight.detach()
    for use in (lambda: weight + 1, lambda: weight.to_local() + 1, weight.full_tensor):
        with pytest.raises(zero.ShardedParameterError, match=r"0\.up\.weight"):
            use()
    assert (weight.shape, weight.placements) == ((HIDDEN, WIDTH), (Shard(0),))
    loss_of(model, mine, 0).backward()
    gradient = weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient.shape == weight.shape
    reference = whole()
    torch.stack([loss_of(reference, rank, 0) for rank in range(2)]).mean().backward()
    expected = reference[0].up.weight.grad
    torch.testing.assert_close(gradient.full_tensor(), expected)  # type: ignore[attr-defined]
    torch.testing.assert_close(full(engine.full_gradient("0.up.weight")), expected)
    torch.testing.assert_close(full(engine.full_master("0.up.weight")), before)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    state = engine.state_dict()
    assert bool(state) == (mine == 0)
    if state:
        assert isinstance(state["0.up.weight"], DTensor)
        torch.testing.assert_close(full(state["0.up.bias"]), whole()[0].up.bias.detach())
    engine.save_checkpoint(f"{folder}/{part}")
    engine.save_checkpoint(f"{folder}/even {part}", include="0.*")
    engine.load_state_dict(whole().state_dict())  # whole tensors, of which each takes its block
    torch.testing.assert_close(full(engine.full_master("0.up.weight")), before)
    engine.load_checkpoint(f"{folder}/{part}")
    after = full(engine.full_master("0.up.weight"))
    assert not torch.equal(after, before)
    engine.load_state_dict(whole().state_dict())
    engine.load_state_dict(state)
    assert torch.equal(full(engine.full_master("0.up.weight")), after)
    with zero.gathered(weight, write_rank=0), torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(full(engine.full_master("0.up.weight")), 2 * after)
    with pytest.raises(zero.StateError, match=r"was saved as block \(\d,\) of \(2,\) of"):
        engine.load_checkpoint(f"{folder}/even {1 - part}", weights_only=True)
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(mine)]))
    with pytest.raises(zero.RankMismatchError, match=r"weight \(12, 12\) as S\(0\) .* and .* as S\(1\)"):
        zero.initialize(model, sgd(model), zero.Config(timeout=20), mesh=mesh, data_dims="dp")
    rows, shape = full(model.weight.detach())[4 * part : 4 + 8 * part], model.weight.shape
    of_own = DTensor.from_local(rows, mesh["tp"], [Shard(0)], run_check=False, shape=shape, stride=(WIDTH, 1))
    model.weight = nn.Parameter(of_own)
    with pytest.raises(zero.ModelError, match=r"has shape \([48], 12\), where torch cuts \(6, 12\)"):
        zero.initialize(model, sgd(model), mesh=mesh, data_dims="dp")
    model = parallel(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "tp", "other"))
    with pytest.raises(zero.ModelError, match=r"along tp \(ranks 0, 1, 2, 3\), which is no dimension of the"):
        zero.initialize(model, sgd(model), mesh=cube, data_dims="dp")


def test_values_go_in_and_out_by_blocks(cluster: Clusters, tmp_path: Any) -> None:
    cluster(4).run(values_body, folder=str(tmp_path))


def refused_body(context: Context) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = whole()
    fully_shard(model, mesh=mesh)
    with pytest.raises(zero.ModelError, match=r"is a DTensor over ranks with different data.*fully_shard"):
        zero.initialize(model, sgd(model))
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), both, [Replicate(), Shard(0)]))
    with pytest.raises(zero.ModelError, match=r"without those of the data, dp, only") as caught:
        zero.initialize(model, sgd(model), mesh=both, data_dims="dp")
    assert "local_modules" not in str(caught.value), "it is not divided there"
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallel(other["tp"])
    group = other.get_group("dp")
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    rest = adamw(nn.ParameterList(p for p in model.parameters() if p.dim() != 2))
    with pytest.raises(
        zero.OptimizerError, match=r"Muon steps whole parameters, and 0\.up\.weight, .* that the engine"
    ):
        zero.initialize(model, [matrices, rest], process_group=group)
    engine = zero.initialize(model, process_group=group)
    with pytest.raises(zero.OptimizerError, match=r"Muon steps whole .* mesh= and data_dims="):
        engine.attach([matrices, rest])


def test_what_is_refused(cluster: Clusters) -> None:
    cluster(2).run(refused_body)
