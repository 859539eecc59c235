"""Memory and traffic of a training step, by arithmetic: nothing is allocated and nobody is asked.

Modules, lowest first: `groups` (units and groups as numbers), `order` (in which units are used), `peaks` (a
step played through), `memory`, `traffic`, `text`, `plan` (`zero.plan`); `target` and `command` for the
command line.
"""
