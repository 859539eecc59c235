"""Whole gradients in memory for communication: others' bits, and nothing written after a reduction."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelz
import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.kept import different
from tests.zero.helpers.models import Stack
from tests.zero.helpers.paths import straight
from tests.zero.helpers.training import adamw
from tests.zero.helpers.windows import Late, Recomputed, Sometimes, trained


@contextmanager
def declared(value: bool) -> Iterator[None]:
    """Without the capability, `Collectives.empty` gives ordinary memory: the engine does the same with it."""
    accelerator = accelz.current()
    before = accelerator.capabilities
    accelerator.capabilities = dataclasses.replace(before, communication_buffers=value)
    try:
        yield
    finally:
        accelerator.capabilities = before


@contextmanager
def watched(found: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Keep each communication buffer that is reduced, and a copy of it as it was then."""
    calls: Any = accelz.current().collectives
    given: dict[int, Tensor] = {}

    def empty(*arguments: Any) -> Tensor:
        made = type(calls).empty(calls, *arguments)
        given[made.data_ptr()] = made
        return made

    def reduce_scatter(output: Tensor, full: Tensor, *arguments: Any, **options: Any) -> Any:
        buffer = given.get(full.data_ptr())
        if buffer is not None:
            found.append((buffer, buffer.clone()))
        return type(calls).reduce_scatter(calls, output, full, *arguments, **options)

    calls.empty, calls.reduce_scatter = empty, reduce_scatter
    try:
        yield
    finally:
        del calls.empty, calls.reduce_scatter


def body(context: Context, kind: type[nn.Module], settings: dict[str, Any]) -> tuple[int, int, list[str]]:
    """How many buffers were reduced, how many written to after that, and what differs from other memory."""
    reduced: list[tuple[Tensor, Tensor]] = []
    loops = ("plain", "plain")
    with declared(True), watched(reduced):
        in_them = trained(context, loops, 3, kind, **settings)
    with declared(False):
        elsewhere = trained(context, loops, 3, kind, **settings)
    written = sum(not torch.equal(now.view(torch.uint8), then.view(torch.uint8)) for now, then in reduced)
    return len(reduced), written, different(in_them, elsewhere)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Sometimes, {"stage": 3}),
        (Sometimes, {"stage": 3, "precision": "bf16", "reduce_dtype": "fp32"}),
        (Recomputed, {"stage": 3}),
        (Late, {"stage": 2}),
    ],
    ids=["stage 3", "reduced in fp32", "in several parts", "late"],
)
def test_the_bits_are_the_same_and_nothing_is_written_after_a_reduction(
    cluster: Clusters, kind: type[nn.Module], settings: dict[str, Any]
) -> None:
    for reduced, written, differing in cluster(2).run(body, kind=kind, settings=settings):
        assert reduced > 0
        assert written == 0
        assert not differing


def released_body(context: Context) -> tuple[int, int]:
    """How many buffers a step took, and how many of them are left after it."""
    calls: Any = accelz.current().collectives
    taken: list[weakref.ref[Any]] = []

    def empty(*arguments: Any) -> Tensor:
        made = type(calls).empty(calls, *arguments)
        taken.append(weakref.ref(made.untyped_storage()))
        return made

    model = Stack(layers=8)
    with declared(True):
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    calls.empty = empty
    engine.backward(straight(model, 0, context.rank))
    engine.step()
    del calls.empty
    return len(taken), sum(each() is not None for each in taken)


def test_a_buffer_is_dropped_once_it_is_reduced(cluster: Clusters) -> None:
    for taken, left in cluster(2).run(released_body):
        assert taken >= 9
        assert left == 0


@pytest.mark.parametrize("settings", [{"accumulate": "local"}, {"stage": 1}], ids=["local", "stage 1"])
def test_what_stays_for_other_backwards_is_in_ordinary_memory(
    cluster: Clusters, settings: dict[str, Any]
) -> None:
    for reduced, _, differing in cluster(2).run(body, kind=Sometimes, settings=settings):
        assert reduced == 0
        assert not differing
