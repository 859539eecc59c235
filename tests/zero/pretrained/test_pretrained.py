"""Loading safetensors into models: deferred, plain and sharded; and how much is read and held meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.counting import CountingStorage
from tests.zero.helpers.models import LanguageModel, Stack
from tests.zero.helpers.told import raised
from tests.zero.helpers.training import adamw
from zero.deferred.deferred_init import is_deferred
from zero.pretrained import Request, fill

State = dict[str, Tensor]
WIDE = 160  # so that most parameters, tied ones included, are large enough to be deferred


def source(seed: int = 3) -> LanguageModel:
    torch.manual_seed(seed)
    model = LanguageModel(width=WIDE)
    model.shift.add_(1.0)
    return model


def save_weights(folder: Path, dtype: torch.dtype = torch.float32) -> State:
    """A model's state in three files with an index, tied weights once; returns it whole."""
    state = {n: v.detach().to(dtype).contiguous() for n, v in source().state_dict().items()}
    stored = {n: v for n, v in state.items() if n != "head.weight"}
    folder.mkdir()
    names = sorted(stored)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({n: stored[n] for n in names[number::3]}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[number::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


def build(born: bool) -> LanguageModel:
    torch.manual_seed(50)
    if not born:
        return LanguageModel(width=WIDE)
    with zero.init():
        model = LanguageModel(width=WIDE)
    assert is_deferred(model.embedding.weight)
    return model


def loaded_body(context: Context, path: str, how: str, **settings: Any) -> State:
    """The state of an engine whose weights were loaded in one of three ways."""
    model = build(born=how == "deferred")
    if how != "sharded":
        zero.load_pretrained(model, path)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10, **settings))
    if how == "sharded":
        engine.load_pretrained(path)
    with zero.gathered(model):
        whole = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    state = engine.state_dict(master=True)
    assert not state or all(
        torch.equal(whole[n], v.to(whole[n].dtype)) for n, v in state.items() if n in whole
    )
    return state


@pytest.mark.parametrize("how", ["deferred", "plain", "sharded"])
@pytest.mark.parametrize(
    "settings",
    [{"stage": 3}, {"stage": 3, "precision": "bf16"}, {"stage": 2}, {"stage": 0}],
    ids=lambda s: "-".join(map(str, s.values())),
)
@pytest.mark.parametrize("size", [1, 2])
def test_values_are_those_of_the_files(
    cluster: Clusters, tmp_path: Path, size: int, settings: dict[str, Any], how: str
) -> None:
    expected = save_weights(tmp_path / "weights")
    found = cluster(size).run(loaded_body, path=str(tmp_path / "weights"), how=how, **settings)[0]
    assert sorted(found) == sorted(expected)
    frozen = [n for n in expected if n.startswith("blocks.1.down")]  # no master: rounded to 16 bits
    for name, value in expected.items():
        rounded = value.bfloat16() if name in frozen and "precision" in settings else value
        assert torch.equal(found[name], rounded.to(found[name].dtype)), name


@pytest.mark.parametrize("how", ["deferred", "sharded"])
def test_narrow_files_fill_wide_masters(cluster: Clusters, tmp_path: Path, how: str) -> None:
    expected = save_weights(tmp_path / "weights", torch.bfloat16)
    found = cluster(2).run(loaded_body, path=str(tmp_path / "weights"), how=how, stage=3)[0]
    assert all(torch.equal(found[name], value.float()) for name, value in expected.items())


