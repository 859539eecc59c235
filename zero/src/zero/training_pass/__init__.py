"""A pass of training: forward, backward, and when units are gathered, released and reduced.

Modules, lowest first:

call                    one forward of a unit: its place in backwards, and its edges in autograd's graph
progress, under_way     how far a backward is; forwards whose end no hook reported
call_order, unit_calls  the order of all calls, the same on all ranks; the calls of one unit
parametrized            parametrizations in a forward
schedule                the order in which units are needed, as a hint for gathering ahead
training_pass           the one owner of a pass, which knows where training is
boundary                the optimizer step, and other changes of weights between passes
unit_hooks              the hooks on a unit's modules
model_hooks             the hooks on the model and its parameters
"""
