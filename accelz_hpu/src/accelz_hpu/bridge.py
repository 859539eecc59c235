"""Importing habana_frameworks with the settings that flat buffers need, and refusing any other.

The bridge reads its settings once, when it is imported, and torch imports it by itself (torch.backends entry
point) if lazy mode is off. So the settings are made before the import and checked after it.

PT_HPU_LAZY_MODE       0 (eager) unless the user has set it. Eager mode runs on stock torch and can drop a
                       storage's bytes; lazy mode needs the vendor's fork of torch and cannot.
PT_HPU_WEIGHT_SHARING  0. If it is on, lazy mode replaces the class of every Parameter and patches Module.to,
                       and two packages cannot both do that.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from types import ModuleType

from accelz import BackendError

LAZY_MODE = "PT_HPU_LAZY_MODE"
WEIGHT_SHARING = "PT_HPU_WEIGHT_SHARING"
EAGER, LAZY = "0", "1"
PACKAGE = "habana_frameworks.torch"


@dataclass(frozen=True)
class Bridge:
    """The imported bridge. lazy: whether operations are recorded until `core.mark_step()`."""

    lazy: bool
    core: ModuleType


def import_bridge() -> Bridge:
    """Import the bridge, torch.hpu and HCCL. Raises BackendError if that fails or settings contradict."""
    mode = os.environ.get(LAZY_MODE, EAGER)
    if mode not in (EAGER, LAZY):
        raise BackendError(f"{LAZY_MODE}={mode}: expected 0 (eager) or 1 (lazy); set one of them")
    os.environ[LAZY_MODE] = mode
    os.environ[WEIGHT_SHARING] = "0"
    try:
        importlib.import_module(PACKAGE)
        importlib.import_module(f"{PACKAGE}.distributed.hccl")
        core = importlib.import_module(f"{PACKAGE}.core")
    except Exception as error:  # its version checks are assertions, and fail on their own with AttributeError
        raise BackendError(
            f"{PACKAGE} cannot be imported with {LAZY_MODE}={mode}: {type(error).__name__}: {error}"
        ) from error
    _check_in_force(mode)
    return Bridge(mode == LAZY, core)


def _check_in_force(mode: str) -> None:
    names = {EAGER: "eager", LAZY: "lazy"}
    actual = LAZY if importlib.import_module(f"{PACKAGE}.utils.internal").is_lazy() else EAGER
    how = (
        f"set {LAZY_MODE}={mode} and {WEIGHT_SHARING}=0 in the environment, or import accelz's backend first"
    )
    if actual != mode:
        raise BackendError(
            f"{PACKAGE} was imported in {names[actual]} mode before accelz-hpu could ask for "
            f"{names[mode]} mode; {how}"
        )
    if f"{PACKAGE}.core.weight_sharing" in sys.modules:
        raise BackendError(f"{PACKAGE} was imported with weight sharing, which replaces Parameters; {how}")
