"""Readers of weights, in zero's checkpoints and in other formats, by name, for any part of any tensor.

Modules, lowest first:

source                  the interface
assembled               tensors put together from blocks
crc                     checksums of stretches, combined
bounded_unpickler, inert_pickle
                        pickles, read in bounded work and without running anything
zip_directory, torch_file
                        files of torch.save
record_source           weights in records of files
flat_groups             where parameters lie in DeepSpeed's flat groups
safetensors_files       safetensors
torch_weights           weights in files of torch.save
deepspeed_files, deepspeed
                        checkpoints of DeepSpeed
dcp, zero_checkpoint    checkpoints of torch.distributed.checkpoint; zero's own
opening                 finding out the format

None of them imports torch.
"""
