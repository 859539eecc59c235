"""From a model to its engine: everything is checked and drafted before anything is changed.

Rooms, lowest first: `offload_fit` and `checks` (what is refused), `preparation` (model, optimizer and
settings looked at together), `drafts` (units before they are built), `build`, `initialization`
(`zero.initialize`).
"""
