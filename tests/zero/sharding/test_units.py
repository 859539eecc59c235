"""Cutting models into units, and the arithmetic of flat buffers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import zero
from tests.zero.helpers.models import Block, LanguageModel, Stack
from zero.sharding.layout import ALIGN_BYTES, ParameterSpec, plan
from zero.sharding.units import PERSISTENT, ROOT, find_units


def names(model: nn.Module, rule: object = "auto", persistent_below: int = 0) -> dict[str, list[str]]:
    config = zero.Config(units=rule, persistent_below=persistent_below)
    return {u.name: [n for n, _ in u.parameters] for u in find_units(model, config.units, persistent_below)}


def test_repeated_blocks_are_units_and_the_rest_is_root() -> None:
    found = names(LanguageModel())
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2", ROOT]
    assert found["blocks.1"] == [
        f"blocks.1.{n}"
        for n in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    ]
    assert found[ROOT] == ["gain", "empty", "turned", "embedding.weight", "norm.weight", "norm.bias"]


def test_units_by_class_name_and_function() -> None:
    model = LanguageModel()
    by_class = names(model, Block)
    assert by_class == names(model) == names(model, ["Block"])
    by_function = names(model, lambda name, module: name == "blocks.2")
    assert list(by_function) == ["blocks.2", ROOT]
    assigned = [name for parameters in by_function.values() for name in parameters]
    assert sorted(assigned) == sorted(n for n, _ in model.named_parameters())


def test_nested_units_own_what_is_innermost() -> None:
    found = names(Stack(), (Block, nn.Linear))
    assert found["blocks.0"] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert found["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(zero.ConfigError, match="matches no module"):
        names(LanguageModel(), nn.Conv2d)
    with pytest.raises(zero.ConfigError, match="matches only the model itself"):
        names(LanguageModel(), "LanguageModel")


def test_weights_tied_across_units_go_to_their_common_ancestor() -> None:
    model = Stack(layers=3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    found = names(model)
    assert "blocks.0.up.weight" in found[ROOT]
    assert "blocks.0.up.weight" not in found["blocks.0"]


def test_weights_tied_inside_one_unit_stay_there() -> None:
    model = Stack(layers=2)
    model.blocks[1].norm.bias = model.blocks[1].down.bias
    assert "blocks.1.norm.bias" in names(model)["blocks.1"]
    assert "blocks.1.down.bias" not in names(model)["blocks.1"]


def test_persistent_parameters_are_taken_out() -> None:
    found = names(LanguageModel(), persistent_below=100)
    assert all("weight" not in n or "norm" in n for n in found[PERSISTENT])
    assert found["blocks.0"] == ["blocks.0.up.weight", "blocks.0.down.weight"]


def test_sequential_of_different_classes_has_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    assert list(names(model)) == [ROOT]


def test_stages_of_blocks_are_cut_at_the_top() -> None:
    """With repeated children of repeated children, the outer ones are the units, whatever is inside."""
    stages = nn.ModuleList(nn.Sequential(Block(4), Block(4)) for _ in range(2))
    assert list(names(nn.ModuleDict({"stages": stages}))) == ["stages.0", "stages.1"]


def random_specs(generator: random.Random) -> list[ParameterSpec]:
    sizes = [generator.choice([0, 1, 3, 16, 17, 100, 255]) for _ in range(generator.randint(1, 9))]
    return [ParameterSpec(f"p{i}", (n,), (1,), n) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(40))
def test_layout_covers_every_element_exactly_once(seed: int) -> None:
    generator = random.Random(seed)
    specs, shards = random_specs(generator), generator.choice([1, 2, 3, 4, 7, 64])
    itemsize = generator.choice([1, 2, 4, 8])
    layout = plan(specs, shards, itemsize)
    owners = torch.zeros(layout.numel, dtype=torch.int32)
    for slot, spec in zip(layout.slots, specs, strict=True):
        assert slot.offset * itemsize % ALIGN_BYTES == 0
        owners[slot.offset : slot.offset + spec.numel] += 1
    for gap in layout.gaps:
        owners[gap] += 1
    assert owners.eq(1).all()
    assert layout.shard_numel * shards == layout.numel
    assert layout.shard_numel * itemsize % ALIGN_BYTES == 0
    assert layout.numel <= sum(s.numel for s in specs) + (len(specs) + shards) * ALIGN_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_pieces_tile_the_parameters(seed: int) -> None:
    generator = random.Random(seed)
    specs, shards = random_specs(generator), generator.choice([1, 2, 3, 5])
    layout = plan(specs, shards, 4)
    data = torch.arange(layout.numel)
    pieces: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(specs))}
    for shard in range(shards):
        mine = data[layout.shard_slice(shard)]
        for piece in layout.pieces(shard):
            assert piece.start == sum(len(p) for p in pieces[piece.index])
            pieces[piece.index].append(mine[piece.shard_slice])
    for index, slot in enumerate(layout.slots):
        whole = torch.cat(pieces[index]) if pieces[index] else torch.empty(0)
        assert torch.equal(whole, data[slot.offset : slot.offset + slot.numel].to(whole.dtype))
