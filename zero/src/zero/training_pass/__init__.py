"""A model's forward and backward, followed by hooks: when units are gathered and released.

Modules, lowest first:

progress, under_way     how far a backward is; forwards whose end no hook reported
turn, call_order        a call's place in backwards; the order of all calls, the same on all ranks
parametrized            parametrizations in a forward
schedule                the order in which units are needed, as a hint for gathering ahead
unit_call               what a graph holds of one forward of a unit
unit_hooks              when a unit is gathered and released
model_hooks             what happens before, during and after a forward or backward of the whole model
"""
