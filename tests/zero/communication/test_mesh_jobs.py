"""Jobs whose ranks form a mesh: `zero.initialize(..., mesh=..., data_dims=...)`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import WIDTH, MixtureModel, Stage, mesh_of, mixture, tokens
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.training import Run, adamw, errors_of, relative_error, same_bits, state_error

RANKS, STEPS, CLIP = 4, 3, 0.05

Models = list[nn.Module]


def unsharded(models: Models, losses: Callable[[int], list[Tensor]], clip: float | None) -> Any:
    """Losses, norms and final weights of one process. losses: of the ranks, whose mean is trained."""
    optimizers = [sgd(model) for model in models]
    told, norms = [], []
    for step in range(STEPS):
        values = losses(step)
        torch.stack(values).mean().backward()
        told.append([value.item() for value in values])
        parameters = [p for model in models for p in model.parameters()]
        norms.append(float(nn.utils.clip_grad_norm_(parameters, clip or 1e9)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return told, norms, [{k: v.detach() for k, v in model.state_dict().items()} for model in models]


def expert_body(context: Context) -> dict[str, float]:
    """Experts of each rank's own, which differ in size, in the engine that has the rest."""
    references = {}
    for ranks in (2, RANKS):  # with different data
        whole = mixture(uneven=9)

        def losses_of(step: int, model: nn.Module = whole, ranks: int = ranks) -> list[Tensor]:
            return [model(tokens(step, rank)) for rank in range(ranks)]

        references[ranks] = unsharded([whole], losses_of, CLIP)
    meshes = {name: mesh_of((name, 2), ("ep", 2)) for name in ("dp", "tp")}
    errors = {}
    for name, (settings, others, shards) in EXPERTS.items():
        mesh, dims = meshes[others], ("dp", "ep") if others == "dp" else ("ep",)
        expert = mesh.get_local_rank("ep")
        model = mixture(mesh.get_group("ep"), uneven=9)
        config = zero.Config(timeout=20, local_modules={"blocks.*.experts": "ep"}, **settings)
        engine = zero.initialize(
            model, sgd(model), config, mesh=mesh, data_dims=dims, shard_dims=shards or dims
        )
        told, norms, (state,) = references[engine.world_size]
        mine = {
            key.replace(f"experts.{expert}", "experts.0"): value
            for key, value in state.items()
            if f"experts.{1 - expert}" not in key
        }
        losses, seen, clips = [], [], "clip_norm" in settings
        for step in range(STEPS):
            loss = model(tokens(step, engine.rank).to(engine.device))
            if clips:
                train_on(engine, loss)
                seen.append(float(engine.grad_norm or 0))
            else:  # by the program
                loss.backward()
                seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            losses.append(loss.item())
        errors[f"{name}: losses"] = relative_error(losses, [each[engine.rank] for each in told])
        errors[f"{name}: norms"] = relative_error(seen, norms)
        found = engine.state_dict()
        assert bool(found) == (others not in dims or mesh.get_local_rank(others) == 0)
        errors[f"{name}: weights"] = state_error(found, mine) if found else 0.0
    return errors


HOST: dict[str, Any] = {"offload": {"optimizer": "host", "params": "host"}, "clip_norm": CLIP}
EXPERTS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "stage 1": ({"stage": 1, "clip_norm": CLIP}, "dp", None),
    "stage 2": ({"stage": 2, "clip_norm": CLIP}, "dp", None),
    "stage 3": ({"stage": 3, "clip_norm": CLIP}, "dp", None),
    "clipped by the program": ({"stage": 3}, "dp", None),
    "on the host": (HOST, "dp", None),
    "copies": ({"clip_norm": CLIP}, "dp", "dp"),
    "a copy for each rank": ({"stage": 2, "clip_norm": CLIP}, "dp", "ep"),
    "a copy for each rank, on the host": (HOST, "dp", "ep"),
    "one rank with each, copied along tp": ({"clip_norm": CLIP}, "tp", None),
}
"""Settings, the mesh's dimension beside that of experts, and those that parameters are sharded over."""


