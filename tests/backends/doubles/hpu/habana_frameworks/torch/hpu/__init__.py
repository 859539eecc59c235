"""torch.hpu: one device per process, which is number 0 there. No empty_cache, no argument to synchronize."""

import contextlib
import fcntl
import os
from pathlib import Path

import stand_in
from habana_frameworks.torch.utils.internal import is_lazy

import torch
from accelz_sim import _C, torch_device

MODULE_ID, VISIBLE = "HLS_MODULE_ID", "HABANA_VISIBLE_MODULES"
_held = None  # the lock on the module that this process has acquired
_peak_was_reset = False


def _modules():
    return [int(n) for n in os.environ["DOUBLE_MODULES"].split(",")]


def device_count():
    return len(_modules())


def is_available():
    return device_count() > 0


def is_initialized():
    return _held is not None


def acquired():
    """For tests: the module identifier that this process holds, or None."""
    return int(Path(_held.name).name) if _held else None


def init():
    global _held
    if _held is not None:
        return
    wanted = os.environ.get(MODULE_ID)
    for module in _modules() if wanted is None else [int(wanted)]:
        _held = _lock(module) if module in _modules() else None
        if _held:
            break
    if _held is None:
        raise RuntimeError(f"synStatus=8 [Device not found] Device acquire failed (module {wanted}).")
    if is_lazy():
        torch.accelerator.set_stream(torch.Stream(torch.device("sim", 0)))  # it runs when it is waited for


def _lock(module):
    file = Path(os.environ["DOUBLE_HELD"], str(module)).open("w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _listed():
    return [int(n) for n in os.environ.get(VISIBLE, "0,1,2,3,4,5,6,7").split(",")]


def set_device(device):
    index = _index(device)
    available, current = _listed(), int(os.environ.get(MODULE_ID, "-1"))
    if index not in available and index > len(available):
        raise AssertionError(f"Trying to open device with idx={index} when only {available} are available")
    if current >= 0:  # an identifier that was set before wins, silently
        index = next(i for i in range(device_count()) if available[i] == current)
    if current == -1 and VISIBLE not in os.environ and device_count() < 8:
        assert index == 0, f"As {VISIBLE} is not provided, the only supported device idx is 0."
        return
    os.environ[MODULE_ID] = str(available[index])


def current_device():
    init()
    return 0


def _index(device):
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def _checked(device):
    init()
    if not 0 <= _index(device) < device_count():
        raise AssertionError("Invalid device id")


def synchronize():
    init()
    _C.synchronize()


# -- memory --


def memory_stats(device=None):
    _checked(device)
    allocated, peak, capacity = _C.counters(0)
    quiet = _peak_was_reset and peak == allocated
    return {"Limit": capacity, "InUse": allocated, "MaxInUse": 0 if quiet else peak, "NumAllocs": 0}


def reset_peak_memory_stats(device=None):
    global _peak_was_reset
    _checked(device)
    _C.reset_peak(0)
    _peak_was_reset = True  # MaxInUse is 0 until the next allocation


def memory_allocated(device=None):
    return memory_stats(device)["InUse"]


def max_memory_allocated(device=None):
    return memory_stats(device)["MaxInUse"]


def memory_reserved(device=None):
    return memory_stats(device)["Limit"]


def mem_get_info(device=None):
    stats = memory_stats(device)
    return stats["Limit"] - stats["InUse"], stats["Limit"]


# -- streams --


def Stream(device=None, priority=0):
    init()
    return torch.Stream(torch.device("sim", 0), priority=priority)


def Event(enable_timing=False):
    return torch.Event(torch.device("sim", 0), enable_timing=enable_timing)


def current_stream(device=None):
    _index(device)
    return torch.accelerator.current_stream()


def stream(stream):
    return contextlib.nullcontext() if stream is None else stream


# -- random numbers --


def _generator(device):
    if _index(device) != 0:
        raise RuntimeError("hpu random states support only device 0")
    return _C.default_generator(0)


def get_rng_state(device="hpu"):
    return _generator(device).get_state()


def set_rng_state(new_state, device="hpu"):
    _generator(device).set_state(new_state)


def manual_seed(seed):
    return _generator(0).manual_seed(int(seed))


def manual_seed_all(seed):
    manual_seed(seed)


torch_device.register()
stand_in.StandIn("hpu", "sim:0", init).install()
