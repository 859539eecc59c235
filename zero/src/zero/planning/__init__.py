"""Memory and traffic of a training step, by arithmetic: nothing is allocated and nobody is asked.

Modules, lowest first:

groups, order           units and groups as numbers; in which order they are used
activations             a forward and backward without values
peaks                   a step played through
memory, traffic         what a rank keeps in each memory; what it sends
text                    all of it for people
plan                    `zero.plan`
target, command         the model that `zero plan` is asked about; the command
"""