def test_experts_of_each_rank_train_as_in_one_process(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(expert_body, limit=60):
        assert max(found.values()) < 1e-6, found


def beside(model: nn.Module) -> list[Optimizer]:
    """Matrices are stepped whole, divided among the ranks that have the same, and the rest by a kernel."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]


def ways_body(context: Context) -> dict[str, float]:
    """Experts of each rank's own: whole parameters, compiled, at stage 0; and whole values."""
    mesh = mesh_of(("dp", 2), ("ep", 2))
    expert, found = mesh.get_local_rank("ep"), {}
    ways: dict[str, tuple[dict[str, Any], Any]] = {
        "stage 0": ({"stage": 0}, adamw),
        "whole parameters": ({}, beside),
        "compiled": ({"compile": zero.Compile(inner="aot_eager"), "timeout": 60}, adamw),
    }
    states = {}
    for make in (adamw, beside):
        whole = mixture()
        optimizers = members(make(whole))
        for step in range(2):
            torch.stack([whole(tokens(step, rank)) for rank in range(RANKS)]).mean().backward()
            take_turns(optimizers)
        states[make] = whole.state_dict()
    for name, (settings, make) in ways.items():
        model = mixture(mesh.get_group("ep"))
        config = zero.Config(**{"timeout": 20, "local_modules": {"blocks.*.experts": "ep"}, **settings})
        made = make(model)
        engine = zero.initialize(model, made, config, mesh=mesh, data_dims=("dp", "ep"))
        for step in range(2):
            model(tokens(step, context.rank).to(engine.device)).backward()
            take_turns(members(made))
        state = engine.state_dict()
        mine = {n: states[make][n.replace("experts.0", f"experts.{expert}")] for n in state}
        found[name] = state_error(state, mine)
    weight, shared = (model.get_parameter(n) for n in ("blocks.0.experts.0.up.weight", "head.bias"))
    with torch.no_grad(), zero.gathered([weight, shared], write_rank=2):
        weight.fill_(context.rank + 1)
        shared.fill_(context.rank + 1)
    with zero.gathered([weight, shared]):  # from the ranks in rank 2's place: 2 and 3
        found["written"] = abs(float(weight.mean()) - (3 + expert)) + abs(float(shared) - 3)
    engine.load_state_dict({n: value + 1 for n, value in state.items()} if state else None)
    again = engine.state_dict()
    found["loaded"] = max((float((again[n] - v - 1).abs().max()) for n, v in state.items()), default=0.0)
    return found


def members(given: Any) -> list[Optimizer]:
    return given if isinstance(given, list) else [given]


def take_turns(optimizers: list[Optimizer]) -> None:
    for each in optimizers:
        each.step()
    for each in optimizers:
        each.zero_grad()


def test_experts_in_other_ways(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(ways_body, limit=120):
        assert max(found.values()) < 1e-6, found


def alone_body(context: Context) -> list[float | None]:
    """One rank for each stage's data: norms that only one rank reads, of steps that clip nothing."""
    mesh = mesh_of(("pp", 2), ("dp", 1))
    model = Stage(context.rank)
    config = zero.Config(timeout=20, local_modules={"*": "pp"})
    engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
    norms: list[float | None] = []
    for step in range(2):
        train_on(engine, model(tokens(step, 0).to(engine.device)))
        if context.rank == 0 or step:
            norm = engine.grad_norm
            norms.append(None if norm is None else float(norm))
    return norms


def test_a_norm_that_one_stage_reads_is_that_of_all(cluster: Clusters) -> None:
    first, second = cluster(2).run(alone_body)
    assert first == [None, *second]
    assert first[1] is not None


def frozen_body(context: Context) -> tuple[str, list[float]]:
    """A stage without an optimizer is refused; one that is frozen steps beside the others."""
    mesh = mesh_of(("pp", 2), ("dp", 1))
    model = Stage(context.rank)
    optimizer, frozen = sgd(model), context.rank == 1
    config = zero.Config(timeout=20, clip_norm=CLIP, local_modules={"*": "pp"})
    arranged = {"mesh": mesh, "data_dims": "dp"}
    said = refused(lambda: zero.initialize(model, None if frozen else optimizer, config, **arranged))
    model.requires_grad_(not frozen)
    engine = zero.initialize(model, optimizer, config, **arranged)
    norms = []
    for step in range(2):
        if not frozen:
            model(tokens(step, 0).to(engine.device)).backward()
        optimizer.step()
        norms.append(float(engine.grad_norm or 0))
        optimizer.zero_grad()
    return said, norms


def test_a_frozen_stage_steps_with_the_others(cluster: Clusters) -> None:
    (said, norms), other = cluster(2).run(frozen_body)
    assert said.startswith("RankMismatchError: the ranks disagree about how many optimizers there are"), said
    assert "the same number of optimizers" in said
    assert norms[0] > 0
    assert other == (said, norms)


def stages_body(context: Context) -> dict[str, float]:
    """Along one dimension ranks have models of their own: one norm, and one decision about an overflow."""
    mesh = mesh_of(("pp", 2), ("dp", 2))
    stage, place = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    models: Models = [Stage(0), Stage(1)]
    _, norms, states = unsharded(
        models,
        lambda step: [sum(m(tokens(step, rank)) for m in models) for rank in range(2)],  # type: ignore[misc]
        CLIP,
    )
    found = {}
    for level in (1, 3):
        model = Stage(stage)
        config = zero.Config(stage=level, timeout=20, clip_norm=CLIP, local_modules={"*": "pp"})
        engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
        assert (engine.rank, engine.world_size) == (place, 2)
        seen = []
        for step in range(STEPS):
            train_on(engine, model(tokens(step, place).to(engine.device)))
            seen.append(float(engine.grad_norm or 0))
        found[f"stage {level}: norms"] = relative_error(seen, norms)
        state = engine.state_dict()
        found[f"stage {level}: weights"] = state_error(state, states[stage]) if state else 0.0
    model = Stage(stage)
    config = zero.Config(timeout=20, precision="fp16", local_modules={"*": "pp"})
    engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
    loss = model(tokens(0, place).to(engine.device, torch.float16))
    train_on(engine, loss * (float("inf") if context.rank == 3 else 1))
    found["not skipped"] = 1.0 - engine.skipped_steps
    return found


def test_models_of_their_own_have_one_norm_and_one_overflow(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(stages_body, limit=60):
        assert max(found.values()) < 1e-6, found


def mixed_body(context: Context) -> dict[str, float]:
    """A pipeline of which only one stage has experts; the norm that the program measures is not the job's."""
    mesh = mesh_of(("pp", 2), ("ep", 2))
    stage, place = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    whole: Models = [Stage(0), mixture()]
    _, norms, states = unsharded(
        whole,
        lambda step: [sum(m(tokens(step, rank)) for m in whole) for rank in range(2)],  # type: ignore[misc]
        None,
    )
    model = mixture(mesh.get_group("ep")) if stage else Stage(0)
    config = zero.Config(timeout=20, local_modules={"*": "pp", "blocks.*.experts": "ep"})
    optimizer = sgd(model)
    engine = zero.initialize(model, optimizer, config, mesh=mesh, data_dims="ep")
    seen = [float(engine.grad_norm or 0)]  # asks for it
    for step in range(STEPS):
        model(tokens(step, place).to(engine.device)).backward()
        if stage:
            nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        seen.append(float(engine.grad_norm or 0))
        optimizer.zero_grad()
    state = engine.state_dict()
    mine = {n: states[stage][n.replace("experts.0", f"experts.{place}")] for n in state}
    return {"norms": relative_error(seen[1:], norms), "weights": state_error(state, mine) if state else 0.0}


def test_one_stage_of_a_pipeline_has_experts(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(mixed_body):
        assert max(found.values()) < 1e-6, found


class Counted(nn.Module):
    """A linear layer, and extra state."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.count = count

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def loads_body(context: Context) -> dict[str, Any]:
    """What any rank's state dict lacks is told on all; extra state stays with its stage, or its expert."""
    found: dict[str, Any] = {}
    ways: dict[str, tuple[Any, dict[str, str], Any]] = {
        "copies": (mesh_of(("dp", 2), ("tp", 2)), {}, "dp"),
        "stages": (mesh_of(("pp", 2), ("dp", 2)), {"*": "pp"}, "dp"),
        "experts": (mesh_of(("dp", 2), ("ep", 2)), {"1": "ep"}, ("dp", "ep")),
    }
    for name, (mesh, local, dims) in ways.items():
        model = nn.Sequential(Counted(context.rank), Counted(100**context.rank))
        config = zero.Config(timeout=20, local_modules=local)
        engine = zero.initialize(model, adamw(model), config, mesh=mesh, data_dims=dims)
        state = engine.state_dict()
        engine.load_state_dict(state or None)
        counts = [each.count for each in model]
        given = None if context.rank == 1 else state
        bad = refused(partial(engine.load_state_dict, given))
        found[name] = counts, bad
    return found


def test_state_dicts_on_meshes(cluster: Clusters) -> None:
    every = cluster(RANKS).run(loads_body)
    assert [each["copies"][0] for each in every] == [[0, 1]] * 4
    assert [each["stages"][0] for each in every] == [[0, 1], [0, 1], [2, 10000], [2, 10000]]
    assert [each["experts"][0] for each in every] == [[0, 1], [0, 100]] * 2
    for each in every:
        for name in ("copies", "experts"):
            assert "rank 1 (dp 0, " in each[name][1], each
        assert each["stages"][1] == ""  # rank 1 has no say there


def copies_body(context: Context) -> tuple[bool, float]:
    """Copies and shards by names have the bits of those by number; what ranks have twice counts once."""
    halves = mesh_of(("dp", 2), ("tp", 2))
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"shard_ranks": 2}, {}),
        (
            {},
            {
                "mesh": mesh_of(("replicate", 2), ("shard", 2)),
                "data_dims": ("replicate", "shard"),
                "shard_dims": "shard",
            },
        ),
        ({}, {"process_group": halves.get_group("dp")}),
        ({}, {"mesh": halves, "data_dims": "dp"}),
    ]
    runs = []
    for settings, arranged in ways:
        model = fresh()
        config = zero.Config(timeout=20, clip_norm=0.5, **settings)
        engine = zero.initialize(model, adamw(model), config, **arranged)
        run = Run()
        for step in range(STEPS):
            loss = language_loss(model, step, engine.rank)
            train_on(engine, loss)
            run.losses.append(loss.item())
            run.norms.append(float(engine.grad_norm or 0))
        run.state = engine.state_dict()
        runs.append(run)
    by_number, by_name, group, halved = runs
    equal = by_number.norms == by_name.norms and same_bits(by_number, by_name)
    return equal, errors_of(halved, group)


def test_copies_by_name_and_ranks_with_the_same_data(cluster: Clusters) -> None:
    for equal, error in cluster(RANKS).run(copies_body, limit=60):
        assert equal
        assert error < 1e-6


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except zero.ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def arguments_body(context: Context) -> dict[str, str]:
    """What is refused before anything changes: afterwards the same model is trained."""
    mesh = mesh_of(("dp", 2), ("tp", 2))
    model = fresh()
    optimizer: Optimizer = adamw(model)

    def say(settings: dict[str, Any] | None = None, **arranged: Any) -> str:
        config = zero.Config(timeout=20, **(settings or {}))
        return refused(lambda: zero.initialize(model, optimizer, config, **arranged))

    both = {"mesh": mesh, "data_dims": "dp"}
    said = {
        "two": say(**both, process_group=mesh.get_group("dp")),
        "number": say({"shard_ranks": 2}, **both),
        "class": say(mesh=[0, 1]),
        "none": say(mesh=mesh),
        "empty": say(mesh=mesh, data_dims=()),
        "missing": say(mesh=mesh, data_dims=("dp", "cp")),
        "number of one": say(mesh=mesh, data_dims=1),
        "same data": say(**both, shard_dims="tp"),
        "stage 0": say({"stage": 0}, mesh=mesh, data_dims=("dp", "tp"), shard_dims="tp"),
        "no mesh": say(data_dims="dp"),
        "local": say({"local_modules": {"blocks.0": "tp"}}),
        "local dimension": say({"local_modules": {"blocks.0": "ep"}}, **both),
        "local name": say({"local_modules": {"experts": "tp"}}, **both),
    }
    if context.rank == 3:
        model.norm = nn.LayerNorm(3)
        optimizer = adamw(model)
    said["shapes"] = say(**both)
    said["declared"] = say({"local_modules": {"norm": "tp"}}, **both)
    if context.rank == 3:
        model = fresh()
        optimizer = adamw(model)
    said["other shards"] = say(
        mesh=mesh, data_dims=("dp", "tp"), shard_dims="dp" if context.rank == 3 else ("dp", "tp")
    )
    engine = zero.initialize(model, optimizer, zero.Config(timeout=20), **both)
    train_on(engine, language_loss(model, 0, engine.rank))
    optimizer.param_groups[0]["lr"] *= 1 + mesh.get_local_rank("tp")
    said["rates"] = refused(lambda: train_on(engine, language_loss(model, 1, engine.rank)))
    return said


def test_what_is_refused(cluster: Clusters) -> None:
    for rank, said in enumerate(cluster(RANKS).run(arguments_body, limit=60)):
        shapes, shards, declared = (said.pop(each) for each in ("shapes", "other shards", "declared"))
        assert declared.startswith("RankMismatchError: the ranks disagree about the shapes of what local"), (
            said
        )
        assert "rank 1 (dp 0, tp 1) and norm.weight (3,) on rank 3 (dp 1, tp 1)" in declared
        rates = said.pop("rates")
        assert rates.startswith("RankMismatchError: param_groups[0]['lr'] is"), rates
        assert "on rank 0 (dp 0, tp 0) and" in rates
        assert "on rank 1 (dp 0, tp 1)" in rates
        assert shards.startswith("RankMismatchError: mesh, data_dims, shard_dims"), shards
        assert all(each.startswith("ConfigError: ") for each in said.values()), said
        assert "leave process_group out" in said["two"]
        assert "leave shard_ranks out" in said["number"]
        assert "got list" in said["class"]
        assert "say along which ranks have different data" in said["none"]
        assert "has no dimension 'cp'; it has dp, tp" in said["missing"]
        assert "has no dimension 1; it has dp, tp" in said["number of one"]
        assert "along tp ranks have the same data" in said["same data"]
        assert "pass it, zero.initialize(..., mesh=mesh" in said["local"]
        assert "no module with parameters is named 'experts'" in said["local name"]
        assert shapes.startswith("RankMismatchError: the ranks disagree about the model"), (rank, shapes)
        assert "on rank 3 (dp 1, tp 1)" in shapes
        assert "local_modules={'blocks.*.experts': 'ep'}" in shapes
        assert "{'*': 'tp'}" in shapes


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))


