"""What shares the memory of a parameter that is trained would be left behind, so it is refused beforehand."""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.training import adamw
from zero.drafts import aliases
from zero.drafts.aliases import check_aliases

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def built() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


@dataclass
class Kept:
    part: Tensor


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Tensor) -> None:
        self.part = part

    def use(self) -> Tensor:
        return self.part


def closure(weight: Tensor) -> Callable[[], Tensor]:
    kept = weight.t()
    return lambda: kept


def defaulted(weight: Tensor) -> Callable[..., Tensor]:
    def use(kept: Tensor = weight) -> Tensor:
        return kept

    return use


def hooked(block: Block) -> None:
    kept = block.linear.weight.detach()
    block.register_forward_hook(lambda module, args, output: output @ kept)


KEEPING: dict[str, tuple[Callable[[Block, Tensor], Any], str]] = {
    "attribute": (lambda b, w: setattr(b, "kept", w), r"1\.kept"),
    "list": (lambda b, w: setattr(b, "kept", [0, w]), r"1\.kept\[1\]"),
    "dict": (lambda b, w: setattr(b, "kept", {"a": (w,)}), r"1\.kept\['a'\]\[0\]"),
    "buffer": (lambda b, w: b.register_buffer("kept", w), r"1\.kept"),
    "part": (lambda b, w: setattr(b, "kept", w[1:, :2]), r"1\.kept"),
    "numpy": (lambda b, w: setattr(b, "kept", w.numpy()[::-1]), r"1\.kept"),
    "numpy and back": (lambda b, w: setattr(b, "kept", torch.from_numpy(w.numpy())), r"1\.kept"),
    "storage": (lambda b, w: setattr(b, "kept", w.untyped_storage()), r"1\.kept"),
    "dataclass": (lambda b, w: setattr(b, "kept", Kept(w)), r"1\.kept\.part"),
    "slots": (lambda b, w: setattr(b, "kept", Slotted(w)), r"1\.kept\.part"),
    "method": (lambda b, w: setattr(b, "kept", Slotted(w).use), r"1\.kept\.part"),
    "closure": (lambda b, w: setattr(b, "kept", [closure(w)]), r"'kept' in the closure 1\.kept\[0\]"),
    "default": (lambda b, w: setattr(b, "kept", defaulted(w)), r"1\.kept\.__defaults__\[0\]"),
    "partial": (lambda b, w: setattr(b, "kept", functools.partial(torch.mul, w)), r"1\.kept\[0\]"),
    "hook": (lambda b, w: hooked(b), r"'kept' in the closure 1\._forward_hooks\["),
    "parameter's attribute": (lambda b, w: setattr(b.linear.weight, "kept", w), r"1\.linear\.weight\.kept"),
    "views with a graph": (lambda b, w: setattr(b, "kept", [*b.linear.weight.chunk(2)]), r"1\.kept\[0\]"),
    "parameter in no module": (lambda b, w: setattr(b, "kept", [nn.Parameter(w)]), r"1\.kept\[0\]"),
}


@pytest.mark.parametrize("way", KEEPING)
def test_what_a_module_keeps_of_its_weight_is_refused(way: str) -> None:
    keep, where = KEEPING[way]
    model = built()
    keep(model[1], model[1].linear.weight.detach())
    with pytest.raises(
        zero.ModelError, match=rf"memory of parameters: {where}.*\(of '1\.linear\.weight'\)\. "
    ):
        check_aliases(model)


def test_an_array_that_a_parameter_was_made_from_is_refused() -> None:
    model, array = built(), np.ones((WIDTH, WIDTH), np.float32)
    model[0].linear.weight = nn.Parameter(torch.from_numpy(array))
    check_aliases(model)
    model[1].array = array[1:]
    with pytest.raises(zero.ModelError, match=r"1\.array \(of '0\.linear\.weight'\)"):
        check_aliases(model)


OUTSIDE: dict[str, Callable[[Tensor], Any]] = {
    "function": closure,
    "part": lambda w: w[1:],
    "parts": lambda w: [w[1:], {"another": w.t()}],
    "capsule": lambda w: torch.utils.dlpack.to_dlpack(w[1:]),
    "through a capsule": lambda w: torch.from_dlpack(w[1:]),
    "storage": lambda w: w.untyped_storage(),
}


