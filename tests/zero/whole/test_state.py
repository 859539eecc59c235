"""Reading and writing whole values: gathered(), zero.init(), state dicts, optimizer state."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import (
    WIDTH,
    LanguageModel,
    Stack,
    device_of,
    features,
    fresh,
    language_loss,
    tokens,
)
from tests.zero.helpers.paths import STRAIGHT
from tests.zero.helpers.training import adamw, train_zero
from zero.deferred import deferred_init
from zero.migration_hints import ARGUMENT_HINTS, MIGRATION_HINTS


def gathered_body(context: Context, stage: int, precision: str) -> dict[str, Any]:
    model = fresh()
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = zero.Config(stage=stage, precision=precision, timeout=10)
    engine = zero.initialize(model, adamw(model), config)
    dtype = config.dtype or torch.float32
    result: dict[str, Any] = {}

    with zero.gathered(model):
        result["read all"] = all(
            torch.equal(p.detach().cpu(), original[n].to(dtype)) for n, p in model.named_parameters()
        )
    weight = model.blocks[1].up.weight
    with zero.gathered(weight), zero.gathered([weight, model.gain]):
        result["nested"] = torch.equal(weight.detach().cpu(), original["blocks.1.up.weight"].to(dtype))
    result["released"] = all(u.idle or u.resident for u in engine.units)

    with torch.no_grad(), zero.gathered(weight, write_rank=context.size - 1):
        if context.rank == context.size - 1:
            weight.fill_(0.25)
            weight[0, 0] = -3.0
        else:
            weight.fill_(77.0)  # another rank's values do not count
    with zero.gathered(weight):
        result["written"] = (weight[0, 0].item(), weight[1:].min().item(), weight[1:].max().item())
    master = engine.full_master("blocks.1.up.weight")
    result["master"] = (master.dtype == torch.float32, master[0, 0].item(), master[1:].sum().item())
    other = engine.full_master("blocks.1.down.weight")
    result["others keep their fp32"] = torch.equal(
        other.cpu(), original["blocks.1.down.weight"].to(other.dtype)
    )

    for name, call in {
        "lost write": lambda: _write_without_rank(weight),
        "rank": lambda: zero.gathered(weight, write_rank=9).__enter__(),
        "name": lambda: zero.gathered("norm.weight").__enter__(),  # type: ignore[arg-type]
        "pairs": lambda: zero.gathered(model.named_parameters()).__enter__(),  # type: ignore[arg-type]
        "engine": lambda: zero.gathered(engine).__enter__(),  # type: ignore[arg-type]
        "no name": lambda: engine.full_master(weight),  # type: ignore[arg-type]
    }.items():
        try:
            call()
            result[name] = "nothing raised"
        except zero.UsageError as error:
            result[name] = str(error)
    try:
        with zero.gathered(weight):
            raise KeyError("body")
    except KeyError:
        result["exception"] = all(u.idle or u.resident for u in engine.units)
    with zero.gathered(nn.Linear(2, 2)):  # not sharded: passes through
        pass
    engine.backward(language_loss(model, 0, context.rank))
    result["works"] = engine.step()
    return result


def _write_without_rank(weight: nn.Parameter) -> None:
    with torch.no_grad(), zero.gathered(weight):
        weight.zero_()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (3, "bf16"), (2, "bf16"), (0, "fp32")])
def test_gathered(cluster: Clusters, size: int, stage: int, precision: str) -> None:
    for found in cluster(size).run(gathered_body, stage=stage, precision=precision):
        assert found["read all"]
        assert found["nested"]
        assert found["released"]
        assert found["written"] == (-3.0, 0.25, 0.25)
        assert found["master"] == (True, -3.0, 28 * 12 * 0.25)
        # A frozen parameter has no fp32 master: at 16 bits its rounding is all there is.
        assert found["others keep their fp32"] or precision == "bf16"
        lost = "change is lost" if stage == 3 and size > 1 else "masters and other ranks may not"
        assert f"{lost} unless you pass write_rank" in found["lost write"]
        assert "write_rank=9 is not a rank" in found["rank"]
        for name, given in {"name": "str", "pairs": "tuple", "engine": "Engine"}.items():
            assert f"takes parameters or a module, got {given}" in found[name]
        assert "expected a parameter's name" in found["no name"]
        assert found["exception"]
        assert found["works"]


def _write_half(weight: nn.Parameter) -> None:
    with torch.no_grad(), zero.gathered(weight, write_rank=0):
        weight.fill_(7.0)
        raise ArithmeticError


def half_written_body(context: Context, stage: int) -> tuple[str, str]:
    """An error in the middle of a change."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, timeout=10))
    with pytest.raises(ArithmeticError):
        _write_half(model.norm.weight)
    try:
        loss = language_loss(model, 0, context.rank)
        engine.backward(loss)
    except zero.UsageError as error:
        return str(error), ""
    return "", f"{engine.full_master('norm.weight').max().item()}"


