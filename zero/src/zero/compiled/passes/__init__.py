"""One pass per file: a function that changes a graph (or a forward and its backward) in place.

Each says what it needs to find in a graph. They run in the order of `compiled.pipeline`.
"""
