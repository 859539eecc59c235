"""A contract double of torch.xpu: functions with the signatures of torch's, on host memory.

torch runs `install` at the end of its import. The environment says what a driver would: DOUBLE_DEVICES (how
many), DOUBLE_FREE_MEMORY=unknown (a device that cannot be asked).
"""

import contextlib
import os
import time
from types import SimpleNamespace

import stand_in
import torch

TOTAL = 16 << 30
LOWEST, HIGHEST = 1, -1  # priorities outside are brought to the nearest

OFFERED = (
    "Event", "Stream", "current_device", "current_stream", "device_count", "empty_cache",
    "get_device_properties", "get_rng_state", "is_current_stream_capturing", "manual_seed",
    "mem_get_info", "memory_stats_as_nested_dict",
    "reset_peak_memory_stats", "set_device", "set_rng_state", "stream", "synchronize",
)  # fmt: skip
original = {}  # what torch has under these names

taken = []  # for tests: what set_device was given
streams = []
mode = None


def device_count():
    return int(os.environ["DOUBLE_DEVICES"])


def set_device(device):
    index = torch.device(device).index if isinstance(device, str) else device
    if not 0 <= index < device_count():
        raise RuntimeError(f"device is out of range, device is {index}, total number is {device_count()}")
    taken.append(index)


def current_device():
    return taken[-1] if taken else 0


class Stream:
    def __init__(self, device=None, priority=0):
        self.priority = min(max(priority, HIGHEST), LOWEST)
        self.waited = []
        streams.append(self)

    def wait_event(self, event):
        assert event.when is not None, "an event that was never recorded"
        self.waited.append(event)


class Event:
    def __init__(self, enable_timing=False):
        self.enable_timing, self.when, self.stream = enable_timing, None, None

    def record(self, stream=None):
        self.when, self.stream = time.perf_counter(), stream or current_stream()

    def query(self):
        return True

    def synchronize(self):
        assert self.when is not None

    def elapsed_time(self, end_event):
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return (end_event.when - self.when) * 1e3  # milliseconds


_current = [Stream()]


def current_stream(device=None):
    return _current[-1]


@contextlib.contextmanager
def stream(stream):
    _current.append(stream)
    yield
    _current.pop()


def synchronize(device=None):
    assert device is None or isinstance(device, (int, str, torch.device))


def is_current_stream_capturing():
    return False  # torch's optimizers ask


def memory_stats_as_nested_dict(device=None):
    counters = {"allocated_bytes": (2, 4), "active_bytes": (3, 5), "reserved_bytes": (4, 6)}
    return {
        name: {"all": {"current": current << 30, "peak": peak << 30}}
        for name, (current, peak) in counters.items()
    }


def mem_get_info(device=None):
    if os.environ.get("DOUBLE_FREE_MEMORY") == "unknown":
        raise RuntimeError("The device (double) doesn't support querying the available free memory.")
    return 10 << 30, TOTAL


def get_device_properties(device=None):
    return SimpleNamespace(name="double", total_memory=TOTAL)


def reset_peak_memory_stats(device=None):
    pass


def empty_cache():
    pass


def manual_seed(seed):
    torch.default_generator.manual_seed(int(seed))


def get_rng_state(device="xpu"):
    return torch.default_generator.get_state()


def set_rng_state(new_state, device="xpu"):
    torch.default_generator.set_state(new_state)


class ProcessGroupXCCL:
    """Made as torch makes xccl's, with the tensors' real place served: by gloo."""

    class Options:
        pass  # torch sets global_ranks_in_group, group_name and _timeout

    def __new__(cls, store, rank, size, options):
        return torch.distributed.ProcessGroupGloo(store, rank, size, options._timeout)


def install():
    """Put these functions in the place of torch's, and host tensors in that of xpu's."""
    global mode
    for name in OFFERED:
        original[name] = getattr(torch.xpu, name)
        setattr(torch.xpu, name, globals()[name])
    mode = stand_in.StandIn("xpu", "cpu", lambda: None, drop=("pin_memory",))  # page-locking is only counted
    mode.install()
    from torch.distributed import distributed_c10d

    distributed_c10d.ProcessGroupXCCL, distributed_c10d._XCCL_AVAILABLE = ProcessGroupXCCL, True
