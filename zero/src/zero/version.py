"""The version of zero, for what records it."""

__version__ = "0.1.0"
