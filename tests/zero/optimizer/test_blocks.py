"""Parameters that are divided along other dimensions of a mesh, put together from their blocks for a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.tensor_parallel import HIDDEN, WIDTH, compared, parallel, whole
from tests.zero.helpers.training import adamw, relative_error
from tests.zero.helpers.whole_optimizers import Trust
from zero.optimizer.pieces import blocks_of
from zero.planning.plan import Plan
from zero.sharding.distributed import block_of, divided_along, local_of

STEPS, CLIP = 3, 0.05

pytestmark = pytest.mark.host  # meshes of gloo's


def trust(model: nn.Module) -> list[Optimizer]:
    return [Trust(model.parameters())]


def muon(model: nn.Module) -> list[Optimizer]:
    """It iterates in bf16, so that its steps, from sums in another order, are the same only nearly."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4)]


OPTIMIZERS = {"trust": trust, "muon": muon}


def loss_of(model: nn.Module, step: int, row: int) -> Tensor:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + row))
    return model(x).square().mean()


def unsharded(name: str) -> tuple[nn.Module, list[Optimizer], list[list[float]]]:
    """What one process trains, and its losses by step and rank with other data."""
    model, told = whole(), []
    optimizers = OPTIMIZERS[name](model)
    for step in range(STEPS):
        losses = [loss_of(model, step, row) for row in range(2)]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        told.append([loss.item() for loss in losses])
    return model, optimizers, told


def trained(
    mesh: Any, name: str, steps: int = STEPS, **settings: Any
) -> tuple[zero.Engine, nn.Module, list[float]]:
    model = parallel(mesh["tp"])
    config = zero.Config(timeout=20, clip_norm=CLIP, **settings)
    first = adamw(model) if name == "muon" else OPTIMIZERS[name](model)
    engine = zero.initialize(model, first, config, mesh=mesh, data_dims="dp")
    if name == "muon":
        engine.attach(OPTIMIZERS[name](model))
    losses = []
    for step in range(steps):
        engine.traffic.clear()
        loss = loss_of(model, step, mesh.get_local_rank("dp"))
        train_on(engine, loss)
        losses.append(loss.item())
    return engine, model, losses


def error_of_state(
    engine: zero.Engine, model: nn.Module, reference: nn.Module, optimizers: list[Optimizer]
) -> float:
    """The largest relative error of this rank's blocks of the state, and of state that has none."""
    states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    worst = 0.0
    for name, parameter in model.named_parameters():
        found = engine.full_optimizer_state(name)
        for key, value in states[reference.get_parameter(name)].items():
            if isinstance(value, Tensor) and local_of(parameter).numel():
                wanted = block_of(parameter, value) if value.shape == parameter.shape else value
                error = (found[key] - wanted).norm() / (wanted.norm() + 1e-12)
                worst = max(worst, float(error))
    return worst


CASES: dict[str, list[dict[str, Any]]] = {
    "trust": [{"stage": 0}, {"offload": zero.Offload(optimizer="host")}],
    "muon": [{"stage": 3}],
}


def parity_body(context: Context, path: str) -> dict[str, dict[str, float]]:
    """At several stages and in another tier. Saves what was trained last, and loads it on another mesh."""
    mesh = mesh_of(("dp", 2), ("tp", 2))
    row, found = mesh.get_local_rank("dp"), {}
    check_busiest(mesh)
    for name, cases in CASES.items():
        reference, optimizers, told = unsharded(name)
        weights = {n: p.detach() for n, p in reference.named_parameters()}
        for settings in cases:
            engine, model, losses = trained(mesh, name, **settings)
            check_traffic(engine, name, mesh, **settings)
            found[f"{name}, {settings}"] = {
                "losses": relative_error(losses, [each[row] for each in told]),
                "weights": compared(engine, model, weights),
                "state": error_of_state(engine, model, reference, optimizers),
            }
        engine.save_checkpoint(f"{path}/{name}")
        alone = mesh_of(("dp", 1), ("tp", 4))
        engine, model, _ = trained(alone, name, steps=0)
        engine.load_checkpoint(f"{path}/{name}")
        found[f"{name}, loaded on (dp 1, tp 4)"] = {
            "weights": compared(engine, model, weights),
            "state": error_of_state(engine, model, reference, optimizers),
        }
        check_traffic_of_blocks_alone(name, alone)
        check_room(name, alone)
    return found


def planned(name: str, mesh: Any, **settings: Any) -> tuple[Plan, list[Optimizer]]:
    model, config = parallel(mesh["tp"]), zero.Config(clip_norm=CLIP, **settings)
    optimizers = OPTIMIZERS[name](model)
    return zero.plan(model, optimizers, config, mesh=mesh, data_dims="dp"), optimizers


def check_traffic(engine: zero.Engine, name: str, mesh: Any, **settings: Any) -> None:
    plan, _ = planned(name, mesh, **settings)
    assert plan.traffic.collectives["all_to_all"] == engine.traffic.bytes["all_to_all"] > 0


def check_traffic_of_blocks_alone(name: str, mesh: Any) -> None:
    """Where ranks have blocks and no slices, nothing but these is exchanged."""
    plan, optimizers = planned(name, mesh)
    stepped = optimizers[0].param_groups[0]["params"]
    nbytes = sum(3 * 4 * p.numel() for p in stepped if divided_along(p))  # gradients, there and back again
    assert plan.traffic.collectives == {"all_to_all": nbytes}
    assert plan.traffic.link == nbytes // mesh.size() * (mesh.size() - 1) // mesh.size()