class Renamed(nn.Module):
    """A model with a part of a LanguageModel under another name, and a part that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(LanguageModel(width=WIDE).blocks[:2])
        self.own = nn.Linear(64, 70)  # large enough to be deferred


def own_names(name: str) -> str | None:
    return name.replace("blocks.", "body.") if name.startswith(("blocks.0", "blocks.1")) else None


def partial_body(context: Context, path: str, born: bool) -> State:
    torch.manual_seed(60)
    if born:
        with zero.init():
            model = Renamed()
    else:
        model = Renamed()
    with pytest.raises(zero.StateError, match=r"missing in the checkpoint: own.weight, own.bias"):
        zero.load_pretrained(model, path, rename=own_names)
    zero.load_pretrained(model, path, rename=own_names, strict=False)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    return engine.state_dict()


@pytest.mark.parametrize("born", [True, False])
def test_what_is_missing_keeps_the_constructors_values(cluster: Clusters, tmp_path: Path, born: bool) -> None:
    expected = save_weights(tmp_path / "weights")
    torch.manual_seed(60)
    own = Renamed().own.state_dict()
    found = cluster(2).run(partial_body, path=str(tmp_path / "weights"), born=born)[0]
    for name, value in found.items():
        wanted = own[name[4:]] if name.startswith("own.") else expected[name.replace("body.", "blocks.")]
        assert torch.equal(value, wanted), name


WIDTH, LAYERS = 256, 8


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def save_large(path: Path) -> None:
    torch.manual_seed(4)
    save_file(large().state_dict(), path)


def cost_body(context: Context, path: str) -> dict[str, int]:
    """Bytes read, and the most bytes of parameters on this rank at once, while shards are filled."""
    storage = CountingStorage()
    with zero.init():
        model = large()
    fill(model, Request(Path(path), storage=storage))
    before = storage.bytes
    held: list[int] = []

    def watch() -> None:
        storages = [p.untyped_storage() for p in model.parameters()]
        held.append(sum(s.nbytes() for s in storages if s.resizable()))

    storage.on_read = watch
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=10))
    shards = sum(g.shard.numel() * 4 for u in engine.units for g in u.groups)
    return {"before": before, "read": storage.bytes, "shards": shards, "held": max(held)}


def test_a_rank_reads_its_slices_and_holds_no_more(
    cluster: Clusters, abilities: Abilities, tmp_path: Path
) -> None:
    save_large(tmp_path / "large.safetensors")
    for cost in cluster(2).run(cost_body, path=str(tmp_path / "large.safetensors")):
        assert cost["before"] == 0
        assert cost["read"] == cost["shards"] == LAYERS * WIDTH * WIDTH * 4 // 2
        if abilities.capabilities.storage_resize:
            assert cost["held"] == 0  # whole parameters are gone before anything is read


def sharded_cost_body(context: Context, path: str) -> tuple[int, int]:
    torch.manual_seed(5)
    model = large()
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config(timeout=10))
    storage = engine._checkpoints.storage = CountingStorage()
    engine.load_pretrained(path)
    return storage.bytes, sum(g.shard.numel() * 4 for u in engine.units for g in u.groups)


def test_a_sharded_model_reads_its_slices(cluster: Clusters, tmp_path: Path) -> None:
    save_large(tmp_path / "large.safetensors")
    for read, shards in cluster(2).run(sharded_cost_body, path=str(tmp_path / "large.safetensors")):
        assert read == shards


def refused_body(context: Context, path: str) -> dict[str, str]:
    model = build(born=False)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    other = Stack()
    with zero.init():
        larger = LanguageModel(layers=4, width=WIDE)
    messages = {
        "nowhere": raised(lambda: zero.load_pretrained(model, path + "-nowhere")),
        "names": raised(lambda: zero.load_pretrained(other, path)),
        "layers": raised(lambda: zero.load_pretrained(larger, path)),
        "rename": raised(lambda: zero.load_pretrained(model, path, rename={"tail": "head"})),
    }
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    messages["engine"] = raised(lambda: zero.load_pretrained(model, path))
    messages["engine names"] = raised(lambda: engine.load_pretrained(path, rename={"gain": None}))
    with zero.gathered(model):
        messages["gathered"] = raised(lambda: engine.load_pretrained(path))
    engine.load_pretrained(path)
    return messages


def test_what_does_not_fit_is_refused(cluster: Clusters, tmp_path: Path) -> None:
    save_weights(tmp_path / "weights")
    for found in cluster(2).run(refused_body, path=str(tmp_path / "weights")):
        assert found["nowhere"].startswith("CheckpointError")
        assert "missing in the checkpoint: scale" in found["names"]
        assert "unexpected in the checkpoint: " in found["names"]
        assert "missing in the checkpoint: blocks.3" in found["layers"]
        assert "nothing called tail" in found["rename"]
        assert "call engine.load_pretrained(path)" in found["engine"]
        assert "missing in the checkpoint: gain" in found["engine names"]
        assert "inside zero.gathered" in found["gathered"]


def failing_body(context: Context, path: str) -> list[str]:
    """Rank 1 fails to read the files during the load."""
    model = build(born=False)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    engine._checkpoints.storage = storage = CountingStorage()
    if context.rank == 1:
        storage.on_read = fail
    return [raised(lambda: engine.load_pretrained(path)), raised(lambda: engine.save_checkpoint(path + "-c"))]


def failing_promise_body(context: Context, path: str) -> list[str]:
    model, storage = build(born=True), CountingStorage()
    fill(model, Request(Path(path), storage=storage))
    if context.rank == 1:
        storage.on_read = fail
    return [raised(lambda: zero.initialize(model, adamw(model), zero.Config(timeout=10)))]


def fail() -> None:
    raise OSError(5, "injected")


def test_an_error_in_reading_is_told_on_every_rank(cluster: Clusters, tmp_path: Path) -> None:
    save_weights(tmp_path / "weights")
    for body in (failing_body, failing_promise_body):
        for loading, *saving in cluster(2).run(body, path=str(tmp_path / "weights")):
            assert loading.startswith("CheckpointError")
            assert "injected" in loading
            assert all("interrupted" in message for message in saving)


def disagreeing_body(context: Context, path: str) -> str:
    model = build(born=True)
    if context.rank:
        zero.load_pretrained(model, path)
    return raised(lambda: zero.initialize(model, adamw(model), zero.Config(timeout=10)))


def test_ranks_must_load_the_same(cluster: Clusters, tmp_path: Path) -> None:
    save_weights(tmp_path / "weights")
    for message in cluster(2).run(disagreeing_body, path=str(tmp_path / "weights")):
        assert message.startswith("RankMismatchError")


def cut_file(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def wrong_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["gain"] = next(
        f for f in index["weight_map"].values() if f != index["weight_map"]["gain"]
    )
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(cut_file, "00002-of-00003.*is truncated"), (empty_index, "index"), (wrong_index, "'gain' is in")],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    save_weights(tmp_path / "weights")
    damage(tmp_path / "weights")
    with pytest.raises(zero.CorruptCheckpointError, match=message):
        zero.load_pretrained(build(born=True), tmp_path / "weights")
