"""The files that checkpoints and weights consist of: formats, reading, publishing. Without torch.

The format of checkpoints is documented in docs/checkpoint-format.md. Modules, lowest first:

boundary                whatever reading raises, as errors of zero
storage, stream         all input and output
boxes                   parts of tensors, read from memory of any order
value_forms, manifest   the manifest, and what it may hold
strict_json, weight_map JSON that may hold anything; which file has which weight
safetensors_header      where tensors are in safetensors files
rank_layout, manifest_assembly
                        one rank's file; one manifest from all ranks' reports
reader                  finding a checkpoint; reading tensors by key, with every byte checked
names                   matching stored tensors to a model's, by name
in_place, pointer, publication
                        publishing a checkpoint under its name, and what `latest` says
safetensors_weights     reading any part of any tensor in safetensors files
dtypes                  torch's dtypes by their names in files: the only module here that imports torch
"""