def undeclared_body(context: Context) -> list[str]:
    """Experts that differ by rank, and are not declared: also where all else differs, and where only their
    class says what they are. Not those that every rank has, nor a model that is nothing else."""
    mesh = mesh_of(("dp", 2), ("ep", 2))
    model = mixture(mesh.get_group("ep"))
    same = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(context.rank)
    unseeded = MixtureModel(mesh.get_group("ep"))
    by_class = nn.Sequential(same, nn.ModuleDict({"feed": GroupedExperts()}))
    declared = nn.ModuleDict({"experts": GroupedExperts(), "shared_experts": nn.Linear(WIDTH, WIDTH)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (model, unseeded, by_class, GroupedExperts(), declared):
            config = zero.Config(timeout=20, local_modules={"experts": "ep"} if each is declared else {})
            zero.initialize(each, sgd(each), config, mesh=mesh, data_dims=("dp", "ep"))
    uneven = mixture(mesh.get_group("ep"), uneven=9)
    arranged = {"mesh": mesh, "data_dims": ("dp", "ep")}
    shapes = refused(lambda: zero.initialize(uneven, sgd(uneven), zero.Config(timeout=20), **arranged))
    return [shapes, *(str(each.message) for each in caught)]


def test_undeclared_experts_are_told(cluster: Clusters) -> None:
    (shapes, said, unseeded, by_class), *others = cluster(RANKS).run(undeclared_body)
    assert "built experts with different values: blocks.0.experts, blocks.1.experts" in unseeded
    assert "experts of expert parallelism must be declared" in by_class
    assert "local_modules={'*.feed': 'ep'}" in by_class
    assert shapes.startswith("RankMismatchError: the ranks disagree about the model")
    assert "local_modules={'blocks.*.experts': 'ep'}" in shapes
    assert "local_modules={'blocks.*.experts': 'ep'}" in said
    assert "expert parallelism" in said
    assert [len(each) for each in others] == [1, 1, 1]
