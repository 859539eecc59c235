"""Loading elsewhere: other world sizes, stages, precisions, devices, models; and what does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Cluster, Clusters, Context
from tests.zero.helpers.counting import CountingStorage
from tests.zero.helpers.fingerprint import Fingerprint, _digest, fingerprint
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import LanguageModel, device_of, tokens
from tests.zero.helpers.resumed_job import OPTIMIZERS, Job
from tests.zero.helpers.saving import save_body
from tests.zero.helpers.told import raised
from tests.zero.helpers.training import adamw


def load_body(context: Context, path: str, optimizer: str = "adamw", **settings: Any) -> Fingerprint:
    job = Job(context, optimizer, fresh=False, **settings)
    job.train(1)  # what is there has to go
    loaded = job.load(path)
    assert loaded.steps == job.engine.steps == 3
    found = fingerprint(job.engine)
    with zero.gathered(job.model):
        assert all(torch.isfinite(p).all() for p in job.model.parameters())
    job.train(2)
    return found


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, {"stage": 3}), (1, {"stage": 0})),
        ((2, {"stage": 3}), (3, {"stage": 2})),
        ((3, {"stage": 1}), (2, {"stage": 3, "persistent_below": 100})),
        ((2, {"stage": 0}), (3, {"stage": 3})),
        ((1, {"stage": 3}), (2, {"stage": 0})),
        ((3, {"stage": 3, "optimizer": "sgd"}), (2, {"stage": 3, "optimizer": "sgd"})),
        ((2, {"stage": 0, "optimizer": "sign"}), (3, {"stage": 1, "optimizer": "sign"})),
        ((3, {"stage": 3, "optimizer": "amsgrad"}), (1, {"stage": 3, "optimizer": "amsgrad"})),
        ((2, {"stage": 3, "precision": "bf16"}), (3, {"stage": 2, "precision": "fp32"})),
        ((2, {"stage": 2, "precision": "fp32"}), (1, {"stage": 3, "precision": "bf16"})),
        ((2, {"stage": 3, "precision": "fp16"}), (3, {"stage": 3, "precision": "fp16"})),
    ],
    ids=lambda case: "-".join(map(str, (case[0], *case[1].values()))),
)
def test_any_world_size_stage_and_precision(
    cluster: Clusters, tmp_path: Path, saved: tuple[int, dict[str, Any]], loaded: tuple[int, dict[str, Any]]
) -> None:
    path = str(tmp_path / "step-3")
    before = cluster(saved[0]).run(save_body, path=path, **saved[1])[0]
    frozen = {n for n in before if n.startswith("blocks.1.down")}
    if saved[1].get("precision") != loaded[1].get("precision"):
        before = {n: v for n, v in before.items() if n not in frozen}  # no master: rounded to 16 bits
    for after in cluster(loaded[0]).run(load_body, path=path, **loaded[1]):
        assert {n: v for n, v in after.items() if n in before} == before


def test_another_device(cluster: Clusters, device: str, tmp_path: Path) -> None:
    if device == "cpu":
        pytest.skip("needs a device besides the host: --device")
    path = str(tmp_path / "step-3")
    before = cluster(2).run(save_body, path=path, stage=3)[0]
    host = Cluster("cpu", 2)
    try:
        assert host.run(load_body, path=path, stage=3)[0] == before
        before = host.run(save_body, path=path, stage=2)[0]
    finally:
        host.stop()
    assert cluster(2).run(load_body, path=path, stage=3)[0] == before


def own_path_body(context: Context, runs: str, names: tuple[str, str]) -> Fingerprint | str:
    job = Job(context, "adamw", fresh=False, stage=3)
    try:
        job.load(str(Path(runs, names[context.rank])))
    except zero.CheckpointError as error:
        return str(error)
    return fingerprint(job.engine)


def test_ranks_that_are_given_different_checkpoints(cluster: Clusters, tmp_path: Path) -> None:
    """Each rank's best one, say. Rank 0's alone would be loaded, in silence."""
    for name in ("a", "b"):
        cluster(2).run(save_body, path=str(tmp_path / name / "step-3"), stage=3)
    for told in cluster(2).run(own_path_body, runs=str(tmp_path), names=("a", "b")):
        assert f"rank 0 in {tmp_path}/a/step-3, rank 1 in {tmp_path}/b/step-3" in told


@pytest.mark.parametrize("interrupted", [False, True])
def test_machines_may_know_a_checkpoint_by_other_names(
    cluster: Clusters, tmp_path: Path, interrupted: bool
) -> None:
    saved = cluster(2).run(save_body, path=str(tmp_path / "mounted" / "step-3"), stage=3)[0]
    (tmp_path / "elsewhere").symlink_to("mounted")
    if interrupted:  # a save of the same name was killed before its own took the place
        (tmp_path / "mounted" / "step-3").rename(tmp_path / "mounted" / ".step-3.zero-old")
    for place in ("", "/step-3"):
        names = (f"mounted{place}", f"elsewhere{place}")
        for loaded in cluster(2).run(own_path_body, runs=str(tmp_path), names=names):
            assert loaded == saved


def large(context: Context) -> tuple[zero.Engine, nn.Module]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
    return zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config(timeout=10)), model


def save_large_body(context: Context, path: str) -> None:
    large(context)[0].save_checkpoint(path)


def load_large_body(context: Context, path: str) -> tuple[int, int]:
    """Bytes read, and bytes of this rank's share."""
    engine, _ = large(context)
    storage = engine._checkpoints.storage = CountingStorage()
    engine.load_checkpoint(path)
    owned = engine._boundary.optimizer.subs
    return storage.bytes, sum(p.piece.length * 4 * 3 + 4 for o in owned for p in o.pieces)


