"""Weights in the formats of others, read as sources: see zero.consolidate.source.

Rooms, lowest first: `crc`, `torch_file` (files of torch.save, read without running anything),
`inert_pickle` (other pickles, the same), `record_source`, `safetensors_*`, `deepspeed*`, `dcp`.
"""
