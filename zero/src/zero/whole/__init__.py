"""Whole values, assembled from all ranks' parts or distributed to them. Collective.

Modules, lowest first:

full_parameters         parameters by name
gathered                `zero.gathered`: parameters whole for the length of a block
held_gradients          the gradients of a step, as loops see them
model_state             the model's state dict
optimizer_state         the optimizer's state of a parameter
parameter_statistics    norms and histograms of all
export                  an engine's weights as `from_pretrained` reads them; imported when they are saved
"""
