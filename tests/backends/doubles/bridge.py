"""What tests do on a machine with the double of Gaudi's bridge."""

from __future__ import annotations

from typing import Any

LAZY = {"PT_HPU_LAZY_MODE": "1", "DOUBLE_TORCH_FORK": "1"}


def load() -> Any:
    import accelz

    return accelz.use("hpu")


def bound() -> Any:
    accelerator = load()
    accelerator.bind(0)
    return accelerator


def module_held() -> int | None:
    import habana_frameworks.torch.hpu as hpu  # type: ignore[import-not-found]

    held: int | None = hpu.acquired()
    return held
