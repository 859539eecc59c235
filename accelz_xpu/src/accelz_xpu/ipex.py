"""intel-extension-for-pytorch, used if it is installed and fits the running torch. Never required."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from accelz.ranks import machine

NAME = "intel_extension_for_pytorch"


def use_ipex() -> bool:
    """Import the extension, which registers its operators with torch. Returns whether it is in use.

    An installed extension that cannot be imported is reported once, with the reason, and left alone.
    """
    if find_spec(NAME) is None:
        return False
    try:
        importlib.import_module(NAME)
    except (Exception, SystemExit) as error:  # its version check calls os.exit, an AttributeError
        machine.warn(
            f"{NAME} is installed but not used: {type(error).__name__}: {error}. Its last release is for "
            "torch 2.8; uninstall it to avoid this warning",
            stacklevel=2,
        )
        return False
    return True
