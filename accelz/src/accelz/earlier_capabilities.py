"""`Capabilities` as version 1 of the interface had them: what a backend did not write out was declared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelz.capabilities import Capabilities


@dataclass(frozen=True)
class CapabilitiesOfVersion1(Capabilities):
    storage_resize: bool = True
    host_data_assignment: bool = True
    async_collectives: bool = True
    shared_device: bool = True
    dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16})
