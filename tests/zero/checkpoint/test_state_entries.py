"""What is in state dicts besides plain parameters and buffers: other names, extra state, hooks' entries."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw
from zero.sources.opening import open_source


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def wrapped() -> nn.Sequential:
    """As torch puts activation checkpointing on: `named_parameters` has longer names than the state dict."""
    return nn.Sequential(*map(checkpoint_wrapper, layers()))


def engine_of(model: nn.Module, **settings: Any) -> zero.Engine:
    return zero.initialize(model, adamw(model), zero.Config(timeout=20, **settings))


def step(engine: zero.Engine) -> None:
    train_on(engine, engine(torch.ones(2, 8, device=device_of(engine.module))).square().mean())


def doubled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 2 * value for name, value in state.items()}


def names_body(context: Context, path: str) -> dict[str, Any]:
    plain, engine = layers().state_dict(), engine_of(wrapped())
    found: dict[str, Any] = {
        "there are other names": "0.weight" not in dict(engine.module.named_parameters())
    }
    given = doubled(plain)
    engine.load_state_dict(given if context.rank == 0 else None)
    state = engine.state_dict()
    found["state dict"] = context.rank > 0 or all(torch.equal(state[name], given[name]) for name in plain)
    found["names"] = context.rank > 0 or state.keys() == plain.keys()
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        master = engine.full_master(name)  # by what a loop over the model calls it
        found[name] = master.shape == parameter.shape or not parameter.numel()
    engine.load_pretrained(Path(path, "weights.safetensors"))
    state = engine.state_dict()
    found["pretrained"] = context.rank > 0 or all(torch.equal(state[name], plain[name]) for name in plain)
    step(engine)
    engine.save_checkpoint(Path(path, "wrapped"))
    other = engine_of(layers(), stage=2)
    other.load_checkpoint(Path(path, "wrapped"))
    mine, its = engine.state_dict(), other.state_dict()
    found["unwrapped"] = all(torch.equal(mine[name], its[name]) for name in mine)
    return found


def test_names_are_those_of_the_state_dict(cluster: Clusters, tmp_path: Path) -> None:
    plain = layers().state_dict()
    save_file(plain, tmp_path / "weights.safetensors")
    for found in cluster(2).run(names_body, path=str(tmp_path)):
        assert all(found.values()), found
    with open_source(tmp_path / "wrapped") as source:
        assert {tensor.name for tensor in source.tensors} == plain.keys()


class Scaling(nn.Module):
    """Extra state that is a tensor, an entry that hooks make and take, a buffer that is a view."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.history = torch.full((3,), value)
        self.version = value
        pair = torch.tensor([1 + value * 1j, 2.0])
        self.register_buffer("turned", pair.conj())
        self.register_buffer("mask", torch.tensor([float(value), 0.0]).expand(3, 2))
        self.register_state_dict_post_hook(_add_version)
        self.register_load_state_dict_pre_hook(_take_version)

    def get_extra_state(self) -> Tensor:
        return self.history.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.history = state

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _add_version(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}version"] = torch.tensor(module.version)


def _take_version(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}version" in state:
        module.version = int(state.pop(f"{prefix}version"))


def rest_body(context: Context, path: str) -> dict[str, Any]:
    engine = engine_of(Scaling(7))
    engine.save_checkpoint(path)
    state = engine.state_dict()
    found = {}
    for how in ("checkpoint", "state dict"):
        other = engine_of(Scaling(0))
        if how == "checkpoint":
            other.load_checkpoint(path)
        else:
            other.load_state_dict(state if context.rank == 0 else None)
        model = other.module
        found[how] = (
            model.history.tolist(),
            model.version,
            model.turned.tolist() == [1 - 7j, 2.0] and model.mask.tolist() == 3 * [[7.0, 0.0]],
        )
    return found