def part_and_graph(model: nn.Sequential) -> Any:
    return OUTSIDE["part"](model[1].linear.weight.detach()), forward(model)


WITH_GRAPHS: dict[str, Callable[[nn.Sequential], Any]] = {
    "view with a graph": lambda model: model[1].linear.weight[1:],
    "views with a graph": lambda model: model[1].linear.weight.chunk(2),
    "beside a graph": part_and_graph,
}


@pytest.mark.parametrize("way", [*OUTSIDE, *WITH_GRAPHS])
def test_what_else_keeps_a_weight_is_refused(way: str) -> None:
    model = built()
    kept = OUTSIDE[way](model[1].linear.weight.detach()) if way in OUTSIDE else WITH_GRAPHS[way](model)
    with pytest.raises(zero.ModelError, match=r"something outside the model \(of '1\.linear\.weight'\)\. "):
        check_aliases(model)
    del kept
    check_aliases(model)


HELD: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda w: [w],
    "object": Kept,
    "module": lambda w: nn.ParameterList([nn.Parameter(w)]),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("way", HELD)
def test_who_holds_whole_values_is_warned(way: str, graph: bool) -> None:
    model = built()
    kept = HELD[way](model[1].linear.weight.detach()), forward(model) if graph else None
    with pytest.warns(UserWarning, match=r"outside the model shares the memory of 1\.linear\.weight,"):
        check_aliases(model)
    del kept
    with warnings.catch_warnings(action="error"):
        check_aliases(model)


def tied(model: nn.Sequential) -> None:
    model[1].linear.weight = model[0].linear.weight


def views_of_one_tensor(model: nn.Sequential) -> None:
    flat = torch.randn(2, WIDTH, WIDTH)
    model[0].linear.weight, model[1].linear.weight = (nn.Parameter(part) for part in flat)


def beside_a_buffer(model: nn.Sequential) -> None:
    flat = torch.randn(2, WIDTH, WIDTH)
    model[0].linear.weight = nn.Parameter(flat[0])
    model[1].register_buffer("other", flat[1])


def frozen(model: nn.Sequential) -> None:
    model[0].linear.weight.requires_grad_(False)
    model[0].kept = model[0].linear.weight.detach()


def cycle(model: nn.Sequential) -> None:
    gone: list[Any] = [model[0].linear.weight.detach()]
    gone.append(gone)


def from_array(model: nn.Sequential) -> None:
    model[0].linear.weight = nn.Parameter(torch.from_numpy(np.ones((WIDTH, WIDTH), np.float32)))


def forward(model: nn.Sequential) -> Tensor:
    x = torch.randn(2, WIDTH, requires_grad=True)
    return model(x).tanh() @ model[0].linear.weight.t() @ model[1].linear.weight[:2].t()


def forward_with_names(model: nn.Sequential) -> Tensor:
    first, second = model[0].linear.weight.t(), model[1].linear.weight[:2]
    third = model[1].linear.weight.view(WIDTH, WIDTH)
    return torch.randn(2, WIDTH, requires_grad=True) @ first @ third @ second.t()


HARMLESS: dict[str, Callable[[nn.Sequential], Any]] = {
    "nothing": lambda model: None,
    "tied": tied,
    "views of one tensor": views_of_one_tensor,
    "beside a buffer": beside_a_buffer,
    "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
    "average": torch.optim.swa_utils.AveragedModel,
    "copy": lambda model: {n: t.clone() for n, t in model.state_dict().items()},
    "shallow copy": copy.copy,
    "frozen": frozen,
    "garbage": cycle,
    "from an array": from_array,
    "graph": forward,
    "graph with names": forward_with_names,
    "graph of frozen": lambda model: forward(model.requires_grad_(False)),
    "after a backward": lambda model: forward(model).sum().backward(),
    "spectral norm": lambda model: nn.utils.spectral_norm(model[0].get_submodule("linear")),
    "weight norm": lambda model: nn.utils.parametrizations.weight_norm(model[0].linear),
    "recurrent": lambda model: model.append(nn.LSTM(WIDTH, WIDTH)),
    "released storage": lambda model: model[0].linear.weight.untyped_storage().nbytes(),
    "parameters in containers": lambda model: setattr(model, "all", [*model.parameters()]),
    "no elements": lambda model: setattr(model[0], "empty", nn.Parameter(torch.empty(0, 3))),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", HARMLESS)
def test_no_false_alarm(way: str) -> None:
    model = built()
    kept = HARMLESS[way](model)
    check_aliases(model)
    del kept


def loaded(model: nn.Module) -> dict[str, Tensor]:
    """A file's values under other names, which the model takes over as they are."""
    values = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name.removeprefix("model."): t for name, t in values.items()}, assign=True)
    return values


