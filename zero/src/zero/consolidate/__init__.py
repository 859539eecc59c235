"""Consolidating sharded checkpoints into whole weights, on all cores and in little memory.

Modules, lowest first:

plan                    where every byte of the output goes
workers, cast           chunks to threads; between dtypes
output, publish         writing; giving the output its name, and resuming killed runs
torch_plan              files of torch.save, planned
run                     all of it
convert, universal      to zero's own format; to DeepSpeed's

What they read is in `zero.sources`. Importing torch takes longer than consolidating many a model, so only
`torch_plan` and `universal`, which write its files, do so.
"""

from zero.consolidate.convert import convert
from zero.consolidate.run import Options, Written, consolidate, verify
from zero.sources.opening import open_source

__all__ = ["Options", "Written", "consolidate", "convert", "open_source", "verify"]
