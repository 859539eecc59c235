import functools
import os


@functools.cache
def is_lazy() -> bool:
    return os.environ.get("PT_HPU_LAZY_MODE", "1") != "0"
