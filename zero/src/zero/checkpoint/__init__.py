"""Checkpoints: saved by all ranks at once, published in one step, loaded at any world size.

What they consist of is in `zero.files`, and reading into models in `zero.loading`. Modules, lowest first:

random_state, rank_file, user_state, storable, stored_names, engine_state
                        what a save consists of, under which names, and one rank's file
save_messages           messages between ranks
save_start              all ranks start a save, or none
save_job                one save, perhaps in a thread of its own
param_groups, load_optimizer, load
                        matching stored tensors to another model, and reading them
checkpoints             what the engine uses: its saves, one at a time, and its loads
"""
