"""Parameters in flat buffers, cut over the ranks: units, their life, and whole values out of shards.

Rooms, lowest first:

layout, cast            where parameters sit in a buffer, arithmetic only; in what form a buffer is gathered
guard, alterations      what a parameter is while its values are away; what happens to it beside the engine
state_entries, units    names as a state dict has them; the module tree cut into units
autocast                which parameters may be cast before they are gathered
sub_group, shard_source a stretch of a shard with its optimizer state; a shard on its way into a gather
flat_group              a flat buffer with its shard: the glossary of tensors is here
sharded_unit            a unit's life: SHARDED -> GATHERING -> GATHERED -> SHARDED
schedule                in what order units are needed, as a hint for gathering ahead
progress, tensors, under_way
                        how far a backward is; tensors in anything; forwards that no hook has ended
unit_hooks              when a unit is gathered and released
whole, model_state      whole values by name; the model's state dict
late_parameters         parameters that came, or changed, after the engine was made
uncopied                what belongs to an engine cannot be copied
"""
