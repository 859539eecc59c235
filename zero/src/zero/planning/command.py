"""`zero plan`, behind the command line: one plan, or several side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from zero.config.offload import Offload
from zero.config.sizes import human
from zero.config.training import Config
from zero.errors import ConfigError, OptimizerError, UsageError
from zero.planning.plan import Plan, plan
from zero.planning.step_time import TimePlan
from zero.planning.target import batch_of, is_guessed, model_of, optimizers_of
from zero.planning.text import seconds, table

Planned = Callable[[Config], Plan]
GIVEN = "as given"
ELSEWHERE = {
    "optimizer on the host": Offload(optimizer="host"),
    "optimizer and parameters on the host": Offload(optimizer="host", params="host"),
    "optimizer on disk, parameters on the host": Offload(optimizer="disk", params="host", path="."),
}
"""Further plans to compare, at stage 3."""


def planner_for(
    target: str,
    optimizer: str,
    options: dict[str, Any],
    ranks: int,
    autocast: torch.dtype | None,
    sizes: tuple[int, int] | None = None,
    rates: Mapping[str, Any] | None = None,
) -> Planned:
    """Plans of a model for any settings; the model is built once. sizes: rows and tokens of a batch. rates:
    what is done in a second, as `plan` takes it."""
    if (autocast is not None or sizes is not None) and is_guessed(target):
        raise UsageError(
            "--autocast, or --batch, needs the model's classes, but a checkpoint has only names: write "
            "package.module:function or file.py:function for one that returns the model"
        )
    model = model_of(target)
    made = optimizers_of(optimizer, options, model)
    batch = None if sizes is None else batch_of(model, *sizes)
    known = rates or {}
    return lambda config: plan(model, made, config, ranks=ranks, autocast=autocast, batch=batch, **known)


def as_json(plans: Mapping[str, Plan], compare: bool) -> str:
    """All numbers of the plans, by name; of the one as given only, unless they are to be compared."""
    numbers = {name: _as_dict(made) for name, made in plans.items()}
    return json.dumps(numbers if compare else numbers[GIVEN], indent=2)


def as_text(plans: Mapping[str, Plan], compare: bool, memory: int | None) -> str:
    """The plan as given or, to compare, a table of all; and whether it fits a device of `memory` bytes."""
    first = plans[GIVEN]
    shown = _side_by_side(plans, memory) if compare else str(first)
    return shown if memory is None else f"{shown}\n{_verdict(first, memory)}"


def _as_dict(made: Plan) -> dict[str, Any]:
    """All numbers of a plan."""
    memory = made.memory
    return {
        "ranks": made.ranks,
        "parameters": made.parameters,
        "trainable": made.trainable,
        "units": {unit.name: unit.parameters for unit in made.units},
        "rest": {tier: asdict(held) for tier, held in memory.rest.items()},
        "gradients": memory.gradients,
        "buffers": memory.buffers,
        "peaks": {phase: asdict(held) | {"total": held.total} for phase, held in memory.peaks.items()},
        "activations": memory.activations,
        "device": memory.device,
        "host": memory.host,
        "disk": memory.disk,
        "traffic": asdict(made.traffic),
        "flops": None if made.flops is None else asdict(made.flops),
        "time": None if made.time is None else _as_dict_of(made.time),
    }


def _as_dict_of(time: TimePlan) -> dict[str, Any]:
    return asdict(time) | {
        "overlapped": time.overlapped,
        "in_turn": time.in_turn,
        "bound_by": time.bound_by,
    }


def fits(made: Plan, memory: int) -> bool:
    """Whether a device of `memory` bytes has room for the plan."""
    return made.memory.device <= memory


def _verdict(made: Plan, memory: int) -> str:
    """Whether the plan fits a device of `memory` bytes, and what is left besides."""
    peaks = {phase: made.memory.total(phase) for phase in made.memory.peaks}
    phase = max(peaks, key=lambda name: peaks[name])
    if not fits(made, memory):
        return f"does not fit: {phase} needs {human(peaks[phase] - memory)} more than {human(memory)}"
    left = memory - max(peaks["forward"], peaks["backward"])
    rest = "module buffers and libraries" if made.memory.activations else "activations and everything else"
    return f"fits: {human(left)} of {human(memory)} are left for {rest}"


def plans_for(planned: Planned, base: Config, compare: bool) -> dict[str, Plan]:
    """The plan for the settings as given and, to compare, as far as these are possible: with one copy of the
    model, at stages 0 to 3, and at stage 3 with state elsewhere."""
    plans = {GIVEN: planned(base)}
    for name, config in _variants(base) if compare else ():
        with suppress(ConfigError, OptimizerError):  # not for this optimizer
            plans[name] = planned(config)
    return plans


def _side_by_side(plans: Mapping[str, Plan], memory: int | None) -> str:
    """A table with a line for each plan."""
    rows = [["", "device", "host", "disk", "sent to ranks", "to and from host", "disk read and written"]]
    timed = any(made.time is not None for made in plans.values())
    rows[0] += ["least time"] if timed else []
    for name, made in plans.items():
        moved = made.traffic.to_host + made.traffic.to_device, made.traffic.read + made.traffic.written
        sizes = made.memory.device, made.memory.host, made.memory.disk, made.traffic.link, *moved
        note = "" if memory is None or fits(made, memory) else " (does not fit)"
        row = [f"{name}{note}", *(human(nbytes) if nbytes else "-" for nbytes in sizes)]
        rows.append([*row, seconds(made.time.overlapped)] if made.time is not None else row)
    return "\n".join(table(rows))


def _variants(base: Config) -> Iterator[tuple[str, Config]]:
    fields = {name: getattr(base, name) for name in Config.model_fields if name != "offload"}
    of_stage_3 = {"gather_dtype": None, "autocast_modules": ()}
    if base.shard_ranks is not None:
        yield "one copy", Config(**{**fields, "offload": base.offload, "shard_ranks": None})
    yield "stage 0", Config(**{**fields, **of_stage_3, "shard_ranks": None, "stage": 0})
    for stage in (1, 2):
        yield f"stage {stage}", Config(**{**fields, **of_stage_3, "stage": stage})
    yield "stage 3", Config(**{**fields, "stage": 3})
    for name, offload in ELSEWHERE.items():
        yield f"stage 3, {name}", Config(**{**fields, "stage": 3, "offload": offload})
