"""A vendor's backend as accelz 0.1.0 wrote it (`accelz new --torch-device`) and its guide filled it in.

It is kept as it was: version 1 of the interface, its modules, and kernels with the signatures of that time.
"""
