"""Convert a DeepSpeed configuration to a `Config`: each key is taken over, or refused with a reason.

Keys are those of DeepSpeed 0.19, by their path: "zero_optimization.stage". Only those in TUNING, which
concern DeepSpeed's own buckets, buffers and prints, are ignored. What describes no `Config` but an optimizer
or a schedule is left out, with a warning; `zero.integrations.deepspeed` builds it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accelz import HOST
from zero.config.offload import Offload
from zero.config.settings_file import read_settings
from zero.config.training import Config
from zero.errors import ConfigError
from zero.warning import warn

T = TypeVar("T", bool, int, float, str)
_TUNING = {  # by section
    "aio": "block_size intra_op_parallelism overlap_events queue_depth single_submit thread_count use_gds",
    "": (
        "dump_state log_level memory_breakdown steps_per_print wall_clock_breakdown "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
    ),
    "bf16": "immediate_grad_update",
    "zero_optimization": (
        "allgather_bucket_size allgather_partitions contiguous_gradients ignore_unused_parameters "
        "load_from_fp32_weights memory_efficient_linear mics_hierarchical_params_gather overlap_comm "
        "reduce_bucket_size reduce_scatter round_robin_gradients "
        "stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_prefetch_bucket_size sub_group_size use_multi_rank_bucket_allreduce"
    ),
    "zero_optimization.offload_optimizer": "buffer_count fast_init pin_memory pipeline_read pipeline_write",
    "zero_optimization.offload_param": "buffer_count buffer_size max_in_cpu pin_memory",
}
TUNING = [f"{section}.{name}".lstrip(".") for section, names in _TUNING.items() for name in names.split()]
NEUTRAL = {
    "data_types.grad_accum_dtype": "fp32",  # sums of micro-batches always are
    "fp16.hysteresis": 2,  # DeepSpeed's default, which files spell out: what the engine does is in the guide
    "fp16.min_loss_scale": 1,
    "gradient_predivide_factor": 1.0,
    "zero_optimization.zero_hpz_partition_size": 1,
}
SCALING = {
    "fp16.initial_scale_power": 16,
    "fp16.hysteresis": 1,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
}
"""How the engine's loss scale changes, if it is not fixed."""
HINTS = {
    "seed": "call torch.manual_seed in the program",
    **dict.fromkeys(
        ("comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "wandb"),
        "only reports and changes no values; remove it (engine.traffic and engine.memory_report() have "
        "figures)",
    ),
    "torch_autocast": "run the model under torch.autocast (in float16 with loss_scale='dynamic')",
    "bfloat16": "an old name; write 'bf16'",
    "zero_optimization.cpu_offload": "an old name; write 'offload_optimizer': {'device': 'cpu'}",
    "zero_optimization.cpu_offload_params": "an old name; write 'offload_param': {'device': 'cpu'}",
    "activation_checkpointing": "use torch.utils.checkpoint in the model",
    **dict.fromkeys(
        ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"),
        "masters keep fp32 values, and gradients travel in 16 bits; remove it (Config(masters='split', "
        "moments='bf16') halves the optimizer state, and 'bf16_optimizer_states' becomes the latter)",
    ),
    "fp16.initial_scale_power": "the loss scale starts at 2**16; remove it",
    "fp16.hysteresis": "the loss scale is halved at every overflow, as with 1; remove it",
    "fp16.consecutive_hysteresis": "the loss scale is halved at every overflow; remove it",
    "fp16.min_loss_scale": "the loss scale goes down to 2**-24; remove it",
}
DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
TIERS = {"none": "device", HOST.type: "host", "nvme": "disk"}
BUILT = ("optimizer", "scheduler")
"""Sections that describe objects, not settings."""


class BatchSizes(NamedTuple):
    """Samples in an optimizer step of all ranks; in a micro-batch of one rank; micro-batches in a step.

    None for a number that the configuration does not determine.
    """

    train: int | None
    micro: int | None
    accumulation: int


def from_deepspeed(source: Mapping[str, Any] | str | Path, world_size: int | None = None) -> Config:
    """Return the `Config` for a DeepSpeed configuration, given as a dict or the path of a JSON file.

    Only the `Config`: the sections "optimizer" and "scheduler" are left out, and rank 0 warns of it, because
    a program has to create both itself, before it calls `zero.initialize`.
    `zero.integrations.deepspeed.initialize` takes the whole configuration and builds them, with DeepSpeed's
    values.

    world_size: ranks of the job, to derive the accumulation steps from batch sizes; None: the number that
    torchrun sets, else 1. Raises ConfigError, with all problems in one message, for a file that is not a
    configuration, for values that another program is to fill in ("auto"), for keys without a counterpart, and
    for batch sizes that do not fit each other.
    """
    given = read_settings(source)
    left_out = [repr(section) for section in BUILT if given.get(section)]
    config, _ = convert({key: given[key] for key in given if key not in BUILT}, world_size)
    if left_out:
        warn(_LEFT_OUT.format(" and ".join(left_out)), rank=int(os.environ.get("RANK") or "0"))
    return config


def convert(given: Mapping[str, Any], world_size: int | None) -> tuple[Config, BatchSizes]:
    """Convert a configuration without the sections in BUILT; see `from_deepspeed`."""
    leaves = _Leaves(given)
    ranks = int(os.environ.get("WORLD_SIZE") or "1") if world_size is None else world_size
    if ranks < 1:
        raise ConfigError(f"world_size={ranks}: a job has at least 1 rank")
    zero = "zero_optimization."
    sizes = _batch_sizes(leaves, ranks)
    values = {
        "stage": leaves.take(zero + "stage", 0),
        "gradient_accumulation_steps": sizes.accumulation,
        "clip_norm": leaves.take("gradient_clipping", 0.0) or None,
        "reduce_dtype": leaves.choose("communication_data_type", DTYPES),
        "gather_dtype": "int8" if leaves.take(zero + "zero_quantized_weights", False) else None,
        "shard_ranks": None if (ranks := leaves.take(zero + "mics_shard_size", -1)) < 0 else ranks,
        "persistent_below": leaves.take(zero + "stage3_param_persistence_threshold", 0),
        "compile": bool(leaves.take("compile.deepcompile", False)),
        "offload": _offload(leaves, zero),
        **_precision(leaves),
    }
    leaves.refuse_the_rest()
    return Config(**values), sizes


class _Leaves:
    """Values by path, each to be taken once. Values that are off (false) or unset (null) are left out."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        leaves = [(path, value) for path, value in _flatten(given) if value != NEUTRAL.get(path)]
        self._values = {path: value for path, value in leaves if value is not None and value is not False}
        self._known = {*TUNING}
        self._problems: list[str] = []

    def take(self, path: str, default: T) -> T:
        """Take the value at `path`, which must be of the type of `default`; `default` if there is none."""
        self._known.add(path)
        value = self._values.pop(path, default)
        if value == "auto":
            self.problem(f"{path!r} is 'auto': write the value")
            return default
        if isinstance(value, float) and type(default) is int and value.is_integer():
            value = int(value)  # 1e5, which JSON reads as a float
        kind = (int, float) if isinstance(default, float) else type(default)
        if isinstance(value, kind) and (isinstance(value, bool) is isinstance(default, bool)):
            return value  # type: ignore[return-value]
        self.problem(f"{path!r} is {value!r}: expected {_KINDS[type(default)]}")
        return default

    def count(self, path: str) -> int:
        """Take a count of 1 or more; 0 if none is given."""
        given, value = self._values.get(path), self.take(path, 0)
        if value < 1 and isinstance(given, (int, float)):
            self.problem(f"{path!r} must be at least 1")
        return max(value, 0)

    def drop(self, section: str) -> None:
        """Leave out all values of a section, which is not in force."""
        self._values = {p: value for p, value in self._values.items() if not p.startswith(f"{section}.")}

    def choose(self, path: str, known: Mapping[str, str]) -> str | None:
        """Take a word and return its counterpart in `known`; None if none is given."""
        word = self.take(path, "")
        if word and word not in known:
            self.problem(f"{path!r} is {word!r}, not one of {', '.join(known)}")
        return known.get(word)

    def problem(self, text: str) -> None:
        self._problems.append(text)

    def refuse_the_rest(self) -> None:
        """Raise ConfigError if keys other than TUNING are left, or if there were problems."""
        hints: dict[str, list[str]] = {}
        for path in self._values:
            if path not in TUNING:
                hints.setdefault(self._hint(path), []).append(repr(path))
        for hint, paths in hints.items():
            self.problem(f"{', '.join(paths)}: {hint}")
        if self._problems:
            raise ConfigError("the DeepSpeed configuration cannot be converted: " + "; ".join(self._problems))

    def _hint(self, path: str) -> str:
        """Say what to do about a key that was not taken."""
        for prefix, hint in HINTS.items():
            if path == prefix or path.startswith(f"{prefix}."):
                return hint
        if any(known.startswith(f"{path}.") for known in self._known):
            return f"expected a section, {{...}}, not {self._values[path]!r}"
        near = difflib.get_close_matches(path, self._known, n=1, cutoff=0.95)
        return f"unknown; did you mean {near[0]!r}?" if near else "no counterpart; remove it"


def _flatten(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves with their paths, without sections that are not enabled."""
    if given.get("enabled", True) in (False, None):
        return
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _batch_sizes(leaves: _Leaves, ranks: int) -> BatchSizes:
    """Take the batch sizes; what is not given follows from the rest, as in DeepSpeed."""
    train, micro, steps = (leaves.count(name) for name in _SIZES)
    if not train:
        return BatchSizes((micro * ranks * (steps or 1)) or None, micro or None, steps or 1)
    fitting_steps = steps or (max(1, round(train / (micro * ranks))) if micro else 1)
    fitting_micro = micro or max(1, round(train / (fitting_steps * ranks)))
    fitting = (fitting_micro * fitting_steps * ranks, fitting_micro, fitting_steps)
    if fitting[0] != train:
        said = [f"{name!r} {size}" for name, size in zip(_SIZES, (train, micro, steps), strict=True) if size]
        would = ", ".join(f"{name!r}: {size}" for name, size in zip(_SIZES, fitting, strict=True))
        leaves.problem(
            f"{' and '.join(said)} do not fit {ranks} ranks: {_SIZES[0]!r} must be {_SIZES[1]!r} times ranks "
            f"times {_SIZES[2]!r}. This would fit: {would}"
        )
    return BatchSizes(*fitting)


def _precision(leaves: _Leaves) -> dict[str, Any]:
    narrow = [name for name in ("bf16", "fp16") if leaves.take(f"{name}.enabled", False)]
    if len(narrow) > 1:
        leaves.problem("'bf16' and 'fp16' are both enabled")
    if narrow != ["fp16"]:
        leaves.drop("fp16")
        moments = {"moments": "bf16"} if leaves.take("bf16.bf16_optimizer_states", False) else {}
        return {"precision": narrow[0] if narrow else "model", **moments}
    fixed = leaves.take("fp16.loss_scale", 0.0) or None
    for path, ours in SCALING.items():
        if leaves.take(path, ours) != ours and fixed is None:
            leaves.problem(f"{path!r}: {HINTS[path]}")
    window = {"loss_scale_window": leaves.take("fp16.loss_scale_window", 1000)}
    return {"precision": "fp16", **window, **({} if fixed is None else {"loss_scale": fixed})}


def _offload(leaves: _Leaves, zero: str) -> Offload | None:
    optimizer = leaves.choose(f"{zero}offload_optimizer.device", TIERS) or "device"
    params = leaves.choose(f"{zero}offload_param.device", TIERS) or "device"
    fraction = leaves.take(f"{zero}offload_optimizer.ratio", 1.0)
    paths = [leaves.take(f"{zero}offload_{kind}.nvme_path", "") for kind in ("optimizer", "param")]
    wanted = {path for path, tier in zip(paths, (optimizer, params), strict=True) if path and tier == "disk"}
    if len(wanted) > 1:
        leaves.problem(f"'nvme_path' must be a single directory, not {' and '.join(sorted(wanted))}")
    optimizer = optimizer if fraction else "device"
    if optimizer == params == "device":
        return None
    parts = {"optimizer": fraction} if optimizer != "device" and fraction != 1 else {}
    return Offload(optimizer=optimizer, params=params, fraction=parts, path=next(iter(wanted), None))  # type: ignore[arg-type]


_LEFT_OUT = (
    "zero.from_deepspeed returns settings only and leaves out {} of the DeepSpeed configuration: create what "
    "is described there in the program, e.g. torch.optim.AdamW(model.parameters(), lr=1e-4), and pass the "
    "optimizer to zero.initialize; or have zero.integrations.deepspeed.initialize(model=..., config=...) "
    "build both"
)