def alone_body(context: Context, path: str, name: str) -> dict[str, float]:
    """What a mesh has saved is loaded by one process, whole."""
    reference, optimizers, _ = unsharded(name)
    model = whole()
    engine = zero.initialize(model, OPTIMIZERS[name](model), zero.Config(timeout=20))
    engine.load_checkpoint(f"{path}/{name}")
    weights = {n: p.detach() for n, p in reference.named_parameters()}
    state = error_of_state(engine, model, reference, optimizers)
    return {"weights": compared(engine, model, weights), "state": state}


def test_a_step_is_that_of_one_process(cluster: Clusters, tmp_path: Path) -> None:
    every = cluster(4).run(parity_body, path=str(tmp_path), limit=60)
    every.append(
        {f"{name}, alone": cluster(1).run(alone_body, path=str(tmp_path), name=name)[0] for name in CASES}
    )
    for found in every:
        for what, errors in found.items():
            # Muon iterates in bf16, in which sums in another order are rounded to other values.
            assert errors["weights"] < (1e-5 if "muon" in what else 1e-6), (what, errors)
            assert max(errors.values()) < 1e-5, (what, errors)


def windows_body(context: Context) -> int:
    """Windows are those of the buffers that there are, however these were laid out. Returns how many groups
    are stepped whole."""
    mesh = mesh_of(("dp", 2), ("tp", 2))
    model, groups = parallel(mesh["tp"]), 0
    engine = zero.initialize(model, config=zero.Config(moments="8bit"), mesh=mesh, data_dims="dp")
    divided = [p for p in model.parameters() if divided_along(p)]
    rest = [p for p in model.parameters() if not divided_along(p)]
    engine.attach([Trust(divided), torch.optim.AdamW(rest)])
    communicator = engine._full_parameters.communicator
    for group in (group for unit in engine._full_parameters.units for group in unit.groups):
        if divided_along(group.parameters[0]):
            found = blocks_of(communicator, group, {"tp"})
            number, _ = found.sources[communicator.whole.rank]
            assert found.layouts[number].slots == group.layout.slots
            groups += 1
    return groups


def test_windows_are_those_of_the_buffers(cluster: Clusters) -> None:
    assert cluster(4).run(windows_body, limit=30) == [3] * 4


def check_room(name: str, mesh: Any) -> None:
    """Blocks never come as they are stepped: there is room for all that a rank steps of a group, in fp32."""
    plan, _ = planned(name, mesh, precision="bf16")
    groups = [(g.shard_numel, g.whole.numel) for unit in plan.units for g in unit.groups if g.whole]
    room = 4 * sum(map(max, zip(*groups, strict=True)))
    assert plan.memory.peaks["step"].optimizer == plan.memory.rest["device"].optimizer + room


def check_busiest(mesh: Any) -> None:
    """Of the whole vector one of two ranks steps all; of those in blocks the second of four steps most. These
    are the same rank, though not by their numbers."""
    model = nn.ParameterList([nn.Parameter(torch.ones(12))])
    for numel in (10, 8, 8, 8, 6):
        model.append(nn.Parameter(distribute_tensor(torch.ones(numel), mesh["tp"], [Shard(0)])))
    plan = zero.plan(model, Trust(model.parameters()), zero.Config(), mesh=mesh, data_dims="dp")
    assert sum(g.whole.numel for unit in plan.units for g in unit.groups if g.whole) == 12 + (8 + 6)


class Failing(Trust):
    """Its step fails on the ranks that have the first matrix."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.shape == (HIDDEN, WIDTH) for group in self.param_groups for p in group["params"]):
            raise ValueError("a broken step")
        super().step()


def failures_body(context: Context) -> list[str]:
    """What each rank is told: of a step that fails on some, and of other gradients on some."""
    mesh, told = mesh_of(("dp", 2), ("tp", 2)), []
    model = parallel(mesh["tp"])
    with pytest.raises(zero.OptimizerError, match=r"Trust steps whole .*give zero.initialize mesh="):
        zero.initialize(model, Trust(model.parameters()), process_group=mesh.get_group("dp"))
    config = zero.Config(timeout=20, whole_parameters=True)
    engine = zero.initialize(model, Failing(model.parameters()), config, mesh=mesh, data_dims="dp")
    with pytest.raises((ValueError, zero.OptimizerError)) as failed:
        train_on(engine, loss_of(model, 0, 0))
    told.append(f"{type(failed.value).__name__}: {failed.value}")
    model = parallel(mesh["tp"])
    engine = zero.initialize(model, Trust(model.parameters()), config, mesh=mesh, data_dims="dp")
    if mesh.get_local_rank("tp"):
        model.get_parameter("0.up.weight").requires_grad_(False)
    with pytest.raises(zero.RankMismatchError) as other:
        train_on(engine, loss_of(model, 0, 0))
    return [*told, str(other.value)]


def test_failures_are_told_to_all(cluster: Clusters) -> None:
    every = cluster(4).run(failures_body, limit=30)
    for rank, (step, gradients) in enumerate(every):
        broken = "ValueError: a broken step"
        told = "OptimizerError: the step of Failing failed on another rank, whose error says why"
        assert step in (broken, told), (rank, step)
        assert gradients.startswith("which parameters have gradients is ['0.up.weight', ")
        assert "on rank 1 (dp 0, tp 1)" in gradients
    assert {step for step, _ in every} == {broken, told}