def test_a_rank_reads_little_more_than_its_share(cluster: Clusters, tmp_path: Path) -> None:
    path = str(tmp_path / "large")
    cluster(3).run(save_large_body, path=path)
    for size in (2, 1):
        for read, needed in cluster(size).run(load_large_body, path=path):
            assert needed <= read <= 1.1 * needed


class Renamed(nn.Module):
    """Part of a LanguageModel under other names, and something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(LanguageModel().blocks[:2])
        self.own = nn.Linear(3, 3)


def partial_body(context: Context, path: str) -> dict[str, Any]:
    torch.manual_seed(50)
    model = Renamed()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    own = _digest(engine.full_master("own.weight"))
    messages = {}
    for name, options in {
        "strict": {},
        "missing": {"rename": _body_only},
    }.items():
        try:
            engine.load_checkpoint(path, weights_only=True, **options)  # type: ignore[arg-type]
        except zero.StateError as error:
            messages[name] = str(error)
    rates = [g["lr"] for g in engine.optimizer.param_groups]
    engine.load_checkpoint(path, weights_only=True, rename=_body_only, strict=False)
    assert own == _digest(engine.full_master("own.weight"))
    assert engine.steps == 0
    assert rates == [g["lr"] for g in engine.optimizer.param_groups]
    assert not engine.full_optimizer_state("body.0.up.weight")["exp_avg"].any()
    with_state = {n: v for n, v in fingerprint(engine, optimizer=False).items() if n.startswith("body")}
    engine.load_checkpoint(path, rename=_body_only, strict=False)
    assert engine.steps == 3
    return {
        "messages": messages,
        "weights": with_state,
        "all": {n: v for n, v in fingerprint(engine).items() if n.startswith("body")},
    }


def _body_only(name: str) -> str | None:
    return name.replace("blocks.", "body.") if name.startswith(("blocks.0", "blocks.1")) else None


def test_partial_and_renamed(cluster: Clusters, tmp_path: Path) -> None:
    path = str(tmp_path / "step-3")
    before = cluster(3).run(save_body, path=path, stage=3)[0]
    expected = {new: v for n, v in before.items() if (new := _body_only(n))}
    for found in cluster(2).run(partial_body, path=path):
        assert "missing in the checkpoint: body.0" in found["messages"]["strict"]
        assert "unexpected in the checkpoint: blocks.0" in found["messages"]["strict"]
        assert found["messages"]["missing"].endswith("missing in the checkpoint: own.weight, own.bias")
        assert found["all"] == expected
        assert found["weights"] == {n: v for n, v in expected.items() if "/" not in n}


class Folded(nn.Module):
    """One parameter of two memory orders, a buffer, extra state, and a part that may be frozen."""

    def __init__(self, last: bool, frozen: bool, value: float) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(5, 7, 3)
        if last:
            self.convolution.to(memory_format=torch.channels_last)
        self.other = nn.Linear(7, 7).requires_grad_(not frozen)
        self.norm = nn.BatchNorm2d(7)
        self.note: dict[str, Any] = {"value": value, "tensor": torch.full((2,), value)}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.norm(self.convolution(x)).mean((2, 3))).square().mean()


def folded_body(context: Context, path: str, save: bool, last: bool, frozen: bool) -> Any:
    torch.manual_seed(3 if save else 4)
    model = Folded(last, frozen, value=float(save))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = zero.initialize(model, optimizer, zero.Config(timeout=10))
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(2, 5, 6, 6, generator=generator).to(device_of(model))
        train_on(engine, model(x))
    if save:
        engine.save_checkpoint(path)
    else:
        engine.load_checkpoint(path, strict=False)
        assert model.note["value"] == 1.0
        assert model.note["tensor"].tolist() == [1.0, 1.0]
    return fingerprint(engine)


@pytest.mark.parametrize("last", [False, True])
def test_memory_orders_and_freezing_may_differ(cluster: Clusters, tmp_path: Path, last: bool) -> None:
    path = str(tmp_path / "c")
    before = cluster(2).run(folded_body, path=path, save=True, last=last, frozen=not last)[0]
    after = cluster(3).run(folded_body, path=path, save=False, last=not last, frozen=last)[0]
    both = before.keys() & after.keys()
    assert {"convolution.weight/momentum_buffer", "other.weight", "norm.running_mean"} <= both
    assert {n: before[n] for n in both} == {n: after[n] for n in both}


class Lumpy(torch.optim.SGD):
    """State that belongs to no element and is no number: it cannot be cut."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["lump"] = torch.ones(3, 5)
        return result


