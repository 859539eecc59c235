"""torch's pipeline schedules, with an engine on the stages that each rank has."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.pipelines import (
    CLIP,
    MICRO_BATCHES,
    RANKS,
    ROWS,
    STEPS,
    WIDTH,
    Part,
    loss_of,
    numbers_of,
    reference,
    rows,
)
from tests.zero.helpers.tensor_parallel import compared
from tests.zero.helpers.training import relative_error, state_error

pytestmark = pytest.mark.host  # torch sends activations from stage to stage


def schedule_of(kind: Any, parts: list[Part], numbers: list[int], group: Any, **options: Any) -> Any:
    """This rank's part of a schedule."""
    stages = [
        PipelineStage(part, n, group.size() * len(parts), torch.device("cpu"), group=group, **options)
        for part, n in zip(parts, numbers, strict=True)
    ]
    return kind(stages if len(parts) > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of)


WAYS = [
    (ScheduleGPipe, 3),
    (Schedule1F1B, 1),
    (Schedule1F1B, 2),
    (Schedule1F1B, 3),
    (ScheduleInterleaved1F1B, 2),
    (ScheduleInterleaved1F1B, 3),
    (ScheduleInterleavedZeroBubble, 1),
    (ScheduleInterleavedZeroBubble, 3),
    (ScheduleZBVZeroBubble, 2),
    (ScheduleZBVZeroBubble, 3),
]
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
AT_ONCE = {"dw_builder": lambda: lambda: None}
WHOLE: dict[Any, Any] = {ScheduleInterleavedZeroBubble: AT_ONCE, ScheduleZBVZeroBubble: AT_ONCE}
"""What has a schedule's stages compute all gradients at once."""


def pipeline_body(context: Context) -> dict[str, float]:
    losses, norms, weights = reference()
    mesh = mesh_of(("pp", 2), ("dp", 2))
    number, place = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    found = {}
    for kind, stage in WAYS:
        numbers = numbers_of(kind, number)
        several = len(numbers) > 1
        parts = [Part(n, 1) for n in numbers] if several else [Part(2 * number, 2)]
        optimizer = torch.optim.SGD(
            [p for part in parts for p in part.parameters()], lr=0.05, momentum=0.9, nesterov=True
        )
        by_program = (kind, stage) == (ScheduleZBVZeroBubble, 3)
        clip = None if by_program else CLIP
        config = zero.Config(stage=stage, timeout=20, clip_norm=clip, local_modules={"*": "pp"})
        engine = zero.initialize(parts if several else parts[0], optimizer, config, mesh=mesh, data_dims="dp")
        schedule = schedule_of(kind, parts, numbers, mesh.get_group("pp"), **WHOLE.get(kind, {}))
        told, seen, gathers, keeps = [], [], [], (kind, stage) == (ScheduleInterleaved1F1B, 3)
        for step in range(STEPS):
            said: list[Tensor] = []
            given = (rows(step, place),) if number == 0 else ()
            last = 2 * len(parts) - 1 in numbers
            ends = {"target": torch.ones(ROWS, WIDTH), "losses": said} if last else {}
            engine.traffic.clear()
            with zero.gathered(engine.module) if keeps and step else nullcontext():
                schedule.step(*given, **ends)
            gathers.append(engine.traffic.calls["all_gather"])
            if by_program:
                engine.clip_grad_norm_(CLIP)
            optimizer.step()
            seen.append(float(engine.grad_norm or 0))
            optimizer.zero_grad()
            told += [torch.stack(said).mean().item()] if said else []
        if keeps:  # one for each layer, instead of several
            assert gathers == [max(gathers), len(parts), len(parts)]
            assert gathers[0] >= 2 * MICRO_BATCHES, gathers
        name = f"{kind.__name__}, stage {stage}"
        found[f"{name}: norms"] = relative_error(seen, norms)
        found[f"{name}: losses"] = relative_error(told, [each[place] for each in losses]) if told else 0.0
        state = {key.split(".", 1)[1] if several else key: v for key, v in engine.state_dict().items()}
        found[f"{name}: weights"] = state_error(state, {key: weights[key] for key in state})
    return found


