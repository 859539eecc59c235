"""Checkpoints: saved by all ranks at once, published in one step, loaded at any world size.

The format is documented in docs/checkpoint-format.md. Modules, lowest first:

boundary                whatever reading raises, as errors of zero
storage, stream         all input and output
value_forms, manifest, reader
                        the manifest; reading tensors by key, with every byte checked. No torch, no engine
dtypes, random_state, header, rank_layout, rank_file, user_state, engine_state
                        what a save consists of, and one rank's file
program_end, save_messages, problems, together
                        messages and errors between ranks
in_place, pointer, publication, manifest_assembly
                        publishing a checkpoint under its name, and what `latest` says; one manifest from all
                        ranks' reports
save_start              all ranks start a save, or none
save_job, background    one save; one in a thread of its own
names, group_match, group_options, tensor_reader, weights, load_optimizer, load
                        matching stored tensors to another model, and reading them
checkpoints             what the engine uses: its saves, one at a time, and its loads
"""