def refused_body(context: Context, path: str) -> dict[str, str]:
    torch.manual_seed(8)

    def engine(
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        width: int = 12,
        layers: int = 3,
        **settings: Any,
    ) -> zero.Engine:
        model = LanguageModel(layers, width)
        return zero.initialize(model, optimizer(model), zero.Config(timeout=10, **settings))

    cases: dict[str, Callable[[], Any]] = {
        "nowhere": lambda: engine().load_checkpoint(path + "-nowhere"),
        "no latest": lambda: engine().load_checkpoint(Path(path).parent.parent),
        "width": lambda: engine(width=16).load_checkpoint(path),
        "layers": lambda: engine(layers=4).load_checkpoint(path),
        "optimizer": lambda: engine(OPTIMIZERS["sgd"]).load_checkpoint(path),
        "groups": lambda: engine(lambda m: torch.optim.AdamW(m.parameters())).load_checkpoint(path),
        "restore": lambda: engine().load_checkpoint(path, restore={"sampler": object()}),
        "value": lambda: engine().load_checkpoint(path, restore={"note": ""}),
        "rename": lambda: engine().load_checkpoint(path, rename={"head": "tail"}),
        "lumps": lambda: _stepped(
            engine(lambda m: Lumpy(m.parameters(), lr=0.1), whole_parameters=False)
        ).save_checkpoint(path),
    }
    messages = {}
    for name, call in cases.items():
        messages[name] = raised(call)
    inside = engine()
    try:
        with zero.gathered(inside.module):
            inside.load_checkpoint(path)
    except zero.UsageError as error:
        messages["gathered"] = str(error)
    inside.load_checkpoint(path)
    return messages


def _stepped(engine: zero.Engine) -> zero.Engine:
    train_on(engine, engine(tokens(0, 0, engine.module))["loss"])
    return engine