def test_schedules_train_as_one_process(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(pipeline_body, limit=60):
        assert max(found.values()) < 1e-6, found


def mixed_body(context: Context) -> dict[str, float]:
    """Stages whose pairs of layers are divided along a third dimension."""
    losses, norms, weights = reference()
    mesh = mesh_of(("pp", 2), ("dp", 2), ("tp", 2))
    number, place = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    part = Part(2 * number, 2)
    plan = {f"layers.{2 * number}": ColwiseParallel(), f"layers.{2 * number + 1}": RowwiseParallel()}
    parallelize_module(part, mesh["tp"], plan)
    optimizer = sgd(part)
    config = zero.Config(timeout=60, clip_norm=CLIP, local_modules={"*": "pp"})
    engine = zero.initialize(part, optimizer, config, mesh=mesh, data_dims="dp")
    schedule = schedule_of(Schedule1F1B, [part], [number], mesh.get_group("pp"))
    told, seen = [], []
    for step in range(STEPS):
        said: list[Tensor] = []
        given = (rows(step, place),) if number == 0 else ()
        ends = {"target": torch.ones(ROWS, WIDTH), "losses": said} if number == 1 else {}
        schedule.step(*given, **ends)
        optimizer.step()
        seen.append(float(engine.grad_norm or 0))
        optimizer.zero_grad()
        told += [float(torch.stack(said).mean())] if said else []
    mine = {name: weights[name] for name, _ in part.named_parameters()}
    found = {"norms": relative_error(seen, norms), "weights": compared(engine, part, mine)}
    return found | ({"losses": relative_error(told, [each[place] for each in losses])} if told else {})


def test_a_pipeline_of_tensor_parallel_stages(cluster: Clusters) -> None:
    for found in cluster(8).run(mixed_body, limit=100):
        assert max(found.values()) < 1e-6, found


def refused_body(context: Context) -> tuple[str, str]:
    """Gradients that a schedule computes by themselves, as zero bubble does; a call of several parts."""
    parts = [Part(0, 1), Part(1, 1)]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.05)
    engine = zero.initialize(parts, optimizer, zero.Config(timeout=20))
    weight = parts[1].layers["1"].weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(zero.UsageError) as stepped:
        optimizer.step()
    with pytest.raises(zero.UsageError) as called:
        engine(rows(0, 0))
    return str(stepped.value), str(called.value)


def zero_bubble_body(context: Context) -> None:
    """Gradients of weights that a schedule computes by themselves, in a pipeline of one rank."""
    mesh = mesh_of(("pp", 1), ("dp", 2))
    for stage, error in ((1, RuntimeError), (3, zero.ShardedParameterError)):
        parts = [Part(0, 1), Part(1, 1)]
        config = zero.Config(timeout=20, stage=stage, local_modules={"*": "pp"})
        optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.05)
        engine = zero.initialize(parts, optimizer, config, mesh=mesh, data_dims="dp")
        schedule = schedule_of(ScheduleInterleavedZeroBubble, parts, [0, 1], mesh.get_group("pp"))
        with pytest.raises(error) as refused:
            schedule.step(rows(0, 0), target=torch.ones(ROWS, WIDTH))
        told = refused.value if stage == 3 else refused.value.__cause__
        assert isinstance(told, zero.ZeroError)
        assert "GPipe, 1F1B and Interleaved1F1B run; " in str(told)
        del engine


def test_gradients_of_weights_by_themselves_are_refused(cluster: Clusters) -> None:
    if TORCH < (2, 13):
        pytest.skip("the schedule sends to its own rank, which gloo does not, in torch before 2.13")
    cluster(2).run(zero_bubble_body)


def test_what_does_not_run_is_told(cluster: Clusters) -> None:
    for stepped, called in cluster(1).run(refused_body):
        assert "`.grad` was set by something else than a backward: 1.layers.1.weight" in stepped
        assert "begin with none, optimizer.zero_grad(), instead of zeros" in stepped
        assert "GPipe, 1F1B and Interleaved1F1B run" in stepped
        assert called == "the engine has several parts of a model: call the parts, not the engine"


def test_lists_that_are_no_parts() -> None:
    part = Part(0, 1)
    for given in ([], [part, part], [part, 3]):
        with pytest.raises(zero.ModelError, match="expected a list of"):
            zero.initialize(given, None)  # type: ignore[arg-type]
