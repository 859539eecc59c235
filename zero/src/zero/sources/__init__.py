"""Readers of weights, in zero's checkpoints and in other formats, by name, for any part of any tensor.

Modules, lowest first:

source, memory_order    the interface; tensors that are not row-major
crc                     checksums of stretches, combined
bounded_unpickler, inert_pickle
                        pickles, read in bounded work and without running anything
zip_directory, torch_file
                        files of torch.save
record_source           weights in records of files
strict_json             JSON that may hold anything
weight_map, flat_groups
                        which file has which weight; where parameters lie in DeepSpeed's flat groups
safetensors_header, safetensors_weights, safetensors_files
                        safetensors: one file, and several
torch_weights           weights in files of torch.save
deepspeed_files, deepspeed_weights, deepspeed
                        checkpoints of DeepSpeed
dcp, zero_checkpoint    checkpoints of torch.distributed.checkpoint; zero's own
opening                 finding out the format

None of them imports torch.
"""
