"""Parameters in flat buffers, cut over the ranks: units, their life, and whole values out of shards.

Rooms, lowest first: `layout` (arithmetic), `guard` (what a parameter is without its values), `units`,
`flat_group`, `sharded_unit`, `schedule`, `unit_hooks`; `whole` and `model_state` for values by name.
"""
