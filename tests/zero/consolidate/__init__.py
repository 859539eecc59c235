"""Tests of consolidation. Programs outside of this tree import the foreign layouts from here."""

from tests.zero.helpers import dcp_layout, deepspeed_layout

__all__ = ["dcp_layout", "deepspeed_layout"]
