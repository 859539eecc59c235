"""Weights in the formats of others, read as sources: see zero.consolidate.source.

Rooms, lowest first: `crc`, `inert_pickle` (pickles, read without running anything), `torch_file` (files of
torch.save), `record_source`, `safetensors_*`, `deepspeed*`, `dcp`. None of them imports torch.
"""