def test_what_does_not_fit_is_refused(cluster: Clusters, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "step-3"
    cluster(2).run(save_body, path=str(path), stage=3)
    for found in cluster(3).run(refused_body, path=str(path)):
        assert "is not a complete checkpoint" in found["nowhere"]
        assert found["nowhere"].endswith("Complete checkpoints nearby: step-3")
        assert found["no latest"].startswith("CheckpointError")
        assert "StateError: the checkpoint does not fit: mismatched: blocks.0" in found["width"]
        assert "missing in the checkpoint: blocks.3" in found["layers"]
        assert ("torch.optim.adamw.AdamW, but this one is torch.optim.sgd.SGD; weights_only") in found[
            "optimizer"
        ]
        assert "has 2 param_groups, but this one has 1" in found["groups"]
        assert "has no ['sampler']; it has ['scheduler', 'order', 'note']" in found["restore"]
        assert "UsageError: restore['note'] is a str, which has no load_state_dict()" in found["value"]
        assert "UsageError: rename: the checkpoint has nothing called head" in found["rename"]
        assert "neither one value per element nor a single number" in found["lumps"]
        assert "elements" not in found["lumps"], "the sizes would be a stand-in's"
        assert found["gathered"].startswith("load_checkpoint() was called inside zero.gathered")


def other_state_body(context: Context, path: str) -> list[str]:
    messages = []
    for saved, loaded in (("amsgrad", "plain"), ("plain", "amsgrad")):
        model = LanguageModel()
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=saved == "amsgrad")
        _stepped(zero.initialize(model, optimizer, zero.Config(timeout=10))).save_checkpoint(path)
        model = LanguageModel()
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=loaded == "amsgrad")
        engine = zero.initialize(model, optimizer, zero.Config(timeout=10))
        try:
            engine.load_checkpoint(path)
            messages.append(str(engine.optimizer.param_groups[0]["amsgrad"]))
        except zero.StateError as error:
            messages.append(str(error))
    return messages


def test_state_of_other_options(cluster: Clusters, tmp_path: Path) -> None:
    """The kernel has no amsgrad: its state is refused there. Loaded the other way its options come along."""
    for refused, taken in cluster(2).run(other_state_body, path=str(tmp_path / "c")):
        assert "with different optimizer state: blocks.0" in refused
        assert "(exp_avg, exp_avg_sq, max_exp_avg_sq, step)" in refused
        assert taken == "False"


def random_body(context: Context, path: str, save: bool) -> list[float]:
    model = nn.Linear(4, 4)
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=10))
    torch.manual_seed(context.rank + (10 if save else 20))
    if save:
        engine.save_checkpoint(path)
    else:
        engine.load_checkpoint(path)
    return torch.rand(3).tolist()


def test_ranks_that_did_not_save_keep_their_random_state(cluster: Clusters, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    before = cluster(2).run(random_body, path=path, save=True)
    after = cluster(3).run(random_body, path=path, save=False)
    own = torch.rand(3, generator=torch.Generator().manual_seed(22)).tolist()
    assert after == [*before, own]


def test_loaded_is_a_plain_record() -> None:
    from zero.checkpoint.load import Loaded

    assert [f.name for f in dataclasses.fields(Loaded)] == [
        "path",
        "steps",
        "world_size",
        "state",
        "rank_states",
        "left_out",
        "nbytes",
    ]


def part_body(context: Context, path: str) -> dict[str, float]:
    """A checkpoint of one layer before its first step, loaded into a trained model of three: how far the next
    step goes from where plain training would."""

    def build(*names: str) -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})

    def train(model: nn.Module, done: Callable[[torch.Tensor], Any], steps: int) -> None:
        for step in range(steps):
            x = torch.full((2, 8), 1.0 + step, device=device_of(model))
            done(sum((layer(x).square().mean() for layer in model.values()), torch.zeros(())))

    def stepped(engine: zero.Engine) -> Callable[[torch.Tensor], Any]:
        return lambda loss: (engine.backward(loss), engine.step())

    def begun(model: nn.Module) -> zero.Engine:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return zero.initialize(model, adam, zero.Config(timeout=20))

    begun(build("b")).save_checkpoint(path)
    engine = begun(build("a", "b", "c"))
    train(engine.module, stepped(engine), 20)
    engine.load_checkpoint(path, strict=False)
    plain = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "abc"})
    plain.load_state_dict({name: engine.full_master(name).cpu() for name, _ in plain.named_parameters()})
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for name, parameter in plain.named_parameters():
        adam.state[parameter] = {k: v.cpu() for k, v in engine.full_optimizer_state(name).items()}
    train(engine.module, stepped(engine), 1)
    train(plain, lambda loss: (loss.backward(), adam.step()), 1)
    return {
        name: (engine.full_master(name).cpu() - value).abs().max().item()
        for name, value in plain.named_parameters()
    }


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_other_step_counts_have_their_own_bias_correction(
    cluster: Clusters, tmp_path: Path, size: int
) -> None:
    for found in cluster(size).run(part_body, path=str(tmp_path / "c")):
        assert max(found.values()) < 1e-5, found
