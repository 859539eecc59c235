"""Ranks that train through graphs: the compiler is imported once, before they are forked."""

import os

from accelz.conformance.cluster import preload

preload("zero.compiled.model")
# Of so many collectives torch remembers who called them; a test makes as many, so that it forgets older ones.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")
