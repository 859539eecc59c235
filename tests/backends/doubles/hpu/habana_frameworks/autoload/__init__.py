"""torch imports the bridge through this at its own import, unless lazy mode is on (the bridge's default)."""

import os

is_loaded = False


def autoload() -> None:
    if not is_loaded and os.environ.get("PT_HPU_LAZY_MODE", "1") != "1":
        import habana_frameworks.torch  # noqa: F401
