"""Checkpoints: saved by all ranks at once, published in one step, loaded at any world size.

The format is in docs/checkpoint-format.md. Rooms, lowest first:

storage, stream         all input and output
manifest, reader        what the manifest says; tensors by key, every byte checked. No torch, no engine
dtypes, user_state, random_state, header, rank_layout, rank_file, engine_state
                        what there is to save, and one rank's file
exchange, problems, together
                        messages and errors between ranks
publication, assembly   how a checkpoint comes to its name; one manifest out of all ranks' reports
save_job                one save
names, group_match, tensor_reader, weights, load_optimizer, load
                        what goes where in another model, and reading it
checkpoints             what the engine holds: its saves, one at a time, and its loads
"""