def test_extra_state_and_what_hooks_add(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(rest_body, path=str(tmp_path / "c")):
        assert found == {how: ([7, 7, 7], 7, True) for how in ("checkpoint", "state dict")}
    with open_source(tmp_path / "c") as source:
        tensors = {tensor.name: tensor for tensor in source.tensors}
    assert set(tensors) == {"linear.weight", "linear.bias", "turned", "mask"}


def both_names_body(context: Context, path: str) -> list[str]:
    """A file that has a tied weight twice: equal, and not."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    engine = engine_of(model)
    engine.load_pretrained(Path(path, "equal.safetensors"))
    found = [f"{engine.full_master('1.weight').sum().item()}"]
    with pytest.raises(zero.StateError) as caught:
        engine.load_pretrained(Path(path, "different.safetensors"))
    engine.load_pretrained(Path(path, "different.safetensors"), rename={"0.weight": None})
    return [*found, str(caught.value), f"{engine.full_master('0.weight').sum().item()}"]


def test_files_with_a_tied_weight_under_both_names(cluster: Clusters, tmp_path: Path) -> None:
    ones = torch.ones(8, 8)
    save_file({"0.weight": ones, "1.weight": ones.clone()}, tmp_path / "equal.safetensors")
    save_file({"0.weight": ones, "1.weight": 2 * ones}, tmp_path / "different.safetensors")
    for equal, message, renamed in cluster(2).run(both_names_body, path=str(tmp_path)):
        assert (equal, renamed) == ("64.0", "128.0")
        assert "both 0.weight and 1.weight in the checkpoint; rename one to None" in message


def grouped(model: nn.Module, turned: bool, odd: Any = None) -> torch.optim.Optimizer:
    decayed = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1, "lr": 0.5}
    plain = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.25}
    optimizer = torch.optim.AdamW([plain, decayed] if turned else [decayed, plain])
    if odd is not None:
        optimizer.param_groups[0] |= odd
    return optimizer


def groups_body(context: Context, path: str) -> dict[str, Any]:
    odd = {"lr": __import__("numpy").float32(0.125), "tags": {"a": 1}, "rule": len, "owner": object()}
    model = layers()
    engine = zero.initialize(model, grouped(model, False, odd), zero.Config(timeout=20))
    step(engine)
    told = pytest.warns(UserWarning, match="left out of the checkpoint: the optimizer's 'owner' is a object")
    with told if context.rank == 0 else nullcontext():
        engine.save_checkpoint(path)
    other = layers()
    optimizer = grouped(other, False)
    loaded = zero.initialize(other, optimizer, zero.Config(timeout=20))
    loaded.load_checkpoint(path)
    options = [(group["weight_decay"], group["lr"], group.get("tags")) for group in optimizer.param_groups]
    refused = []
    for turned in (True, False):
        model = layers()
        halves = [{"params": list(layer.parameters())} for layer in (model[:1], model[1:])]
        optimizer = grouped(model, True) if turned else torch.optim.AdamW(halves)
        refusing = zero.initialize(model, optimizer, zero.Config(timeout=20))
        with pytest.raises(zero.StateError) as caught:
            refusing.load_checkpoint(path)
        refused.append(str(caught.value))
        refusing.load_checkpoint(path, strict=False)
    return {"options": options, "refused": refused}


def test_options_go_to_groups_of_the_same_parameters(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(groups_body, path=str(tmp_path / "c")):
        assert found["options"] == [(0.1, 0.125, {"a": 1}), (0.0, 0.25, None)]
        for said in found["refused"]:
            assert "in a different param_group than in the checkpoint: " in said


class Stubborn(nn.Sequential):
    """Its state dict is made by hand, and takes no options."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value.clone() for name, value in self.named_parameters()}


def odd_models_body(context: Context, path: str) -> list[str]:
    """A model whose state dict cannot be looked at, and one that has lost a part."""
    told = pytest.warns(UserWarning, match=r"model\.state_dict\(\) raises TypeError")
    with told if context.rank == 0 else nullcontext():
        engine = engine_of(Stubborn(nn.Linear(8, 8), nn.Linear(8, 8)))
    step(engine)
    lost = engine_of(nn.Sequential(layers(), nn.Linear(8, 8)))
    step(lost)
    del lost.module[1]
    lost.save_checkpoint(path)
    return [unit_name for unit in engine.units for group in unit.groups for unit_name in group.names]


def test_odd_models(cluster: Clusters, tmp_path: Path) -> None:
    for names in cluster(2).run(odd_models_body, path=str(tmp_path / "c")):
        assert set(names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    with open_source(tmp_path / "c") as source:
        assert "0.0.weight" in {tensor.name for tensor in source.tensors}


class Failing:
    """An object of the user's that cannot be restored on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.rank == 1:
            raise KeyError("as the test wants")


def restore_body(context: Context, path: str) -> str:
    engine = engine_of(layers())
    engine.save_checkpoint(path, {"mine": Failing(context.rank)})
    with pytest.raises(zero.CheckpointError) as caught:
        engine.load_checkpoint(path, restore={"mine": Failing(context.rank)})
    engine.load_checkpoint(path)
    step(engine)
    return str(caught.value)


def test_an_object_that_is_not_restored_fails_on_every_rank(cluster: Clusters, tmp_path: Path) -> None:
    for message in cluster(2).run(restore_body, path=str(tmp_path / "c")):
        assert "rank 1 could not load the checkpoint: KeyError: 'as the test wants'" in message
