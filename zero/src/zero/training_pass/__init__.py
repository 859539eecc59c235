"""A pass of training: forward, backward, and when units are gathered, released and reduced.

Modules, lowest first:

call                    one forward of a unit: its place in backwards, and its edges in autograd's graph
progress, under_way     how far a backward is; forwards whose end no hook reported
call_order, unit_calls  the order of all calls, the same on all ranks; the calls of one unit
schedule                the order in which units are needed, as a hint for gathering ahead
training_pass           the one owner of a pass, which knows where training is
boundary                the optimizer step, and other changes of weights between passes
unit_hooks              the hooks on a unit's modules
model_hooks             the hooks on the model and its parameters

Words
-----
pass        forwards, the backward through them, and the boundary, where the optimizer steps.
call        one forward of a unit. Its edges are what autograd's graph holds of it.
order       that of the calls which all ranks make; a backward comes to them in reverse.
ahead       of a call: its backward may come, or is under way; over: it has been.
close       of a group's gradients: no more will come in this backward, and they may be reduced.
hold        to keep a unit gathered; `sharded_unit.Keep` says why beyond a call.
part        a module inside a unit that is called by another way than through the unit.
run         one run of autograd, its task; `progress` has the words of graphs.
"""
