"""Sharded checkpoints to whole weights, on all cores and in little memory.

Rooms, lowest first: `plan` (where every byte of the output goes), `workers` (chunks to threads), `cast`,
`output` (writing), `publish` (the output's name, and taking up killed runs), `run`, `convert` (to zero's own
format), `universal` (to DeepSpeed's). What they read is in `zero.sources`. torch, whose import takes longer
than many models, is only imported to write its own files: by `torch_plan` and `universal`.
"""

from zero.consolidate.convert import convert
from zero.consolidate.run import Options, Result, consolidate, verify
from zero.sources.opening import open_source

__all__ = ["Options", "Result", "consolidate", "convert", "open_source", "verify"]
