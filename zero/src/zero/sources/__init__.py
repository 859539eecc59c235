"""Readers of weights, in zero's checkpoints and in other formats, by name, for any part of any tensor.

Modules, lowest first: `source` (the interface), `memory_order`; for zero's format `zero_checkpoint`; for
others `crc`, `inert_pickle` (pickles, read without running anything), `torch_file` (files of torch.save),
`record_source`, `weight_map`, `safetensors_*`, `torch_weights`, `deepspeed*`, `dcp`; `opening` (finding out
the format). None of them imports torch.
"""
