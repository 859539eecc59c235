"""Collectives over gloo, for devices without a communication library: on the host, or by way of it."""

from accelz.gloo.host_staged import HostStaged
from accelz.gloo.lanes import GlooLanes, Lanes

__all__ = ["GlooLanes", "HostStaged", "Lanes"]
