"""Groups that are spread over different ranks, in one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.training import Run, errors_of, same_bits, train_reference, train_zero
from zero.communication.grid import Grid
from zero.communication.mesh import Meshes
from zero.drafts.unit_drafts import UnitDraft, draft_units
from zero.setup import build_units

RANKS, FEW, STEPS = 4, 2, 4
SPREAD_LESS = "blocks.1"


@contextmanager
def one_unit_over_few_ranks() -> Iterator[None]:
    """In the block, `SPREAD_LESS` is spread over `FEW` ranks, with copies, and the rest over all."""
    build_unit = build_units._build_unit

    def drafted(prepared: Any, config: Any, placer: Any, many: Any, moments: Any) -> list[UnitDraft]:
        many, few = (draft_units(prepared, config, placer, n, moments) for n in (many, lambda _: FEW))
        return [b if a.plan.name == SPREAD_LESS else a for a, b in zip(many, few, strict=True)]

    def built(index: int, draft: UnitDraft, site: Any, values: Any) -> Any:
        if draft.plan.name == SPREAD_LESS:
            meshes = Meshes(site.communicator._groups, Grid.plain(RANKS, FEW))
            site = replace(site, meshes=meshes)
        return build_unit(index, draft, site, values)

    with (
        patch.object(build_units, "draft_units", drafted),
        patch.object(build_units, "_build_unit", built),
    ):
        yield


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "stage 2": {"stage": 2, "clip_norm": 0.5},
    "accumulated": {"clip_norm": 0.5, "gradient_accumulation_steps": 2},
    "on the host": {"clip_norm": 0.5, "offload": {"optimizer": "host", "params": "host"}},
}


def parity_body(context: Context, name: str) -> float:
    settings = SETTINGS[name]
    micro, clip = settings.get("gradient_accumulation_steps", 1), settings.get("clip_norm")
    reference = train_reference(context, fresh(), language_loss, sgd, STEPS, micro, clip)
    with one_unit_over_few_ranks():
        run = train_zero(context, fresh(), language_loss, zero.Config(timeout=20, **settings), sgd, STEPS)
    return errors_of(run, reference)


@pytest.mark.parametrize("name", SETTINGS)
def test_groups_of_two_meshes_train_as_one_model(cluster: Clusters, name: str) -> None:
    for error in cluster(RANKS).run(parity_body, name=name, limit=60):
        assert error < 1e-5


def checkpoint_body(context: Context, folder: str) -> dict[str, Any]:
    """What is gathered over how many ranks, and whether a checkpoint is the model's at another layout."""
    with one_unit_over_few_ranks():
        model = fresh()
        engine = zero.initialize(model, sgd(model), zero.Config(timeout=20))
    train_on(engine, language_loss(model, 0, context.rank))
    log = [each.text for each in engine._communicator.ledger.line.issued if each.op == "all_gather"]
    engine.save_checkpoint(Path(folder) / "a")
    model = fresh()
    again = zero.initialize(model, sgd(model), zero.Config(timeout=20))
    again.load_checkpoint(Path(folder) / "a")
    return {
        "few": {"among 2 ranks" in text for text in log if f"'{SPREAD_LESS}'" in text},
        "many": {"among" in text for text in log if f"'{SPREAD_LESS}'" not in text},
        "same": same_bits(Run(state=engine.state_dict()), Run(state=again.state_dict())),
    }


def test_the_log_names_the_ranks_and_a_checkpoint_holds_each_value_once(
    cluster: Clusters, tmp_path: Path
) -> None:
    for found in cluster(RANKS).run(checkpoint_body, folder=str(tmp_path), limit=60):
        assert found == {"few": {True}, "many": {False}, "same": True}
