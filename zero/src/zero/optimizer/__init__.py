"""The user's optimizer over this rank's pieces.

Rooms, lowest first: `joint` (several optimizers as one), `kernel_rules`, `stepping` (by what each parameter
is stepped), `checks`, `state_size`, `routes` (which rank steps a whole parameter), `owned`, `pieces`,
`group_step` (one sub-group's step by a kernel), `exchange` and `own_step` (steps by the optimizer itself),
`visitor` and `visits` (records of the host, stepped on the device), `twin` and `ahead` (records stepped while
backward goes on), `sharded_optimizer`, `optimizer_state`.
"""
