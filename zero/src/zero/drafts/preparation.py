"""Examine a model, its optimizer and the settings together, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from accelz import HOST
from zero.config.training import Config, dtype_named
from zero.errors import ConfigError, OptimizerError, some
from zero.optimizer.checks import check_optimizer
from zero.optimizer.joint import joint, members, name_of
from zero.optimizer.kernel_rules import SERVED, rule_for
from zero.optimizer.stepping import Stepping, steppings
from zero.sharding.autocast import cast_before_use
from zero.sharding.distributed import divided_along, is_distributed, local_of
from zero.sharding.exact import exact_parameters
from zero.sharding.forms import with_tensors_inside
from zero.sharding.local import local_parameters
from zero.sharding.units import UnitPlan, find_units, split_by_use
from zero.tiers.tier import wanted
from zero.warning import warn


@dataclass(frozen=True)
class Prepared:
    """What `prepare` found out.

    plans: the units to be built. exact: parameters that keep their dtype and travel as they are. castable:
    parameters that autocast casts before each use. optimizer: the one that was given, or several joined into
    one. param_group_of: the index of each parameter's param group. stepping: how each parameter is stepped.
    apart: the dimensions of the mesh along which parameters differ, for those that do.
    """

    plans: Sequence[UnitPlan]
    exact: Collection[nn.Parameter]
    castable: Collection[nn.Parameter]
    optimizer: Optimizer
    param_group_of: dict[nn.Parameter, int]
    stepping: dict[nn.Parameter, Stepping]
    apart: dict[nn.Parameter, frozenset[str]]


def settings(config: Config | None) -> Config:
    """Return the given settings, or the defaults for None. Raises ConfigError for anything else."""
    config = Config() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(f"expected a zero.Config, got {type(config).__name__}; write zero.Config(...)")
    return config


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    config: Config,
    for_graphs: bool,
    has_mesh: bool,
) -> Prepared:
    """Examine model, optimizer and settings; raise ConfigError or OptimizerError if they do not fit together.

    for_graphs: make the units of compiled training, if the settings ask for it. has_mesh: the program gives
    one.
    """
    plans = find_units(model, config.units, config.persistent_below)
    in_graphs = for_graphs and config.compile is not None and not with_tensors_inside(model)
    if in_graphs and config.stage == 3:
        plans = split_by_use(plans)
    exact = exact_parameters(model, config)
    distributed = {p: frozenset(divided_along(p)) for p in model.parameters() if is_distributed(p)}
    around = {p for p in model.parameters() if local_of(p) is not p}
    castable = cast_before_use(model, config) - exact - around
    optimizer, apart = joint(optimizer), local_parameters(model, config)
    param_group_of = check_optimizer(optimizer, model, config)
    _check_offload(optimizer, config)
    _check_masters(model, config)
    _check_blocks(model, optimizer, config, has_mesh)
    for parameter, along in distributed.items():
        if along and has_mesh:
            apart[parameter] = apart.get(parameter, frozenset()) | along
    stepping = steppings(optimizer, config)
    return Prepared(plans, exact, castable, optimizer, param_group_of, stepping, apart)


def _check_blocks(model: nn.Module, optimizer: Optimizer, config: Config, has_mesh: bool) -> None:
    """Raise OptimizerError if blocks of DTensors are to be stepped as whole parameters, and cannot be put
    together for that."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for each in members(optimizer):
        divided = [p for p, way in steppings(each, config).items() if way.across and p in names]
        kind = type(each).__name__
        if divided and not has_mesh:
            raise OptimizerError(_NO_MESH.format(kind=kind, blocks=some([names[p] for p in divided])))
        if turned := [names[p] for p in divided if not local_of(p).is_contiguous()]:
            raise OptimizerError(_TURNED.format(kind=kind, blocks=some(turned)))
        if begun := [names[p] for p in divided if each.state.get(p)]:
            raise OptimizerError(_BEGUN.format(kind=kind, blocks=some(begun)))


def _check_offload(optimizer: Optimizer, config: Config) -> None:
    """Raise ConfigError for offload that is not possible."""
    for each in members(optimizer):
        if rule_for(each) is None:
            _check_self_stepping(each, config)


def _check_masters(model: nn.Module, config: Config) -> None:
    """Raise ConfigError if masters are to be split, and there are none that can be."""
    trainable = (p for p in model.parameters() if p.requires_grad and p.is_floating_point())
    dtypes = {dtype_named(config.precision) or p.dtype for p in trainable}
    if config.masters == "split" and torch.bfloat16 not in dtypes:
        raise ConfigError(
            "Config(masters='split') needs trainable bf16 parameters, but the model has none: set "
            "precision='bf16', or keep masters='fp32'"
        )


def warn_of_nothing_to_move(config: Config, device: torch.device, rank: int) -> None:
    """Warn about automatic offload on a device that is the host. rank: this rank's number in the job."""
    if config.offload.measured and device.type == HOST.type:
        warn(
            "offload='auto' has nothing to move: on this device everything is already in host memory",
            rank=rank,
        )


def _check_self_stepping(optimizer: Optimizer, config: Config) -> None:
    """Raise ConfigError if an optimizer that steps itself is to step from disk or on a visit."""
    serves = (
        f"serves optimizers that kernels step: {', '.join(kind.__name__ for kind in SERVED)}. This "
        f"{name_of(optimizer)} steps its own"
    )
    if wanted(config.offload, "optimizer").stored:
        raise ConfigError(
            f"Offload(optimizer='disk') {serves} tensors, which must be in memory: set optimizer='host'"
        )
    if config.offload.streams:
        raise ConfigError(f"Offload(step='device') {serves} tensors, all at once: set step='host'")


_NO_MESH = (
    "{kind} steps whole parameters, and {blocks} are DTensors, whose blocks are on ranks that the engine "
    "does not know: give zero.initialize mesh= and data_dims= instead of process_group=. If {kind} works "
    "element by element, say Config(whole_parameters=False)"
)
_TURNED = (
    "{kind} steps whole parameters, for which zero puts blocks of DTensors together in row-major order, and "
    "those of {blocks} have another: make them contiguous"
)
_BEGUN = (
    "{kind} steps whole parameters, and has state of {blocks}, which are DTensors, before its first step "
    "with the engine: create it anew, and load a checkpoint of zero's"
)
