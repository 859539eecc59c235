"""The user's optimizer over this rank's pieces.

Rooms, lowest first: `kernel_rules` and `state_size` (which optimizers, with what state), `owned`, `pieces`,
`group_step` (one sub-group's step), `visitor` and `visits` (records of the host, stepped on the device),
`twin` and `ahead` (records stepped while backward goes on), `sharded_optimizer`, `optimizer_state`.
"""
