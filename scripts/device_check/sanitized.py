"""Every operation of the CUDA backend's kernels once, for a sanitizer to watch: see `steps.sanitizer`."""

from __future__ import annotations

from tests.backends.cuda_operations import OPERATIONS, operation

from accelz_cuda.accelerator import build

NUMEL = (1, 63, 4099)
"""Elements: less than a pack, a tail, several blocks with a tail."""

if __name__ == "__main__":
    accelerator = build()
    accelerator.bind(0)
    for entry in OPERATIONS:
        for numel in NUMEL:
            operation(entry, accelerator.device, numel)(accelerator.kernels)
    accelerator.streams.synchronize()
    print(f"{len(OPERATIONS)} operations")