def file_of_safetensors(model: nn.Module) -> dict[str, Tensor]:
    """Its tensors are views of what was read, which is flat."""
    values = safetensors.torch.load(safetensors.torch.save(model.state_dict()))
    model.load_state_dict(values, assign=True)
    return values


def file_on_disk(model: nn.Module) -> dict[str, Tensor]:
    """So are these, of what is mapped."""
    with tempfile.NamedTemporaryFile() as file:
        safetensors.torch.save_file(model.state_dict(), file.name)
        values = safetensors.torch.load_file(file.name)
    model.load_state_dict(values, assign=True)
    return values


def views_of_bytes(model: nn.Module) -> dict[str, Tensor]:
    values = {name: tensor.view(torch.uint8).view(tensor.dtype) for name, tensor in loaded(model).items()}
    model.load_state_dict({name.removeprefix("model."): t for name, t in values.items()}, assign=True)
    return values


def last_value(model: nn.Module) -> Tensor:
    name, value = "", torch.empty(0)
    for name, value in model.state_dict().items():
        assert value.numel(), name
    return value


@pytest.mark.parametrize(
    "way",
    [lambda m: m.state_dict(), loaded, file_of_safetensors, file_on_disk, views_of_bytes, last_value],
)
def test_state_dicts_and_variables_of_before_are_warned_of(way: Callable[[nn.Module], Any]) -> None:
    model = built()
    kept = way(model)
    with pytest.warns(UserWarning, match=r"shares the memory of .*1\.linear\.bias, such as a state dict"):
        check_aliases(model)
    del kept


def test_what_is_frozen_for_the_collector_is_refused_with_what_to_do() -> None:
    model = built()
    check_aliases(model)
    kept = model.state_dict()
    gc.freeze()
    try:
        with pytest.raises(
            zero.ModelError, match=r"something outside the model .*call gc\.unfreeze\(\) before"
        ):
            check_aliases(model)
    finally:
        gc.unfreeze()
    del kept
    gc.freeze()
    try:
        check_aliases(model)
    finally:
        gc.unfreeze()


def test_without_the_use_count_models_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "_use_count", None)
    aliases._uses_of_one.cache_clear()
    try:
        model = built()
        check_aliases(model)
        model[1].kept = model[1].linear.weight.detach()
        with pytest.raises(zero.ModelError, match=r"1\.kept"):
            check_aliases(model)
    finally:
        aliases._uses_of_one.cache_clear()


def refused_body(context: Context, deferred: bool) -> None:
    """Nothing has changed after the refusal, and what was kept aside trains."""
    with zero.init() if deferred else warnings.catch_warnings():
        model = built()
        model[1].kept = [model[1].linear.weight.data]
    with pytest.raises(zero.ModelError, match=r"1\.kept\[0\] \(of '1\.linear\.weight'\)"):
        zero.initialize(model, adamw(model), zero.Config(timeout=20))
    del model[1].kept
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    engine.backward(model(torch.ones(2, WIDTH, device=engine.accelerator.device)).sum())
    assert engine.step()


@pytest.mark.parametrize("deferred", [False, True])
def test_initialize_refuses_aliases_before_it_changes_anything(cluster: Clusters, deferred: bool) -> None:
    cluster(2).run(refused_body, deferred=deferred)