@pytest.mark.parametrize("stage", [2, 3])
def test_an_error_in_the_middle_of_a_change(cluster: Clusters, stage: int) -> None:
    for refused, value in cluster(2).run(half_written_body, stage=stage):
        assert ("interrupted" in refused) == (stage == 2)
        assert value == ("" if stage == 2 else "1.0")


def decorated_body(context: Context, stage: int) -> list[float]:
    """A block as a decorator of a function that is called more than once."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, timeout=10))

    @zero.gathered(model.norm.parameters(), write_rank=0)
    def fill(value: float) -> None:
        if context.rank == 0:
            nn.init.constant_(model.norm.weight, value)

    found = []
    for value in (2.0, 3.0):
        fill(value)
        found.append(engine.full_master("norm.weight").max().item())
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_block_over_an_iterator_decorates_many_calls(cluster: Clusters, stage: int) -> None:
    assert cluster(2).run(decorated_body, stage=stage) == [[2.0, 3.0]] * 2


class Initialised(nn.Module):
    """Constructors as people write them: custom initialisation after the defaults, values read in between."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.3, 3)]
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in rates)
        self.norm = nn.LayerNorm(width)
        self.convolution = nn.Conv2d(16, 32, 3)
        self.orthogonal = nn.Parameter(torch.empty(width, width))
        self.truncated = nn.Parameter(init.trunc_normal_(torch.empty(width, width), std=0.02))
        self.scaled = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.copied = nn.Parameter(self.scaled.detach().clone() * 2)
        self.permuted = nn.Parameter(torch.randperm(width * width).view(width, width).float())
        self.register_buffer("mask", torch.tril(torch.ones(width, width)))
        self.register_buffer("noise", torch.rand(width, width))
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)  # copies its layer
        init.orthogonal_(self.orthogonal)
        self.apply(self._initialise)
        with torch.no_grad():
            self.blocks[1].weight[:, 3].zero_()
            self.blocks[2].weight.mul_(self.scaled.abs().mean())
        self.total = self.blocks[0].weight.sum().item()  # needs a value right now

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.02)
            init.zeros_(module.bias)


