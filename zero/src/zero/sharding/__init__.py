"""Parameters in flat buffers, sharded over the ranks: units and their life cycle.

Modules, lowest first:

lifetime                who holds whom: weak references to the model, and upwards; what cannot be copied
layout, gather_format   where parameters sit in a buffer, arithmetic only; in what it is gathered
distributed, forms      which tensor inside is trained, as of a DTensor; which plain tensors hold the values
own_codes               weights that make codes of themselves, to be gathered and computed with
parts                   several parts of a model as one
guard, alterations      what a parameter is while it has no values; changes to it that bypass the engine
stand_in                what `param.grad` is between backward and step
state_entries           names as a state dict has them; some of them
units                   the module tree divided into units; more finely, for graphs
exact, local            which parameters keep their bits; which differ by rank
autocast                which parameters may be cast before they are gathered
sub_group, shard_source a stretch of a shard with its optimizer state; a shard on its way into a gather
binding                 the memory that parameters are views of
flat_group              a flat buffer with its shard; has the glossary of tensors
parameter_guard         what a program may do with a unit's parameters, in each state
sharded_unit            a unit's life cycle: SHARDED -> GATHERING -> GATHERED -> SHARDED
tensors                 tensors in any object
moves                   `model.to(...)` and its like, which may change no parameter
parameter_checks        parameters that were added or changed after the engine was made
"""
