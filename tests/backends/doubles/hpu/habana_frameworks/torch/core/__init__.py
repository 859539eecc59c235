"""The import that changes torch: torch.hpu, process groups of fewer arguments, weight sharing, operators."""

import datetime
import functools
import os

from habana_frameworks.torch import hpu
from habana_frameworks.torch.core import operators
from habana_frameworks.torch.utils.internal import is_lazy

import torch
import torch.distributed as dist

steps = 0  # for tests: how often mark_step was called


def mark_step(device_str="", sync=False):
    global steps
    steps += 1
    if is_lazy():  # in eager mode it has no effect, and says so once in the log
        hpu.current_stream().synchronize()


def _fewer_arguments():
    new_group, init_process_group = dist.new_group, dist.init_process_group

    @functools.wraps(new_group)
    def wrap_new_group(ranks=None, timeout=None, backend=None, pg_options=None):
        return new_group(ranks, timeout, backend, pg_options)

    @functools.wraps(init_process_group)
    def wrap_init_process_group(
        backend,
        init_method=None,
        timeout=datetime.timedelta(seconds=1800),
        world_size=-1,
        rank=-1,
        store=None,
        group_name="",
        pg_options=None,
    ):
        init_process_group(backend, init_method, timeout, world_size, rank, store, group_name, pg_options)

    dist.new_group, dist.init_process_group = wrap_new_group, wrap_init_process_group


def _recorded_tensors_have_no_storage():
    resize = torch.UntypedStorage.resize_

    def refuse(self, size):
        if self.device.type == "cpu":
            return resize(self, size)
        raise RuntimeError("This function should not be called in lazy flow. Something went wrong.")

    torch.UntypedStorage.resize_ = refuse


torch._register_device_module("hpu", hpu)
_fewer_arguments()
operators.register(is_lazy())
if is_lazy():
    _recorded_tensors_have_no_storage()
    if os.environ.get("PT_HPU_WEIGHT_SHARING", "1").upper() in ("ON", "1", "YES", "TRUE", "Y"):
        import habana_frameworks.torch.core.weight_sharing  # noqa: F401
