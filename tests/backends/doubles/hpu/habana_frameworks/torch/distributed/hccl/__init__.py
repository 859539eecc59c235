"""HCCL's registration. At import, torchrun's environment decides which module this process will acquire."""

import os

from habana_frameworks.torch.hpu import MODULE_ID, VISIBLE

import torch.distributed as dist


def _setup_module_id(local_rank, world_size):
    if MODULE_ID in os.environ or local_rank == -1 or world_size == 1:
        return
    modules = os.environ[VISIBLE].split(",") if VISIBLE in os.environ else None
    assert modules is None or local_rank < len(modules), f"There is not enough devices: {VISIBLE}"
    os.environ[MODULE_ID] = modules[local_rank] if modules else str(local_rank)


def _create(options, pg_options):
    """A gloo group stands for HCCL's: it is there, and takes no timeout, as the real one."""
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size)  # type: ignore[call-arg]


_setup_module_id(int(os.environ.get("LOCAL_RANK", "-1")), int(os.environ.get("WORLD_SIZE", "1")))
dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["hpu"])
