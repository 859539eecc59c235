"""Build an engine from a model, once everything is checked and drafted.

Modules, lowest first:

initial_values          what the ranks came with, compared
build_units             units drafted, and built from their drafts, or anew for another optimizer
build                   all other parts, and the engine
initialization          `zero.initialize`
"""
