"""Checkpoints: saved by all ranks at once, published in one step, loaded at any world size.

The format is in docs/checkpoint-format.md. Rooms, lowest first: `storage` (all input and output),
`manifest` (what the manifest says), `reader` (tensors by key, every byte checked; no torch, no engine),
`rank_file` (writing one rank's file), `user_state`, `random_state`, `engine_state` (what there is to save),
`exchange` (messages between ranks), `publication` (how a checkpoint comes to its name), `save`, `names`,
`load`.
"""
