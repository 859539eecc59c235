"""`zero.plan` and `zero plan`: what they need, say and refuse. tests/sim/test_plan.py has the numbers."""

from __future__ import annotations

import functools
import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers import synthetic
from tests.zero.helpers.commands import refused, run
from tests.zero.helpers.models import LanguageModel
from zero.tiers.swap_file import SwapFile
from zero.tiers.tier import ON_DISK

WIDTH = 128
MATRIX = WIDTH * WIDTH


def blocks(layers: int = 4, bias: bool = False) -> nn.Module:
    """bias: with it, what has a whole number of pages without it has not."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(layers)))


def deferred() -> nn.Module:
    with zero.init():
        return blocks()


def planned(ranks: int = 2, model: nn.Module | None = None, **settings: Any) -> Any:
    model = model or blocks()
    return zero.plan(model, torch.optim.AdamW(model.parameters()), zero.Config(**settings), ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_model_state_of_each_rank(ranks: int) -> None:
    """Sixteen bytes per parameter in mixed precision: 2 + 2 + 12."""
    plan = planned(ranks, precision="bf16")
    rest, each = plan.memory.rest["device"], 4 * MATRIX // ranks
    assert (rest.parameters, rest.optimizer, plan.memory.gradients["device"]) == (
        2 * each,
        12 * each,
        2 * each,
    )
    assert plan.parameters == plan.trainable == 4 * MATRIX
    assert plan.memory.host == plan.memory.disk == 0


def test_stages_share_out_more_and_more() -> None:
    peaks = [planned(8, stage=stage, precision="bf16").memory.device for stage in range(4)]
    assert peaks[0] > peaks[1] >= peaks[2] > peaks[3]


def test_compressed_traffic_is_counted_as_such() -> None:
    exact = planned(precision="bf16").traffic.collectives
    coded = planned(precision="bf16", gather_dtype="int8").traffic.collectives
    assert coded["all_gather"] * 64 == exact["all_gather"] * 33  # a byte and 1/32 instead of two
    assert coded["reduce_scatter"] == exact["reduce_scatter"]


def test_tiers_of_the_host_and_the_disk() -> None:
    host = planned(precision="bf16", offload={"optimizer": "host", "params": "host"})
    assert host.memory.rest["device"].total == 0
    assert host.memory.host == (12 + 2 + 2) * 4 * MATRIX // 2
    assert host.traffic.to_host == 2 * 4 * MATRIX // 2  # gradients
    disk = planned(precision="bf16", offload={"optimizer": "disk", "path": "."})
    assert disk.memory.disk == disk.traffic.read == disk.traffic.written == 12 * 4 * MATRIX // 2
    assert disk.memory.buffers == 3 * 12 * MATRIX // 2
    part = planned(precision="bf16", offload={"optimizer": "disk", "path": ".", "host_budget": 12 * MATRIX})
    assert part.memory.rest["host"].optimizer == part.memory.disk == 12 * MATRIX


def test_it_takes_no_memory_and_leaves_everything_as_it_is() -> None:
    """Planning for a model of 200 GB, which takes no memory."""
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(50_000, 50_000, bias=False) for _ in range(20)))
    plan = planned(64, large, precision="bf16")
    assert plan.parameters == 20 * 50_000**2
    assert str(planned(64, deferred(), precision="bf16")) == str(planned(64, precision="bf16"))
    small, config = blocks(), zero.Config(precision="bf16")
    optimizer = torch.optim.AdamW(small.parameters())
    before = {name: value.clone() for name, value in small.state_dict().items()}
    zero.plan(small, optimizer, config, ranks=4)
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == list(small.parameters())


def test_optimizers() -> None:
    """The engine's own Lion is known, and torch's optimizers make their state when they step."""
    model = blocks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lion = zero.plan(model, zero.Lion(model.parameters()), zero.Config(precision="bf16"), ranks=2)
    assert lion.memory.rest["device"].optimizer == 8 * 4 * MATRIX // 2
    own = zero.plan(model, torch.optim.RMSprop(model.parameters()), zero.Config(), ranks=2).memory
    assert own.rest["device"].optimizer == 4 * 4 * MATRIX // 2
    assert own.peaks["init"].optimizer == 0
    assert own.peaks["step"].gradients == 2 * 4 * 4 * MATRIX // 2  # reduced, and averaged


def test_optimizers_of_whole_parameters() -> None:
    """Each of their parameters is on one rank for its step, with its state.

    Of others, every rank has a slice, which a kernel steps with the gradient as it is.
    """
    model = blocks(4)
    first, *others = model.parameters()
    two = [torch.optim.Muon(others), torch.optim.AdamW([first])]
    plan = zero.plan(model, two, zero.Config(precision="bf16"), ranks=2)
    masters, most = 4 * 4 * MATRIX // 2, 2 * MATRIX  # one rank has two matrices of three
    assert plan.memory.rest["device"].optimizer == masters + 4 * most + 2 * 4 * MATRIX // 2
    assert plan.memory.peaks["step"].gradients == 2 * 4 * MATRIX // 2 + 2 * 4 * most
    assert plan.traffic.collectives["all_to_all"] == (2 + 4 + 4) * 3 * MATRIX
    factored = zero.plan(model, torch.optim.Adafactor(model.parameters()), zero.Config(), ranks=2)
    assert factored.memory.rest["device"].optimizer == 2 * 4 * (128 + 128)  # only rows and columns
    alone = zero.plan(model, torch.optim.Adafactor(model.parameters()), zero.Config(), ranks=1)
    assert alone.memory.rest["device"].optimizer == 4 * 4 * (128 + 128)


class Holder(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(size) for size in sizes)


def test_each_memory_is_that_of_the_rank_that_has_most_there() -> None:
    """One rank steps 100 elements, the other 60 and 50. The host has room for the first unit's state."""

    class Own(torch.optim.SGD):
        pass

    model = nn.Sequential(Holder(100, 50), Holder(60))
    offload = zero.Offload(optimizer="host", host_budget=800)
    config = zero.Config(precision="bf16", units=("Holder",), offload=offload, whole_parameters=True)
    plan = zero.plan(model, Own(model.parameters(), momentum=0.9), config, ranks=2)
    tiers = {unit.name: unit.groups[0].placement.optimizer[0][1].name for unit in plan.units}
    assert tiers == {"0": "host", "1": "device"}
    assert plan.memory.rest["host"].optimizer == 4 * 100 + 4 * plan.units[0].groups[0].shard_numel
    assert plan.memory.rest["device"].optimizer == 4 * 60 + 4 * plan.units[1].groups[0].shard_numel