class Aliased(nn.Module):
    """Parameters whose memory something else uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.now = nn.Parameter(torch.randn(96, 96), requires_grad=False)  # else the engine refuses it
        self.register_buffer("first", self.now.detach())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parametrization does not keep an alias
            self.layer = nn.utils.spectral_norm(nn.Linear(96, 96))
        self.q, self.k, self.v = map(nn.Parameter, torch.randn(3 * 96, 96).chunk(3))
        self.alone = nn.Parameter(torch.randn(96, 96))
        forgotten: list[Any] = [self.alone.data]
        forgotten.append(forgotten)  # there until garbage is collected


def compare_born(build: Callable[[], nn.Module], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    plain = build()
    after_plain = torch.get_rng_state()
    torch.manual_seed(seed)
    with zero.init(zero.Config()):
        born = build()
    return {
        "generator": torch.equal(after_plain, torch.get_rng_state()),
        "plain": plain,
        "born": born,
        "buffers": all(torch.equal(a, b) for a, b in zip(plain.buffers(), born.buffers(), strict=True)),
        "hollow": sum(p.untyped_storage().nbytes() == 0 for p in born.parameters()),
    }


def born_body(context: Context, stage: int) -> dict[str, Any]:
    result = {}
    builds = (
        Initialised,
        Aliased,
        LanguageModel,
        lambda: nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 9)),
    )
    for build in builds:
        found = compare_born(build, seed=11)
        plain, born = found.pop("plain"), found.pop("born")
        identities = [id(p) for p in born.parameters()]
        optimizer = torch.optim.AdamW(born.parameters(), lr=1e-3)
        engine = zero.initialize(born, optimizer, zero.Config(stage=stage, timeout=10))
        expected = plain.state_dict()
        state = engine.state_dict()
        found["equal"] = context.rank > 0 or (
            list(state) == list(expected) and all(torch.equal(state[n], expected[n]) for n in expected)
        )
        found["identity"] = identities == [id(p) for p in born.parameters()]
        result[type(plain).__name__] = found
    return result


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 3), (2, 1)])
def test_born_sharded_equals_the_plain_constructor(cluster: Clusters, size: int, stage: int) -> None:
    for per_model in cluster(size).run(born_body, stage=stage):
        for name, found in per_model.items():
            for what in ("generator", "buffers", "equal", "identity"):
                assert found[what], (name, what)
        assert per_model["Initialised"]["hollow"] > 10
        assert per_model["Aliased"]["hollow"] == 1


def test_before_initialize_values_are_refused() -> None:
    with zero.init():
        model = nn.Linear(128, 128)
    assert tuple(model.weight.shape) == (128, 128)
    with pytest.raises(zero.ShardedParameterError, match=r"made under zero.init\(\)"):
        model(torch.ones(1, 128))
    with pytest.raises(zero.UsageError, match=r"before zero.initialize"), zero.gathered(model.weight):
        pass
    with pytest.raises(zero.ConfigError, match=r"expected a zero.Config, got dict"), zero.init({"stage": 3}):  # type: ignore[arg-type]
        pass


def test_what_shares_a_parameters_memory_can_be_read_before_initialize() -> None:
    found = compare_born(Aliased, seed=3)
    plain, born = found["plain"], found["born"]
    assert torch.equal(born.first, plain.now)
    assert torch.equal(born.layer.weight, plain.layer.weight)
    assert born.layer.weight.data_ptr() == born.layer.weight_orig.data_ptr()


def test_values_that_have_come_last_as_long_as_their_parameter() -> None:
    with zero.init():
        model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    deferred_init.materialize([model[0].weight])
    storage = model[0].weight.untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) == 2  # of the parameter and of `storage`


def test_parameters_over_the_same_memory_are_refused_born_or_not() -> None:
    with zero.init():
        model = nn.Linear(96, 96)
        model.twin = nn.Parameter(model.weight.data)
    with pytest.raises(zero.ModelError, match="over the same memory"):
        zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=10))


class Factories(nn.Module):
    """Makes tensors in the dtype that is the default while the constructor runs."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.Parameter(torch.randn(96, 96) * 0.02)
        self.uniform = nn.Parameter(torch.rand(96, 96))
        self.steps = nn.Parameter(torch.linspace(0, 1, 96 * 96))
        self.layer = nn.Linear(96, 96)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_that_of_the_constructor(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        found = compare_born(Factories, seed=5)
    finally:
        torch.set_default_dtype(torch.float32)
    plain, born = found["plain"], found["born"]
    assert found["hollow"] == 4
    deferred_init.materialize(born.parameters())
    for (name, value), ours in zip(plain.named_parameters(), born.parameters(), strict=True):
        assert torch.equal(value, ours), name


class PastTheDispatcher(nn.Module):
    """Reads and writes memory without any operation of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.written = nn.Parameter(torch.randn(96, 96))
        self.written.data.numpy()[3] *= 2
        self.table = nn.Parameter(torch.from_numpy(np.sin(torch.linspace(0, 9, 96 * 96).numpy())))
        self.listed = nn.Parameter(torch.tensor(torch.randn(96, 96).tolist()))
        inner = nn.Module()
        inner.register_buffer("mask", torch.rand(96, 96))
        inner.weight = nn.Parameter(torch.randn(96, 96))
        self.parts = nn.ModuleList(copy.deepcopy(inner) for _ in range(2))
        self.loaded = pickle.loads(pickle.dumps(inner))
        self.shared = nn.Parameter(torch.randn(96, 96).share_memory_())
        self.sparse = nn.Parameter(torch.randn(96, 96).relu().to_sparse().to_dense())
        self.told = repr(torch.randn(96, 96))


def test_memory_that_is_read_past_the_dispatcher_is_there() -> None:
    found = compare_born(PastTheDispatcher, seed=7)
    plain, born = found["plain"], found["born"]
    assert found["generator"]
    assert found["buffers"]
    assert born.told == plain.told
    assert found["hollow"] == 2  # those of the parts
    deferred_init.materialize(born.parameters())
    for (name, value), ours in zip(plain.named_parameters(), born.parameters(), strict=True):
        assert torch.equal(value, ours), name


class Calls(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls_to_shard(layers: int, born: bool) -> int:
    """The number of operations in zero.initialize for a model whose layers are copies of one."""
    with zero.init() if born else nullcontext():
        layer = nn.Linear(96, 96, bias=False)
        model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(layers)))
        del layer
    with Calls() as calls:
        zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=10))
    return calls.count


def test_a_copied_layer_replays_its_original_and_no_other_copy() -> None:
    replayed = [
        calls_to_shard(layers, born=True) - calls_to_shard(layers, born=False) for layers in (4, 8, 16)
    ]
    assert replayed[2] - replayed[1] == 2 * (replayed[1] - replayed[0]) > 0


def test_an_exception_in_the_constructor_leaves_nothing_behind() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(128, 128)
            raise KeyError("no")

    with pytest.raises(KeyError), zero.init():
        Broken()
    assert nn.Linear(128, 128).weight.sum().item() != 0  # the plain constructor is itself again


def born_peak_body(context: Context) -> tuple[int, int]:
    """The peak of the rank's own parameter storage while a deferred model is sharded, and a block's size.

    The model has ten equal blocks; sizes are in bytes. Memory that ranks share is not counted: it cannot be
    resized, and the node has it once.
    """
    with zero.init():
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(10)))
    held: list[int] = []
    broadcast = context.accelerator.collectives.broadcast

    def spy(*args: Any, **kwargs: Any) -> Any:
        storages = [p.untyped_storage() for p in model.parameters()]
        held.append(sum(s.nbytes() for s in storages if s.resizable()))
        return broadcast(*args, **kwargs)

    context.accelerator.collectives.broadcast = spy  # type: ignore[method-assign]
    zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=10))
    del context.accelerator.collectives.broadcast
    return max(held), 256 * 256 * 4


def test_no_rank_ever_holds_the_whole_model(cluster: Clusters) -> None:
    for peak, block in cluster(2).run(born_peak_body):
        assert peak == block  # one unit, while it is being sharded


def plain_load_body(context: Context, stage: int) -> bool:
    """Whether the model's own load_state_dict(), which is refused otherwise, works inside `gathered`."""
    model, new = fresh(), {n: v + 1 for n, v in fresh().state_dict().items()}
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, precision="bf16", timeout=10))
    for part, state in ((model, new), (model.blocks[0].up, fresh().blocks[0].up.state_dict())):
        with pytest.raises(zero.UsageError, match=r"engine\.load_state_dict"):
            part.load_state_dict(state)
    with zero.gathered(model, write_rank=0):
        if context.rank == 0:
            model.load_state_dict(new)
    masters = {n: engine.full_master(n) for n, _ in model.named_parameters()}
    return all(torch.equal(m.cpu(), new[n].bfloat16().float()) for n, m in masters.items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_models_own_load_state_dict_is_refused(cluster: Clusters, stage: int) -> None:
    """At 16 bits the next step would bring the old values back."""
    assert all(cluster(2).run(plain_load_body, stage=stage))


def copy_body(context: Context, stage: int) -> None:
    model = fresh()
    zero.initialize(model, adamw(model), zero.Config(stage=stage, timeout=10))
    expected = zero.UsageError if stage < 3 else zero.ShardedParameterError
    for each in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(expected, match=r"before zero\.initialize|sharded over the ranks"):
            each(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_has_an_engine_is_not_copied(cluster: Clusters, stage: int) -> None:
    cluster(2).run(copy_body, stage=stage)


def round_trip_body(context: Context, precision: str) -> dict[str, Any]:
    config = zero.Config(precision=precision, timeout=10)
    model = fresh()
    engine = zero.initialize(model, adamw(model), config)
    for step in range(3):
        engine.backward(language_loss(model, step, context.rank))
        engine.step()
    state = engine.state_dict(master=True)
    narrow = engine.state_dict()
    other = LanguageModel()
    twin = zero.initialize(other, adamw(other), zero.Config(stage=1, precision=precision, timeout=10))
    twin.load_state_dict(state)
    again = twin.state_dict(master=True)
    names = [n for n, _ in fresh().named_parameters()]
    plain = LanguageModel()
    if context.rank == 0:
        plain.load_state_dict(narrow)
    return {
        "keys": list(state) == (list(fresh().state_dict()) if context.rank == 0 else []),
        "equal": all(torch.equal(state[n], again[n]) for n in state),
        "masters": all(
            torch.equal(engine.full_master(n), twin.full_master(n)) for n in names if n != "empty"
        ),
        "dtypes": sorted({str(v.dtype) for v in narrow.values()}),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dict_round_trip(cluster: Clusters, precision: str) -> None:
    results = cluster(3).run(round_trip_body, precision=precision)
    for found in results:
        assert found["keys"]
        assert found["equal"]
        assert found["masters"]
    bf16 = ["torch.bfloat16", "torch.float32"]  # the buffer stays fp32
    assert results[0]["dtypes"] == (bf16 if precision == "bf16" else ["torch.float32"])


def misfit_body(context: Context) -> dict[str, str]:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    good = {k: torch.zeros_like(v) for k, v in fresh().state_dict().items()}
    before = engine.full_master("blocks.0.up.weight")
    cases = {
        "missing": {k: v for k, v in good.items() if k != "blocks.0.up.weight"},
        "unexpected": {**good, "blocks.9.up.weight": torch.zeros(1)},
        "shape": {**good, "gain": torch.zeros(3)},
        "numpy": {**good, "gain": good["gain"].numpy(), "shift": good["shift"].to("meta")},
        "path": "weights.pt",
        "none": None,
    }
    messages = {}
    for name, state in cases.items():
        try:
            engine.load_state_dict(state if context.rank == 0 else None)  # type: ignore[arg-type]
            messages[name] = "nothing raised"
        except zero.StateError as error:
            messages[name] = str(error)
    messages["unchanged"] = str(torch.equal(before, engine.full_master("blocks.0.up.weight")))
    partial = {"blocks.0.up.weight": torch.full((29, 12), 2.0)}
    engine.load_state_dict(partial if context.rank == 0 else None, strict=False)
    messages["partial"] = str(engine.full_master("blocks.0.up.weight").eq(2).all().item())
    try:
        engine.full_master("nonsense")
    except zero.StateError as error:
        messages["name"] = str(error)
    return messages


def test_state_dicts_that_do_not_fit(cluster: Clusters) -> None:
    for found in cluster(2).run(misfit_body):
        assert "missing: blocks.0.up.weight" in found["missing"]
        assert "unexpected: blocks.9.up.weight" in found["unexpected"]
        assert "with a different shape: gain: (3,) instead of ()" in found["shape"]
        assert "not a dense tensor with all its values: gain, shift" in found["numpy"]
        assert "rank 0 passed str instead of a mapping of names to tensors" in found["path"]
        assert "rank 0 passed NoneType instead" in found["none"]
        assert found["unchanged"] == "True"
        assert found["partial"] == "True"
        assert "no parameter 'nonsense'" in found["name"]


def pending_body(context: Context, stage: int) -> dict[str, Any]:
    """A load that is refused changes nothing, pending losses and gradients included."""
    model, found = fresh(), {}
    config = zero.Config(stage=stage, gradient_accumulation_steps=2, timeout=10)
    engine = zero.initialize(model, adamw(model), config)
    with pytest.raises(zero.StateError):
        engine.load_state_dict({})
    engine.backward(language_loss(model, 0, context.rank))
    loss = language_loss(model, 1, context.rank)
    with pytest.raises(zero.StateError):
        engine.load_state_dict({})
    engine.backward(loss)
    found["stepped"] = engine.step()
    twin = zero.initialize(model := fresh(), adamw(model), config)
    for step in range(2):
        twin.backward(language_loss(model, step, context.rank))
        twin.step()
    ours, theirs = engine.state_dict(), twin.state_dict()
    found["equal"] = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_load_that_is_refused_leaves_losses_and_gradients(cluster: Clusters, stage: int) -> None:
    for found in cluster(2).run(pending_body, stage=stage):
        assert found == {"stepped": True, "equal": True}


def dropped_body(context: Context, path: str, accumulation: int) -> list[str]:
    """Gradients of the old weights do not step the new ones, whichever way these came."""
    model, said = features_model(), []
    config = zero.Config(gradient_accumulation_steps=accumulation, timeout=10)
    engine = zero.initialize(model, adamw(model), config)
    whole = engine.state_dict()
    engine.save_checkpoint(Path(path, "saved"))
    if context.rank == 0:
        save_file(whole, Path(path, "model.safetensors"))
    engine.save_checkpoint(Path(path, "after"))  # every rank is here once the file is
    for load in (
        lambda: engine.load_state_dict(whole),
        lambda: engine.load_checkpoint(Path(path, "saved")),
        lambda: engine.load_pretrained(Path(path, "model.safetensors")),
    ):
        engine.backward(model(features(0, context.rank, model)).square().mean())
        load()
        with pytest.raises(zero.UsageError) as caught:
            engine.step()
        said.append(str(caught.value))
        now = engine.state_dict()
        assert all(torch.equal(now[name], value) for name, value in whole.items())
    for step in range(accumulation):
        engine.backward(model(features(step, context.rank, model)).square().mean())
        assert engine.step() == (step + 1 == accumulation)
    return said


def features_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_load_drops_the_gradients_so_far(cluster: Clusters, tmp_path: Path, accumulation: int) -> None:
    for said in cluster(2).run(dropped_body, path=str(tmp_path), accumulation=accumulation):
        assert len(said) == 3
        for message in said:
            assert message.startswith("step() without backward()")


class Stubborn(nn.Linear):
    """Takes its extra state the second time only."""

    refusals = 1

    def get_extra_state(self) -> Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: Tensor) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise ArithmeticError


def broken_off_body(context: Context, path: str) -> tuple[str, str]:
    """A load that fails half-way: only a checkpoint puts it right."""
    torch.manual_seed(0)
    model = Stubborn(WIDTH, WIDTH)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    engine.save_checkpoint(path)
    state, said = engine.state_dict(), []
    with pytest.raises(ArithmeticError):
        engine.load_state_dict(state)
    for load in (lambda: engine.load_state_dict(state), lambda: engine.load_checkpoint(path)):
        load()
        try:
            engine.backward(model(features(0, context.rank, model)).square().mean())
            said.append("nothing raised")
        except zero.UsageError as error:
            said.append(str(error))
        for read in (engine.full_master, engine.full_gradient, engine.full_optimizer_state):
            with (
                nullcontext()
                if said[-1] == "nothing raised"
                else pytest.raises(zero.UsageError, match="was inte")
            ):
                read("weight")
    return said[0], said[1]


def test_a_load_that_fails_half_way_is_put_right_by_a_checkpoint(cluster: Clusters, tmp_path: Path) -> None:
    for first, second in cluster(2).run(broken_off_body, path=str(tmp_path / "c")):
        assert "was interrupted" in first
        assert second == "nothing raised"


def optimizer_state_body(context: Context, stage: int, amsgrad: bool) -> dict[str, float]:
    """Whole optimizer state by name against a plain run on all ranks' batches."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=amsgrad, foreach=False)

    plain = fresh()
    reference = build(plain)
    model = fresh()
    engine = zero.initialize(model, build(model), zero.Config(stage=stage, timeout=10))
    for step in range(2):
        for rank in range(context.size):
            (language_loss(plain, step, rank) / context.size).backward()
        reference.step()
        reference.zero_grad()
        engine.backward(language_loss(model, step, context.rank))
        engine.step()
    worst: dict[str, float] = {}
    for name, parameter in plain.named_parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        state = engine.full_optimizer_state(name)
        expected = reference.state[parameter]
        assert set(state) == set(expected), (name, set(state))
        for key, value in expected.items():
            assert state[key].shape == value.shape, (name, key)
            difference = (state[key].cpu() - value).abs().max() / value.abs().max().clamp(min=1e-8)
            worst[key] = max(worst.get(key, 0.0), difference.item())
    return worst


@pytest.mark.parametrize(("stage", "amsgrad"), [(3, False), (1, False), (3, True)])
def test_full_optimizer_state(cluster: Clusters, stage: int, amsgrad: bool) -> None:
    for found in cluster(3).run(optimizer_state_body, stage=stage, amsgrad=amsgrad):
        assert {"step", "exp_avg", "exp_avg_sq"} <= set(found)
        assert max(found.values()) < 1e-4, found


def scheduler_body(context: Context) -> dict[str, Any]:
    """The optimizer object stays the user's: schedulers, hooks, param_groups."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = zero.initialize(model, optimizer, zero.Config(timeout=10))
    after = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=4)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    rates, moved = [], []
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # schedulers warn when they miss optimizer.step()
        for step in range(3):
            start = engine.full_master("blocks.0.up.bias")
            rates.append(optimizer.param_groups[0]["lr"])
            engine.backward(model(features(step, context.rank, model), STRAIGHT).loss)
            engine.step()
            before.step()
            moved.append((engine.full_master("blocks.0.up.bias") - start).abs().max().item())
        after.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    frozen = engine.full_master("blocks.0.up.bias")
    more = {"params": [nn.Parameter(torch.ones(2))]}
    with pytest.raises(zero.OptimizerError) as added:
        optimizer.add_param_group(more)
    optimizer.param_groups.append({**optimizer.param_groups[0], **more})
    engine.backward(model(features(9, context.rank, model), STRAIGHT).loss)
    try:
        engine.step()
        refused = ""
    except zero.OptimizerError as error:
        refused = str(error)
    del optimizer.param_groups[1]
    engine.step()
    return {
        "refused": refused,
        "added": str(added.value),
        "same object": engine.optimizer is optimizer,
        "rates": rates,
        "moved": moved,
        "calls": calls[:4],
        "lr 0": torch.equal(frozen, engine.full_master("blocks.0.up.bias")),
    }


def test_the_optimizer_stays_the_users(cluster: Clusters) -> None:
    for found in cluster(2).run(scheduler_body):
        assert found["same object"]
        assert "different parameters than at zero.initialize" in found["refused"]
        assert "may be frozen" in found["added"]
        assert found["rates"] == pytest.approx([1.0, 1 / 2, 1 / 3])
        assert found["moved"][0] > 0.9  # Adam's first step is as long as the learning rate
        assert found["calls"] == ["pre", "post", "pre", "post"]
        assert found["lr 0"]


def loss_scale_body(context: Context, path: str) -> dict[str, Any]:
    """Dynamic loss scaling: overflow skips the step and halves the scale, a run of good steps doubles it."""
    model = fresh()
    config = zero.Config(precision="fp16", loss_scale_window=2, timeout=10)
    engine = zero.initialize(model, adamw(model), config)
    scales, kept, counted = [], [], []

    def step(factor: float) -> None:
        weights = engine.full_master("blocks.0.up.weight")
        engine.backward(language_loss(model, 0, context.rank) * factor)
        assert engine.step()
        assert engine.loss_scale is not None
        scales.append(engine.loss_scale.item())
        kept.append(torch.equal(weights, engine.full_master("blocks.0.up.weight")))
        counted.append(engine.skipped_steps)

    for factor in (1.0, 1.0, 1e30 if context.rank == 0 else 1.0, 1.0, 1.0, 1.0):
        step(factor)
    state = engine.full_optimizer_state("blocks.0.up.weight")
    engine.save_checkpoint(path)
    engine.backward(language_loss(model, 0, context.rank) * math.inf)
    engine.step()
    counted.append(engine.skipped_steps)
    engine.load_checkpoint(path)
    counted.append(engine.skipped_steps)
    return {
        "scales": scales,
        "kept": kept,
        "counted": counted,
        "step": state["step"].item(),
        "steps": engine.steps,
    }


def test_dynamic_loss_scale(cluster: Clusters, tmp_path: Path) -> None:
    """One rank's overflow skips the step on all; skipped steps do not count for Adam."""
    for found in cluster(2).run(loss_scale_body, path=str(tmp_path / "saved")):
        scales = found["scales"]
        skipped = found["kept"]
        assert skipped[2]
        for index in range(1, len(scales)):
            ratio = scales[index] / scales[index - 1]
            assert ratio == 0.5 if skipped[index] else ratio in (1.0, 2.0)
        assert any(b == 2 * a for a, b in itertools.pairwise(scales))
        assert found["step"] == 6 - sum(skipped)
        assert found["steps"] == 6
        counted = list(itertools.accumulate(skipped))
        assert found["counted"] == [*counted, counted[-1] + 1, counted[-1]]


def norm_body(context: Context) -> list[bool]:
    """Whether there is a norm: before, between and after the micro-batches of two steps, and in a hook."""
    model = fresh()
    optimizer, told = adamw(model), []
    engine = zero.initialize(
        model, optimizer, zero.Config(clip_norm=1.0, gradient_accumulation_steps=2, timeout=10)
    )
    optimizer.register_step_pre_hook(lambda *_: told.append(engine.grad_norm is not None))
    for step in range(4):
        told.append(engine.grad_norm is not None)
        engine.backward(language_loss(model, step, context.rank))
        told.append(engine.grad_norm is not None)
        engine.step()
    told.append(engine.grad_norm is not None)
    assert engine.skipped_steps == 0
    return told


def test_a_norm_is_that_of_this_step_or_none(cluster: Clusters) -> None:
    before, between, there = False, False, True
    first = [before, between, between, between, there]
    for told in cluster(2).run(norm_body):
        assert told == [*first, there, between, between, between, there, there]


def fixed_scale_body(context: Context, path: str) -> tuple[float, float]:
    scales = []
    for scale in ("dynamic", 128.0, "dynamic"):
        model = fresh()
        engine = zero.initialize(model, adamw(model), zero.Config(loss_scale=scale, timeout=10))
        if not scales:
            engine.save_checkpoint(path)
        engine.load_checkpoint(path)
        assert engine.loss_scale is not None
        scales.append(engine.loss_scale.item())
    return scales[1], scales[2]


def test_a_fixed_loss_scale_stays(cluster: Clusters, tmp_path: Path) -> None:
    for fixed, dynamic in cluster(2).run(fixed_scale_body, path=str(tmp_path)):
        assert fixed == 128.0
        assert dynamic == 2.0**16


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.quantised = nn.Parameter(torch.arange(12, dtype=torch.int8), requires_grad=False)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.convolution(x))
        return y.square().mean() + self.wide.sum().float() + self.narrow.square().sum().float()


