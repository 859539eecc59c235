"""Whole values, assembled from all ranks' parts or distributed to them. Collective.

Modules, lowest first:

full_parameters         parameters by name
gathered                `zero.gathered`: parameters whole for the length of a block
model_state             the model's state dict
optimizer_state         the optimizer's state of a parameter
"""
