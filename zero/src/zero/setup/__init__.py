"""Build an engine from a model: everything is checked and drafted before anything is changed.

Modules, lowest first: `offload_fit` and `checks` (what is refused), `preparation` (model, optimizer and
settings examined together), `drafts` (units before they are built), `build`, `initialization`
(`zero.initialize`).
"""
