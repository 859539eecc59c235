"""Parameters that wrap tensors, or have some beside them: sharded, moved and saved as the bits of these."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import accelz
import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw
from tests.zero.helpers.wrappers import Codes, Nested, Packed, Wrapping
from zero.consolidate import Options, consolidate, open_source
from zero.sharding.forms import descriptions, inner_leaves, named_leaves

WIDTH = 16
KINDS = {"codes": Codes, "nested": Nested, "packed": Packed}

zero.register_form(Packed, Packed.leaves)


def built(kind: Any, seed: int = 3) -> nn.Sequential:
    """On the host."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Wrapping(WIDTH, kind) for _ in range(3)))


def moved(model: nn.Sequential) -> nn.Sequential:
    """To the device, but for what the engine moves itself."""
    return model if isinstance(model[0].weight, Packed) else model.to(accelz.current().device)


def losses(model: nn.Module, engine: zero.Engine | None = None, steps: int = 3) -> list[float]:
    """Of an engine, or unsharded, on the host."""
    optimizer = None if engine is not None else adamw(model)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0)).to(device_of(model))
    found = []
    for _ in range(steps):
        loss = model(x).square().mean()
        if engine is not None:
            train_on(engine, loss)
        elif optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the leaves of its weights, on the host."""
    named = named_leaves(model)
    return {name: p.detach().cpu().clone() for name, p in named if not p.requires_grad}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def packed_body(context: Context, stage: int, way: str, folder: str) -> None:
    offload = {
        "device": zero.Offload(),
        "host": zero.Offload(params="host", optimizer="host"),
        "disk": zero.Offload(params="disk", optimizer="disk", path=folder),
    }[way]
    config = zero.Config(timeout=20, stage=stage, offload=offload)
    for name, kind in KINDS.items():
        wanted, before = losses(built(kind)), frozen(built(kind))
        model = moved(built(kind, seed=3 + context.rank))  # all get rank 0's values
        engine = zero.initialize(model, adamw(model), config)
        assert losses(model, engine) == pytest.approx(wanted, abs=1e-6)
        with zero.gathered(model):
            assert same(frozen(model), before)
        state = engine.state_dict()
        path = f"{folder}/{name}"
        engine.save_checkpoint(path)
        after = losses(model, engine, 1)
        with zero.gathered(model[1].weight, write_rank=0):
            for leaf in inner_leaves(model)[model[1].weight].values():
                leaf.data.zero_()
        engine.load_checkpoint(path)
        assert losses(model, engine, 1) == after
        if context.rank == 0:
            assert same({key: state[key] for key in before}, before)
        engine.load_state_dict(state)
        with zero.gathered(model):
            assert same(frozen(model), before)


@pytest.mark.parametrize(
    ("stage", "way"), [*((stage, "device") for stage in range(4)), (3, "host"), (3, "disk")]
)
def test_they_keep_their_bits_and_train_alike(
    cluster: Clusters, stage: int, way: str, tmp_path: Path
) -> None:
    cluster(2).run(packed_body, stage=stage, way=way, folder=str(tmp_path))


def saved_body(context: Context, path: str) -> None:
    model = moved(built(Nested))
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    losses(model, engine)
    engine.save_checkpoint(path)
    for name, kind in KINDS.items():  # small enough to be kept whole on all ranks
        model = moved(built(kind))
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, persistent_below=1 << 20))
        losses(model, engine, 1)
        engine.save_checkpoint(f"{path}-{name}")
        engine.load_checkpoint(f"{path}-{name}")


def loaded_body(context: Context, path: str) -> None:
    other = moved(built(Nested, seed=5))
    engine = zero.initialize(other, adamw(other), zero.Config(timeout=20))
    engine.load_checkpoint(path)
    with zero.gathered(other):
        assert same(frozen(other), frozen(built(Nested)))
    plain = moved(built(Codes))
    engine = zero.initialize(plain, adamw(plain), zero.Config(timeout=20))
    with pytest.raises(
        zero.StateError, match=r"missing .* 0\.weight\.codes,.*unexpected .* 0\.weight\.inside"
    ):
        engine.load_checkpoint(path)


def test_checkpoints_fit_other_numbers_of_ranks(cluster: Clusters, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    cluster(2).run(saved_body, path=path)
    for ranks in (1, 3):
        cluster(ranks).run(loaded_body, path=path)


def consolidated_body(context: Context, path: str) -> None:
    """Whole weights in another dtype leave what is packed as it is, and only that is loaded into it."""
    model = moved(built(Codes))
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    engine.save_checkpoint(f"{path}/saved")
    if context.rank == 0:
        with open_source(Path(path, "saved")) as source:
            consolidate(source, Path(path, "whole"), Options(dtype="bf16"))
        stored = load_file(f"{path}/whole/model.safetensors")
        assert {stored["0.weight.scale"].dtype, stored["0.up.weight"].dtype} == {
            torch.float32,
            torch.bfloat16,
        }
        stored["0.weight.scale"] = stored["0.weight.scale"].bfloat16()
        save_file(stored, f"{path}/rounded.safetensors")
    state = engine.state_dict() | {"0.weight.scale": torch.zeros(WIDTH, 1, dtype=torch.float16)}
    other = moved(built(Codes, seed=5))
    engine = zero.initialize(other, adamw(other), zero.Config(timeout=20))
    engine.load_pretrained(f"{path}/whole")
    with pytest.raises(zero.StateError, match=r"0\.weight\.scale \(dtype BF16 instead of F32"):
        engine.load_pretrained(f"{path}/rounded.safetensors")
    with pytest.raises(zero.StateError, match=r"another dtype: 0\.weight\.scale: torch.float16 instead of"):
        engine.load_state_dict(state if context.rank == 0 else None)
    with zero.gathered(other):
        assert same(frozen(other), frozen(built(Codes)))


def test_whole_weights_keep_what_is_packed(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(consolidated_body, path=str(tmp_path))


class Scaled(nn.Parameter):
    """One that gets its values when it is sharded, where zero.init() has made it."""

    scale: Tensor

    @classmethod
    def drawn(cls) -> Any:
        made: Any = cls(torch.randn(80, 80), requires_grad=False)
        made.scale = torch.rand(80, 1)
        return made


def born_body(context: Context) -> None:
    zero.register_form(Scaled, Packed.leaves)
    states = []
    for recorded in (nullcontext(), zero.init()):
        torch.manual_seed(context.rank)
        with recorded:
            model = nn.Linear(4, 4)
            model.register_parameter("scaled", Scaled.drawn())
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, precision="bf16"))
        with zero.gathered(model):
            states.append(frozen(model))
            assert same(states[-1], states[0])
        state = engine.state_dict()
        assert context.rank or set(states[0]) < set(state)
    assert set(states[0]) == {"scaled", "scaled.scale"}
    ranks = [None] * context.size
    torch.distributed.all_gather_object(ranks, states[0]["scaled.scale"].sum().item())
    assert len(set(ranks)) == 1


def test_born_sharded_they_have_what_lies_beside_them(cluster: Clusters) -> None:
    cluster(2).run(born_body)


def guarded_body(context: Context) -> None:
    for kind in (Codes, Nested):
        model = moved(built(kind))
        weight = model[1].weight
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
        for use in (
            lambda weight=weight: weight + 1,
            lambda weight=weight: nn.functional.linear(torch.ones(1, WIDTH), weight),
            lambda weight=weight: weight.values(),
        ):
            with pytest.raises(zero.ShardedParameterError, match=r"1\.weight"):
                use()
        assert (weight.shape, weight.dtype, weight.requires_grad) == ((WIDTH, WIDTH), torch.float32, False)
        assert model[1].weight is weight
        assert isinstance(weight, kind)
        with zero.gathered(weight):
            assert type(weight) is kind
            assert (weight + 1).shape == weight.shape
        weight.requires_grad_(True)
        with pytest.raises(zero.ModelError, match=r"no longer frozen: 1\.weight\."):
            losses(model, engine, 1)
        del engine


def test_released_ones_raise(cluster: Clusters) -> None:
    cluster(2).run(guarded_body)


class Silent(Tensor):
    """Answers torch's operations, and does not say what it wraps."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Silent:
        made: Silent = Tensor._make_wrapper_subclass(cls, shape)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls(tuple(args[0].shape))


