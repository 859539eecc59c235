"""The version of accelz, for what shows it."""

__version__ = "0.1.0"
