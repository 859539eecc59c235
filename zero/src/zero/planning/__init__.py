"""Memory, traffic and least time of a training step, by arithmetic: nothing is allocated, nobody is asked.

Modules, lowest first:

groups, order           units and groups as numbers; in which order they are used
activations             a forward and backward without values
peaks                   a step played through
memory, traffic         what a rank keeps in each memory; what it sends
step_time               how long that takes at least
text                    all of it for people
plan                    `zero.plan`
target, command         the model that `zero plan` is asked about; the command
"""