class Loose(nn.Parameter):
    """One whose form gives no tensors of its own."""


def test_what_is_refused() -> None:
    model = built(Codes)
    optimizer = adamw(model)
    model[2].weight.requires_grad_(True)
    with pytest.raises(zero.ModelError, match=r"'2\.weight' is a Codes, of which .* freeze it"):
        zero.initialize(model, optimizer)
    model[2].weight = nn.Parameter(Silent((WIDTH, WIDTH)), requires_grad=False)
    with pytest.raises(zero.ModelError, match=r"'2\.weight' is a Silent, .*register_form"):
        zero.initialize(model, optimizer)
    model[2].weight = Loose(torch.ones(WIDTH, WIDTH), requires_grad=False)
    for given in ([model[2].weight], {"codes": 1}):
        zero.register_form(Loose, lambda _, weight, given=given: given)
        with pytest.raises(zero.ModelError, match=r"'2\.weight': .* a Loose, .* the same tensor objects"):
            zero.initialize(model, optimizer)
    zero.register_form(Loose, lambda _, weight: {"": weight, "scale": torch.ones(1)})
    with pytest.raises(zero.ModelError, match=r"'2\.weight': .* a Loose, .* the same tensor objects"):
        zero.initialize(model, optimizer)
    model[2].weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    model.register_buffer("kept", Codes.of(torch.ones(2, 2)))
    with pytest.raises(zero.ModelError, match=r"buffer 'kept' is a Codes, .* frozen parameter"):
        zero.initialize(model, optimizer)
    with pytest.raises(zero.UsageError, match="a class of parameters"):
        zero.register_form(Codes, None)  # type: ignore[arg-type]


