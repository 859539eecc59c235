"""Optimizer state that trains but that no checkpoint can hold: found at initialize, or at the first step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.meshes import Stage, mesh_of
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.told import raised


class Halved(Tensor):
    """A tensor in 16 bits that looks like one in 32, as quantised optimizer state does."""

    halves: Tensor

    @staticmethod
    def __new__(cls, halves: Tensor) -> Halved:
        made = Tensor._make_wrapper_subclass(cls, halves.shape, dtype=torch.float32, device=halves.device)
        made.halves = halves
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].halves.copy_(args[1])
            return args[0]

        def widen(value: Any) -> Any:
            return value.halves.float() if isinstance(value, Halved) else value

        return func(*tree_map(widen, args), **tree_map(widen, kwargs or {}))


class Telling(Halved):
    """One that says which tensor it wraps, and what else it needs to be made again."""

    note: Any = (torch.bfloat16, {"block": 4})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["halves"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Telling:
        made: Any = Telling(inner["halves"])
        made.note = context
        return made  # type: ignore[no-any-return]


class Unplain(Telling):
    note = object()


class Nested(Telling):
    """Wraps another wrapper."""


def nameless(halves: Tensor) -> Tensor:
    class Local(Telling):
        pass

    return Local(halves)


class Averaging(Optimizer):
    """Momentum, kept as `make` makes it."""

    def __init__(self, parameters: Any, make: Callable[[Tensor], Any]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["average"] = self.make(parameter)
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


STATES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a wrapper": (lambda p: Halved(torch.zeros_like(p, dtype=torch.bfloat16)), "a Halved (torch.float32"),
    "a wrapper in a list": (lambda p: [Halved(torch.zeros_like(p))], "a Halved, which a checkpoint cannot"),
    "a wrapper that tells": (lambda p: Telling(torch.zeros_like(p, dtype=torch.bfloat16)), ""),
    "a wrapper that needs an object": (lambda p: Unplain(torch.zeros_like(p)), "needs a object to be made"),
    "a wrapper around one": (lambda p: Nested(Telling(torch.zeros_like(p))), "wraps a Telling as 'halves'"),
    "a wrapper without a name": (lambda p: nameless(torch.zeros_like(p)), "is not found under that name"),
    "sparse": (lambda p: torch.zeros(p.shape).to_sparse(), "torch.sparse_coo"),
    "two doubles": (lambda p: torch.zeros_like(p, dtype=torch.complex128, device="cpu"), "complex128"),
    "a set": (lambda p: {"seen"}, "is a set, which a checkpoint cannot hold"),
    "plain": (torch.zeros_like, ""),
    "plain of another shape": (lambda p: [torch.zeros(3), {"a": (1, None)}], ""),
}


@pytest.mark.parametrize("which", [which for which, (_, expected) in STATES.items() if expected])
def test_initialize_tells_of_state_that_cannot_be_saved(which: str) -> None:
    make, expected = STATES[which]
    model = fresh()
    with pytest.raises(zero.OptimizerError, match=r"^optimizer state 'average'.* of 'gain'") as caught:
        zero.initialize(model, Averaging(model.parameters(), make), zero.Config(stage=0))
    assert expected in str(caught.value)
    assert "A checkpoint cannot hold it: use an optimizer whose state is plain" in str(caught.value)
    assert not hasattr(model.gain, "_zero_name"), "nothing was changed"


def stages_body(context: Context) -> list[str]:
    """Of two stages of a pipeline, the second's optimizer keeps what cannot be saved."""
    config = zero.Config(timeout=10, local_modules={"*": "pp"})
    arranged: dict[str, Any] = {"mesh": mesh_of(("pp", 2), ("dp", 1)), "data_dims": "dp"}

    def optimizer(model: nn.Module) -> Optimizer:
        return Averaging(model.parameters(), STATES["plain" if context.rank == 0 else "a set"][0])

    model = Stage(context.rank)
    at_once = raised(lambda: zero.initialize(model, optimizer(model), config, **arranged))
    engine = zero.initialize(model, None, config, **arranged)
    return [at_once, raised(lambda: engine.attach(optimizer(model)))]


def test_one_stages_state_that_cannot_be_saved_is_told_on_every_rank(cluster: Clusters) -> None:
    first, second = cluster(2).run(stages_body)
    assert first == second
    of_second = "optimizer state 'average' of 'layers.layer1_0.weight' is a set"
    assert all(told.startswith(f"OptimizerError: {of_second}") for told in first)


def told_late(model: nn.Module, make: Callable[[Tensor], Any]) -> Optimizer:
    """An optimizer that cannot be copied, and so not be tried before it steps."""
    optimizer: Any = Averaging([p for p in model.parameters() if p.requires_grad], make)
    optimizer.lock = threading.Lock()
    return optimizer  # type: ignore[no-any-return]


