"""Where weights are read from: checkpoints of zero and of others, by parameter, any part of any tensor.

Rooms, lowest first: `source` (what a source is), `memory_order`; zero's own: `zero_checkpoint`; of others:
`crc`, `inert_pickle` (pickles, read without running anything), `torch_file` (files of torch.save),
`record_source`, `weight_map`, `safetensors_*`, `torch_weights`, `deepspeed*`, `dcp`; `opening` (which
format it is). None imports torch.
"""