def mixed_dtypes_body(context: Context) -> dict[str, Any]:
    torch.manual_seed(context.rank)  # rank 0's values win, buffers included
    model = Buffered()
    if context.rank:
        model.flags.fill_(False)
        model.quantised.data.fill_(9)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    losses = []
    for step in range(3):
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step)).to(device_of(model))
        loss = model(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with zero.gathered(model):
        strided = model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        integers = model.quantised.tolist()
    dtypes = {n: str(p.dtype) for n, p in model.named_parameters()}
    return {
        "losses": losses,
        "dtypes": dtypes,
        "channels last": strided,
        "integers": integers,
        "flags": model.flags.tolist(),
    }


def test_mixed_dtypes_and_buffers(cluster: Clusters) -> None:
    results = cluster(3).run(mixed_dtypes_body)
    for found in results:
        assert found["losses"] == results[0]["losses"]  # same batch everywhere
        assert found["losses"][2] < found["losses"][0]
        assert found["dtypes"]["wide"] == "torch.float64"
        assert found["dtypes"]["narrow"] == "torch.bfloat16"
        assert found["dtypes"]["quantised"] == "torch.int8"
        assert found["channels last"]
        assert found["integers"] == list(range(12))
        assert found["flags"] == [True, False]


def two_engines_body(context: Context) -> bool:
    """Two engines in one process are independent: interleaved, they train as they do alone."""
    alone = [
        train_zero(context, fresh(), language_loss, zero.Config(stage=stage, timeout=10), steps=4).losses
        for stage in (3, 2)
    ]
    models = [fresh(), fresh()]
    engines = [
        zero.initialize(m, adamw(m), zero.Config(stage=stage, timeout=10))
        for m, stage in zip(models, (3, 2), strict=True)
    ]
    together: list[list[float]] = [[], []]
    for step in range(4):
        losses = [m(tokens(step, context.rank, m))["loss"] for m in models]
        for engine, loss, record in zip(engines, losses, together, strict=True):
            engine.backward(loss)
            engine.step()
            record.append(loss.item())
    return together == alone


def test_two_engines(cluster: Clusters) -> None:
    assert all(cluster(2).run(two_engines_body))


def read_only_body(context: Context, stage: Any, path: str) -> None:
    """An entirely frozen teacher, beside a model that learns from it and through it."""
    student, teacher = fresh(), fresh().requires_grad_(False)
    settings = zero.Config(stage=stage, precision="bf16", timeout=10)
    learning = zero.initialize(student, adamw(student), settings)
    reading = zero.initialize(teacher, torch.optim.AdamW(teacher.parameters()), settings)
    assert all(group.master is None for unit in reading.units for group in unit.groups)
    with torch.no_grad():
        before = teacher(tokens(0, context.rank, teacher))["loss"]
    for step in range(2):
        loss = student(tokens(step, context.rank, student))["loss"]
        learning.backward(loss + teacher(tokens(step, context.rank, teacher))["loss"])
        assert learning.step()
    reading.save_checkpoint(path)
    reading.load_checkpoint(path)
    assert torch.equal(teacher(tokens(0, context.rank, teacher))["loss"], before)
    with pytest.raises(zero.UsageError, match="does not depend on any parameter"):
        reading.backward(teacher(tokens(0, context.rank, teacher))["loss"])
    planned = fresh().requires_grad_(False)
    plan = zero.plan(planned, torch.optim.AdamW(planned.parameters()), settings, ranks=2)
    assert plan.memory.rest["device"].optimizer == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_only_read_takes_no_optimizer_state(
    cluster: Clusters, stage: int, tmp_path: Path
) -> None:
    cluster(2).run(read_only_body, stage=stage, path=str(tmp_path / "teacher"))


def habits_body(context: Context) -> dict[str, str]:
    model = nn.Linear(4, 4)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    found = {"repr": repr(engine)}
    for name in (*MIGRATION_HINTS, "parameters", "in_features", "no_such_thing"):
        with pytest.raises(AttributeError) as caught:
            getattr(engine, name)
        found[name] = str(caught.value)
    loss = model(torch.zeros(1, 4, device=device_of(model))).sum()
    positional = {
        "backward": (loss,),
        "load_state_dict": ({},),
        "save_checkpoint": ("",),
        "load_checkpoint": ("",),
    }
    for method, hints in ARGUMENT_HINTS.items():
        for name, hint in hints.items():
            with pytest.raises(zero.UsageError) as refused:
                getattr(engine, method)(*positional.get(method, ()), **{name: None})
            assert str(refused.value) == f"engine.{method}() takes no {name}=: {hint}"
    with pytest.raises(TypeError, match="such_thing"):
        engine.backward(loss, such_thing=True)  # type: ignore[call-arg]
    engine.backward(loss)
    return found


def test_names_of_other_engines_say_what_to_write(cluster: Clusters) -> None:
    (found,) = cluster(1).run(habits_body)
    assert "set zero.Config(clip_norm=...)" in found["clip_grad_norm_"]
    assert "use engine.module.parameters" in found["parameters"]
    assert "use engine.module.in_features" in found["in_features"]
    assert "engine.backward(loss_a + loss_b) once" in ARGUMENT_HINTS["backward"]["retain_graph"]
    assert found["no_such_thing"] == "a zero.Engine has no attribute 'no_such_thing'"
    assert all(found[name].endswith(said) for name, said in MIGRATION_HINTS.items())
    assert "Engine of Linear" in found["repr"]
    assert "rank 0 of 1, after 0 steps: Config(timeout=20.0)" in found["repr"]
