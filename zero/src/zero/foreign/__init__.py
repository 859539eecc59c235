"""Weights in the formats of others, read as sources: see zero.consolidate.source.

Rooms, lowest first: `crc`, `torch_file` (files of torch.save, read without running anything),
`record_source`, `deepspeed`.
"""