def divided_body(context: Context) -> None:
    """Codes inside a DTensor, frozen and trained."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for trained in (False, True):
        model = built(Codes)
        block: Any = model[2].weight
        spec: Any = distribute_tensor(torch.zeros(2 * WIDTH, WIDTH), mesh, [Shard(0)])._spec
        divided: Any = DTensor(block.detach(), spec, requires_grad=False)
        model[2].weight = nn.Parameter(divided, requires_grad=trained)
        with pytest.raises(zero.ModelError, match=r"'2\.weight' is a DTensor around a Codes, .* not divided"):
            zero.initialize(model, adamw(model), zero.Config())


def test_blocks_of_codes_are_refused(cluster: Clusters) -> None:
    cluster(2).run(divided_body)


def test_ranks_agree_on_the_order_of_tensors_that_a_class_gives_in_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some give a set's, which differs from process to process."""

    def seen() -> list[tuple[str, str]]:
        model = built(Codes)
        told = {id(leaf): text for leaf, text in descriptions(model).items()}
        return [(name, told.get(id(leaf), "")) for name, leaf in named_leaves(model)]

    before, given = seen(), Codes.__tensor_flatten__
    monkeypatch.setattr(Codes, "__tensor_flatten__", lambda self: (given(self)[0][::-1], given(self)[1]))
    assert seen() == before


def test_a_plan_knows_them() -> None:
    model = built(Codes)
    plan = zero.plan(model, adamw(model), ranks=2)
    frozen = [(g.dtype, g.numel) for unit in plan.units for g in unit.groups if not g.trainable]
    assert frozen == [(torch.int8, WIDTH**2), (torch.float32, 2 * WIDTH)] * 3  # slices of 16 elements
