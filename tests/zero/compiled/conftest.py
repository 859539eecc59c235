"""Ranks that train through graphs: the compiler is imported once, before they are forked."""

from accelz.conformance.cluster import preload

preload("zero.compiled.model")
