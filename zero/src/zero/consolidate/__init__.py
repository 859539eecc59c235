"""Sharded checkpoints to whole weights, on all cores and in little memory.

Rooms, lowest first: `source` (what weights are read from), `memory_order`, `zero_source` (zero's own format),
`plan` (where every byte of the output goes), `workers` (chunks to threads), `cast`, `output` (writing),
`publish` (the output's name, and taking up killed runs), `opening` (which format it is), `run`, `convert`
(to zero's own format), `universal` (to DeepSpeed's).
Sources of other formats are in `zero.foreign`. torch, whose import takes longer than many
models, is only imported to write its own files: by `torch_plan` and `universal`.
"""

from zero.consolidate.convert import convert
from zero.consolidate.opening import open_source
from zero.consolidate.run import Options, Result, consolidate, verify

__all__ = ["Options", "Result", "consolidate", "convert", "open_source", "verify"]