def first_step_body(context: Context, path: str, which: str, stage: int) -> dict[str, Any]:
    model = fresh()
    optimizer = told_late(model, STATES[which][0])
    config = zero.Config(stage=stage, whole_parameters=True if stage else None, timeout=10)
    engine = zero.initialize(model, optimizer, config)
    said = []
    for _ in range(3):
        engine.backward(language_loss(model, engine.steps, context.rank))
        said.append(raised(engine.step))
    return {
        "said": said,
        "steps": engine.steps,
        "saved": raised(lambda: engine.save_checkpoint(path)),
        "finite": all(v.isfinite().all() for v in engine.state_dict().values()),
    }


@pytest.mark.parametrize("stage", [3, 0])
@pytest.mark.parametrize("which", STATES)
def test_the_first_step_tells_every_rank_of_state_that_cannot_be_saved(
    cluster: Clusters, tmp_path: Path, which: str, stage: int
) -> None:
    expected = STATES[which][1]
    results = cluster(2).run(first_step_body, path=str(tmp_path / "c"), which=which, stage=stage)
    for found in results:
        assert found["steps"] == 3
        assert found["finite"]
        assert found["said"][1:] == ["nothing raised"] * 2
        if expected:
            assert found["said"][0].startswith("StateError: optimizer state 'average")
            assert expected in found["said"][0]
            assert "A checkpoint cannot hold it: use an optimizer whose state is plain" in found["said"][0]
            assert "StateError" in found["saved"]
        else:
            assert found["said"][0] == found["saved"] == "nothing raised"
    assert results[0]["said"] == results[1]["said"]


def skipped_body(context: Context, path: str) -> list[str]:
    """The first step overflows, so the optimizer has no state after it."""
    model: nn.Module = fresh()
    optimizer = told_late(model, STATES["a wrapper"][0])
    engine = zero.initialize(model, optimizer, zero.Config(precision="fp16", loss_scale=2.0**16, timeout=10))
    said = []
    for step in range(2):
        loss = language_loss(model, engine.steps, context.rank)
        engine.backward(loss * float("inf") if step == 0 else loss * 1e-3)
        said.append(raised(engine.step))
    return said


def test_a_first_step_that_is_skipped_is_not_the_first(cluster: Clusters, tmp_path: Path) -> None:
    for first, second in cluster(2).run(skipped_body, path=str(tmp_path)):
        assert first == "nothing raised"
        assert second.startswith("StateError: optimizer state 'average'")


class Unreadable(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("as the test wants")


def unreadable_body(context: Context) -> str:
    model = fresh()
    optimizer = told_late(model, lambda p: Unreadable())
    engine = zero.initialize(model, optimizer, zero.Config(stage=0, timeout=10))
    engine.backward(language_loss(model, 0, context.rank))
    return raised(engine.step)


def test_an_error_in_the_check_says_what_was_checked(cluster: Clusters) -> None:
    (told,) = cluster(1).run(unreadable_body)
    assert told.endswith("rank 0 could not check the optimizer's state: RuntimeError: as the test wants")


class Fickle(Telling):
    """Is saved, and not accepted afterwards, as by another version of its library."""

    accepted = True

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Telling:
        if not Fickle.accepted:
            raise TypeError("made by an older version")
        return Fickle(inner["halves"])


def refused_body(context: Context, path: str) -> dict[str, Any]:
    model = fresh()
    optimizer = Averaging(model.parameters(), lambda p: Fickle(torch.full_like(p, 2, dtype=torch.bfloat16)))
    engine = zero.initialize(model, optimizer, zero.Config(stage=0, timeout=10))
    for step in range(2):
        engine.backward(language_loss(model, engine.steps, context.rank))
        engine.step()
        if step == 0:
            engine.save_checkpoint(path)
    name, parameter = next(model.named_parameters())
    before, state = parameter.detach().clone(), engine.full_optimizer_state(name)
    Fickle.accepted = False
    try:
        said = raised(lambda: engine.load_checkpoint(path))
    finally:
        Fickle.accepted = True
    return {
        "said": said,
        "same": torch.equal(before, parameter),
        "state": {key: value.unique().tolist() for key, value in state.items()},
    }


def test_state_that_its_class_refuses_changes_nothing(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(refused_body, path=str(tmp_path / "c")):
        assert found["said"].startswith("StateError: ")
        assert "Fickle cannot be made of what the checkpoint has (TypeError: made by an old" in found["said"]
        assert found["same"]
        assert found["state"] == {"average.halves": [2.0]}, "it has no dequantize() of its own"