def test_a_warning_names_the_line_that_asks_for_a_plan() -> None:
    class Own(torch.optim.SGD):
        pass

    model = blocks()
    with pytest.warns(UserWarning, match="Own will step whole parameters") as caught:
        zero.plan(model, Own(model.parameters()), ranks=2)
    assert [warning.filename for warning in caught] == [__file__]


def test_what_does_not_fit_is_refused() -> None:
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    for ranks in (0, -1, 2.0, True):
        with pytest.raises(zero.UsageError, match="ranks must be a whole number of at least 1"):
            zero.plan(model, optimizer, ranks=ranks)
    for autocast in ("bf16", torch.int8, torch.float64):
        with pytest.raises(zero.UsageError, match=r"autocast must be torch\.bfloat16"):
            zero.plan(model, optimizer, ranks=2, autocast=autocast)
    with pytest.raises(zero.ConfigError, match=r"expected a zero\.Config"):
        zero.plan(model, optimizer, {"stage": 3}, ranks=2)
    with pytest.raises(zero.OptimizerError, match="not a parameter of the model"):
        zero.plan(blocks(), optimizer, ranks=2)
    with pytest.raises(zero.OptimizerError, match="whole matrices"):
        zero.plan(model, torch.optim.Muon(model.parameters()), zero.Config(whole_parameters=False), ranks=2)
    disk = zero.Config(offload=zero.Offload(optimizer="disk", path="."))
    with pytest.raises(zero.ConfigError, match="RMSprop"):
        zero.plan(model, torch.optim.RMSprop(model.parameters()), disk, ranks=2)


def disk_body(context: Context, settings: dict[str, Any], bias: bool) -> tuple[int, int, int]:
    """Bytes taken on disk, and bytes read and written in a step in steady state."""
    torch.manual_seed(0)
    model = blocks(bias=bias)
    engine = zero.initialize(
        model, torch.optim.AdamW(model.parameters()), zero.Config(timeout=20, **settings)
    )
    moved = {os.preadv: 0, os.pwritev: 0}
    move = SwapFile._guarded

    def counted(self: SwapFile, call: Any, descriptor: int, place: int, buffer: memoryview) -> None:
        moved[call] += buffer.nbytes
        move(self, call, descriptor, place, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwapFile, "_guarded", counted)
        for _ in range(3):
            moved |= dict.fromkeys(moved, 0)
            train_a_step(engine)
    return engine._boundary.stores.swap_file(ON_DISK)._reserved, moved[os.preadv], moved[os.pwritev]


