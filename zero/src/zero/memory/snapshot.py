"""torch's own record of allocations, on devices whose module of torch keeps one."""

from __future__ import annotations

from typing import Any

import torch

_ENTRIES = 100_000  # allocations and frees that are kept, with the lines of the program that led to them


class MemoryHistory:
    """Of one device, while a step is followed; does nothing where torch keeps none.

    What it returns is pickled for https://pytorch.org/memory_viz.
    """

    def __init__(self, device: torch.device) -> None:
        memory: Any = getattr(torch.get_device_module(device), "memory", None)
        there = all(hasattr(memory, name) for name in ("_record_memory_history", "_snapshot"))
        self._memory = memory if there else None
        self._begun = False  # a record that the program has begun is its own

    def begin(self) -> None:
        if self._memory is not None:
            self._memory._record_memory_history(max_entries=_ENTRIES)
            self._begun = True

    def end(self) -> dict[str, Any] | None:
        """What has been recorded since `begin`; None for nothing."""
        if self._memory is None or not self._begun:
            return None
        found: dict[str, Any] = self._memory._snapshot()
        self.drop()
        return found

    def drop(self) -> None:
        """Stop the record that has begun here, if any."""
        if self._memory is not None and self._begun:
            self._memory._record_memory_history(enabled=None)
            self._begun = False
