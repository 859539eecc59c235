"""The version, of all packages that are published together: as installed, for what shows or records it."""

from importlib.metadata import version

__version__ = version("accelz-zero")
