"""One pass a file: a function of a graph (or a forward and its backward) that changes it in place.

Each says what it needs to find in a graph. They run in the order of `compiled.pipeline`.
"""
