"""Broken doubles of sound backends: each lie breaks one promise of the interface.

`rounds.ROUNDS` puts many lies into one accelerator, so that a few runs of the kit try them all. Of each kind
there is at least one for every role: a wrong value, a value of the wrong type, an error, memory that is kept.
Lies about what only a device can have are told about the simulated one (`SIM_ROUNDS`).
"""