def train_a_step(engine: zero.Engine) -> None:
    x = torch.ones(2, WIDTH, device=engine.accelerator.device)
    engine.backward(engine(x).float().square().mean())
    engine.step()


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_disk_is_what_the_engine_takes_and_moves(
    cluster: Clusters, tmp_path: Path, size: int, masters: str, everything: bool
) -> None:
    offload: dict[str, Any] = {"optimizer": "disk", "path": str(tmp_path)}
    offload |= {"params": "disk", "gradients": "disk"} if everything else {}
    settings = {"precision": "bf16", "offload": offload, "masters": masters}
    for bias in (False, True):
        plan = planned(size, blocks(bias=bias), **settings)
        expected = plan.memory.disk, plan.traffic.read, plan.traffic.written
        assert cluster(size).run(disk_body, settings=settings, bias=bias) == [expected] * size


MODEL = "tests/zero/planning/test_plan.py:blocks"


def test_the_command_prints_a_plan() -> None:
    result = run("plan", MODEL, "--ranks", 2, "--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip() == str(planned(precision="bf16"))
    assert "65,536 parameters" in result.stdout


def test_numbers_of_the_command_are_those_of_the_function() -> None:
    options = ["--optimizer", "sgd", "--optimizer-options", '{"momentum": 0.9}', "--stage", 2, "--json"]
    found = json.loads(run("plan", f"{MODEL}(layers=3)", "-n", 4, *options).stdout)
    model = blocks(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = zero.plan(model, optimizer, zero.Config(stage=2), ranks=4)
    assert found["rest"]["device"]["optimizer"] == plan.memory.rest["device"].optimizer == 3 * MATRIX
    assert found["peaks"]["backward"]["total"] == plan.memory.peaks["backward"].total
    assert found["traffic"]["collectives"] == plan.traffic.collectives


def test_settings_from_a_file_and_from_the_line(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    ours.write_text('{"precision": "bf16", "offload": {"optimizer": "host"}, "prefetch": 2}')
    theirs.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    expected = planned(precision="bf16", prefetch=2, stage=3, offload={"optimizer": "host", "params": "host"})
    line = ["--offload", "optimizer=host", "--offload", "params=host"]
    assert run("plan", MODEL, "-n", 2, "--config", ours, *line).stdout.rstrip() == str(expected)
    batches = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    (tmp_path / "batches.json").write_text(json.dumps(batches))
    steps = planned(8, gradient_accumulation_steps=2, stage=0)
    assert run("plan", MODEL, "-n", 8, "--config", tmp_path / "batches.json").stdout.rstrip() == str(steps)
    expected = planned(precision="bf16", stage=1, gradient_accumulation_steps=1)
    assert run("plan", MODEL, "-n", 2, "--config", theirs, "--stage", 1).stdout.rstrip() == str(expected)


def test_expressions() -> None:
    """Names are known within comprehensions too, and an expression may be of any length."""
    layers = ", ".join("Linear(128, 128, bias=False)" for _ in range(20))
    found = json.loads(run("plan", f"torch.nn:Sequential({layers})", "-n", 2, "--json").stdout)
    assert found["parameters"] == 20 * MATRIX
    each = "torch.nn:Sequential(*[Linear(128, 128, bias=False) for _ in range(4)])"
    assert json.loads(run("plan", each, "-n", 2, "--json").stdout)["parameters"] == 4 * MATRIX


def test_an_optimizer_that_makes_its_state_when_it_is_built(tmp_path: Path) -> None:
    synthetic.save(tmp_path / "weights", {f"{n}.weight": torch.ones(WIDTH, WIDTH) for n in range(4)})
    for target in (MODEL, tmp_path / "weights"):
        found = json.loads(run("plan", target, "-n", 2, "--optimizer", "adagrad", "--json").stdout)
        assert found["rest"]["device"]["optimizer"] == 4 * 4 * MATRIX // 2


def test_a_directory_may_have_a_number_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{Path(MODEL.partition(':')[0]).resolve()}:blocks"
    monkeypatch.chdir(tmp_path)
    Path("2024").mkdir()
    line = ["--offload", "optimizer=disk", "--offload", "path=2024"]
    assert run("plan", target, "-n", 2, *line).exit_code == 0


def test_whether_it_fits() -> None:
    large, small = (run("plan", MODEL, "-n", 2, "--memory", memory) for memory in ("1GB", "100kB"))
    assert large.exit_code == 0
    assert "fits: 999 MB of 1 GB are left for activations" in large.stdout
    assert small.exit_code == 1
    assert "does not fit: backward needs" in small.stdout


def test_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "units.json").write_text('{"units": "Nope"}')
    lines = run(
        "plan", MODEL, "-n", 8, "--precision", "bf16", "--compare", "--memory", "300kB"
    ).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == [
        "as given",
        "stage 0 (does not fit)",
        "stage 1 (does not fit)",
        "stage 2 (does not fit)",
        "stage 3",
        "stage 3, optimizer on the host",
        "stage 3, optimizer and parameters on the host",
        "stage 3, optimizer on disk, parameters on the host",
    ]
    assert lines[-1].startswith("fits: ")
    found = run("plan", MODEL, "-n", 8, "--compare", "--json", "--optimizer", "adafactor", "--stage", 0)
    assert len(json.loads(found.stdout)) == 7  # all but the disk, where it cannot step
    assert "all_to_all" in run("plan", MODEL, "-n", 8, "--optimizer", "muon", "--json").stdout
    assert run("plan", MODEL, "-n", 8, "--compare", "--memory", "1kB").exit_code == 1
    assert "matches no module" in refused(
        "plan", MODEL, "-n", 8, "--compare", "--config", tmp_path / "units.json"
    )


def test_copies_of_the_model() -> None:
    found = run("plan", MODEL, "-n", 8, "--shard-ranks", 2)
    assert found.stdout.rstrip() == str(planned(8, shard_ranks=2))
    table = run("plan", MODEL, "-n", 8, "--shard-ranks", 2, "--compare").stdout
    assert [line.split("  ")[0] for line in table.splitlines()[1:4]] == ["as given", "one copy", "stage 0"]
    assert "does not divide the job's 8 ranks" in refused("plan", MODEL, "-n", 8, "--shard-ranks", 3)
    assert ("every rank has the whole model") in refused(
        "plan", MODEL, "-n", 8, "--shard-ranks", 2, "--stage", 0
    )


def test_a_checkpoint_is_enough(tmp_path: Path) -> None:
    """Its names, shapes and dtypes say as much as the model does, blocks and ties included."""
    torch.manual_seed(0)
    model = LanguageModel()
    names = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    synthetic.save(tmp_path / "weights", names)
    found = json.loads(run("plan", tmp_path / "weights", "-n", 2, "--json").stdout)
    assert {name for name in found["units"] if name.startswith("blocks")} == {
        "blocks.0",
        "blocks.1",
        "blocks.2",
    }
    assert found["parameters"] == sum(value.numel() for value in names.values())


def test_names_that_modules_have_for_themselves(tmp_path: Path) -> None:
    names = ("type", "training", "forward.weight", "_parameters", "blocks.0.children", "blocks.1.children")
    synthetic.save(tmp_path / "weights", {name: torch.ones(4, 4) for name in names})
    found = json.loads(run("plan", tmp_path / "weights", "-n", 2, "--json").stdout)
    assert found["parameters"] == len(names) * 16


def test_the_command_refuses(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("[1]")
    assert "neither a path nor a function" in refused("plan", "nothing", "-n", 2)
    assert "cannot be imported: ModuleNotFoundError" in refused("plan", "nowhere:f", "-n", 2)
    assert "NameError: name 'Nothing'" in refused("plan", "torch.nn:Nothing", "-n", 2)
    assert "is int, not a torch.nn.Module" in refused("plan", "torch.nn:1 + 1", "-n", 2)
    assert "torch.optim has no 'adamx'" in refused("plan", MODEL, "-n", 2, "--optimizer", "adamx")
    assert "write an object" in refused("plan", MODEL, "-n", 2, "--optimizer-options", "3")
    assert "unexpected keyword" in refused("plan", MODEL, "-n", 2, "--optimizer-options", '{"speed": 1}')
    assert "bad.json is not a file of settings: expected a JSON object" in refused(
        "plan", MODEL, "-n", 2, "--config", bad
    )
    assert "write tests/conftest.py:function" in refused("plan", "tests/conftest.py", "-n", 2)
    assert "neither a path nor a function" in refused("plan", "tests/conftest.py:", "-n", 2)
    assert "SystemExit" in refused("plan", "torch.nn:exit(3)", "-n", 2)
    assert "fused" in refused(
        "plan", MODEL, "-n", 2, "--optimizer-options", '{"fused": true, "foreach": true}'
    )
    assert "optimizer=host, or auto" in refused("plan", MODEL, "-n", 2, "--offload", "host")
    assert "precision" in refused("plan", MODEL, "-n", 2, "--precision", "fp64")
    assert "betas" in refused("plan", MODEL, "-n", 2, "--optimizer-options", '{"betas": [0.9]}')
    synthetic.save(tmp_path / "narrow", {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)})
    assert ("torch.float8_e4m3fn, which no device can train in") in refused(
        "plan", tmp_path / "narrow", "-n", 2
    )
    assert run("plan", tmp_path / "narrow", "-n", 2, "--precision", "bf16").exit_code == 0
    both = {"a.weight": torch.ones(4, 4), "a.weight.absmax": torch.ones(4)}
    synthetic.save(tmp_path / "both", both)
    assert "'a.weight" in refused("plan", tmp_path / "both", "-n", 2)
    synthetic.save(tmp_path / "weights", {"a.weight": torch.ones(4, 4)})
    assert "needs the model's classes" in refused("plan", tmp_path / "weights", "-n", 2, "--autocast", "bf16")


def test_activations_of_a_batch() -> None:
    """Each block keeps its input for the backward; the model is as it was, and needs no memory."""
    with torch.device("meta"):
        model = blocks()
        batch = torch.empty(10, WIDTH)
    made = zero.plan(model, torch.optim.AdamW(model.parameters()), ranks=2, batch=batch)
    assert made.memory.activations["forward"] >= 3 * batch.nbytes  # the first input is the caller's
    assert made.memory.device == made.memory.total("backward")
    assert "activations" in str(made)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(zero.UsageError, match="does not run without values"):
        zero.plan(model, torch.optim.AdamW(model.parameters()), ranks=2, batch={"tokens": batch})


class Caching(nn.Module):
    """Keeps tensors from one forward to the next in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask: torch.Tensor | None = None
        self.seen: list[torch.Tensor] = []
        self.tables: dict[str, dict[int, torch.Tensor]] = {"by length": {}}
        self.itself = [self.__dict__]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(4)
            self.seen.append(x)
            self.tables["by length"][len(x)] = self.last = torch.arange(4.0)
        out: torch.Tensor = self.linear(x) * self.mask + self.last
        return out


def test_a_model_that_caches_tensors_is_as_it_was() -> None:
    model = nn.Sequential(Caching())
    zero.plan(model, torch.optim.AdamW(model.parameters()), ranks=2, batch=torch.ones(3, 4))
    assert model[0].mask is None
    assert (model[0].seen, model[0].tables) == ([], {"by length": {}})
    assert not hasattr(model[0], "last")
    assert type(model(torch.ones(3, 4))) is torch.Tensor


def test_a_model_that_has_cached_tensors_is_planned() -> None:
    """None of these is a buffer; some have a graph."""
    model = nn.Sequential(Caching(), nn.utils.spectral_norm(nn.Linear(4, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    new = zero.plan(model, optimizer, ranks=2, batch=torch.ones(3, 4))
    model(model(torch.ones(3, 4)))
    model[0].seen.append(model[0].linear.weight * 2)
    assert zero.plan(model, optimizer, ranks=2, batch=torch.ones(3, 4)).flops == new.flops


def test_models_that_cannot_be_copied_are_planned() -> None:
    """A lock cannot, and of a module that a function has kept a copy would leave the function as it is."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(3, WIDTH)
    plain = zero.plan(model, optimizer, ranks=2, batch=batch)
    model[0].forward = functools.partial(type(model[0]).forward, model[0])
    model[0].lock, model[0].generator = threading.Lock(), torch.Generator()
    assert zero.plan(model, optimizer, ranks=2, batch=batch).flops == plain.flops
    assert all(parameter.grad is None for parameter in model.parameters())


SCRIPT = """
import torch

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)

    def forward(self, input_ids):
        return self.table(input_ids)
"""


def test_the_command_counts_activations_and_suggests_names(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(SCRIPT)
    target = f"{tmp_path}/words.py"
    sizes = "-n", "1", "--batch", "2", "--sequence", "5"
    numbers = json.loads(run("plan", f"{target}:Words", *sizes, "--json").stdout)
    assert numbers["activations"]["forward"] >= 2 * 5 * 4 * 4
    text = run(
        "plan", f"{target}:Words", "-n", "1", "--batch", "2", "--sequence", "5", "--memory", "1GB"
    ).stdout
    assert "left for module buffers and libraries" in text
    assert "did you mean 'Words'?" in refused("plan", f"{target}:Word", "-n", "1")
    assert "--batch and --sequence go together" in refused(
        "plan", f"{target}:Words", "-n", "1", "--batch", "2"
    )
