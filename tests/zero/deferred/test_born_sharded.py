"""`zero.init()`: models born sharded, with the values that their constructors give."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.models import (
    LanguageModel,
)
from zero.deferred import deferred_init


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


def test_no_rank_ever_holds_the_whole_model(cluster: Clusters, abilities: Abilities) -> None:
    if not abilities.capabilities.storage_resize:
        pytest.skip("buffers of this device may keep their bytes")
    for peak, block in cluster(2).run(born_peak_body):
        assert peak == block  # one unit, while it is being sharded
